"""Which parameters of somebody's module are its projections: by their names and shapes, or as told."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
from numpy.typing import NDArray

Array = NDArray[np.float64]

ROLES = ("query", "key", "value", "out")
_NAMES = {
    "query": r"(^|[._])(query|q|wq|w_q|to_q|q_proj|query_proj)([._]|$)",
    "key": r"(^|[._])(key|k|wk|w_k|to_k|k_proj|key_proj)([._]|$)",
    "value": r"(^|[._])(value|v|wv|w_v|to_v|v_proj|value_proj)([._]|$)",
    "out": r"(^|[._])(out|output|o|wo|w_o|to_out|o_proj|out_proj)([._]|$)",
}


@dataclasses.dataclass(frozen=True)
class Projections:
    """The projections of a module, float64.

    Attributes:
        weights: by role, `[D, N, H]`, `[D, K, H]`, `[D, K, V]` and `[N, V, D]`; those that were found.
        biases: by role, `[N, H]`, …, `[D]`; those that it has.
        names: by role, where the weight stands.
    """

    weights: Mapping[str, Array]
    biases: Mapping[str, Array]
    names: Mapping[str, str]

    @property
    def complete(self) -> bool:
        """Whether all four were found."""
        return set(self.weights) == set(ROLES)

    def heads(self, role: str, x: Array) -> Array:
        """Queries, keys or values `[B, T, heads, width]` of inputs `[B, T, D]`."""
        return np.einsum("btd,dnh->btnh", x, self.weights[role]) + self.biases.get(role, 0)

    def merged(self, x: Array) -> Array:
        """The output `[B, T, D]` of what heads fetched, `[B, T, N, V]`."""
        return np.einsum("btnv,nvd->btd", x, self.weights["out"]) + self.biases.get("out", 0)


def find(module: nnx.Module, width: int, parameters: Mapping[str, str], num_heads: int | None) -> Projections:
    """The projections of a module of width D.

    Args:
        module: whose parameters are looked through.
        width: D.
        parameters: by role, the path of its weight, where names do not tell.
        num_heads: N, of weights that are stored as matrices `[D, N H]`; None if they have an axis for heads. Keys and
            values may have fewer: their heads are as wide as those of queries and of the output.

    Raises:
        ValueError: on a role or a path that is none, or a weight that is named and does not fit.
    """
    unknown = sorted(set(parameters) - set(ROLES))
    if unknown:
        raise ValueError(f"parameters must name roles among {', '.join(ROLES)}, got {unknown[0]!r}")
    stored = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    weights, biases, names = {}, {}, {}
    for role in ("query", "out", "key", "value"):  # what the others take their widths from comes first
        if role in parameters and parameters[role] not in stored:
            there = ", ".join(stored) or "none"
            raise ValueError(
                f"parameters[{role!r}] must be the path of a parameter ({there}), got {parameters[role]!r}"
            )
        paths = [parameters[role]] if role in parameters else [x for x in stored if re.search(_NAMES[role], x.lower())]
        for path in paths:
            array = np.asarray(_read(stored[path]), np.float64)
            of = weights.get("query" if role == "key" else "out") if role in ("key", "value") else None
            head_width = None if of is None else of.shape[2 if role == "key" else 1]
            shaped = _shaped(array, role, width, num_heads, head_width)
            if shaped is not None and role not in weights:
                weights[role], names[role] = shaped, path
        for path in paths:
            array = np.asarray(_read(stored[path]), np.float64)
            if "bias" in path.lower() and role in weights:
                shape = weights[role].shape[1:] if role != "out" else weights[role].shape[2:]
                if array.size == np.prod(shape):
                    biases[role] = array.reshape(shape)
        if num_heads is not None and role in parameters and role not in weights:
            shape, cut = np.shape(_read(stored[parameters[role]])), f"num_heads={num_heads} and width={width} cut"
            raise ValueError(f"parameters[{role!r}] must be a weight that {cut}, got shape {shape}")
    weights, biases, names = ({role: x[role] for role in ROLES if role in x} for x in (weights, biases, names))
    return Projections(weights, biases, names)


def _read(variable: Any) -> Any:
    return variable[...] if isinstance(variable, nnx.Variable) else variable


def _shaped(array: Array, role: str, width: int, num_heads: int | None, head_width: int | None) -> Array | None:
    """A weight with its axis of heads, or None if it cannot be one."""
    if array.ndim == 3:
        return array if array.shape[0 if role != "out" else 2] == width else None
    if array.ndim != 2 or num_heads is None:
        return None
    if role == "out":
        fits = array.shape[1] == width and array.shape[0] % num_heads == 0
        return array.reshape(num_heads, -1, width) if fits else None
    heads = num_heads if head_width is None or array.shape[1] % head_width else array.shape[1] // head_width
    fits = array.shape[0] == width and array.shape[1] % heads == 0 and num_heads % heads == 0
    return array.reshape(width, heads, -1) if fits else None

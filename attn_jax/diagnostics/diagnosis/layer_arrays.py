"""What one layer's attention got and gave: the form in which captured and observed layers are judged."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.diagnostics import reference
from attn_jax.diagnostics.reference import Array, Mask
from attn_jax.exact.arguments import prepare
from attn_jax.exact.attention import dot_product_attention

CUT = 64  # tokens that are explained of a layer that looks back only
EDGE = 4  # rows at the end of a cut piece, which may look past it
LONGEST = 256  # tokens of a layer that looks ahead, too


@dataclasses.dataclass(frozen=True)
class LayerArrays:
    """One layer's attention, in float64.

    Attributes:
        query, key, value: `[B, T, N, H]`, `[B, S, K, H]`, `[B, S, K, V]`.
        output: `[B, T, N, V]`, before the output projection; None: not known.
        visible: which keys queries may see, `[B, N, T, S]`; None: not known.
        bias: added to the logits, `[B, N, T, S]`; None: nothing.
        scale: on q·k, `[N]`; None: not known.
        cap: of the logits; None: none.
        sinks: logits of the sinks, `[N]`; None: none.
        rounding: the spacing of the stored numbers, relative to them.
    """

    query: Array
    key: Array
    value: Array
    output: Array | None = None
    visible: Mask | None = None
    bias: Array | None = None
    scale: Array | None = None
    cap: float | None = None
    sinks: Array | None = None
    rounding: float = float(np.finfo(np.float32).eps)

    @property
    def square(self) -> tuple[int, int, int, int]:
        """B, N, T and S."""
        return (self.query.shape[0], self.query.shape[2], self.query.shape[1], self.key.shape[1])

    def first(self, count: int) -> "LayerArrays":
        """The first tokens: what a layer that looks back only gives is not changed by the others."""
        cut = {name: getattr(self, name)[:, :count] for name in ("query", "key", "value")}
        cut["output"] = None if self.output is None else self.output[:, :count]
        for name in ("visible", "bias"):
            square = getattr(self, name)
            cut[name] = None if square is None else square[..., :count, :count]
        return dataclasses.replace(self, **cut)


def capture_layer(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Any = None,
    mask: Any = None,
    *,
    attention_fn: Callable[..., Any] = dot_product_attention,
    **options: Any,
) -> dict[str, jax.Array]:
    """An `observe` function that keeps all of it, for a few tokens; `layers_of` reads what comes of it."""
    problem = prepare(query, key, value, bias, mask, **options)
    given = {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None} | options
    heads, square = query.shape[-2], problem.square.shape
    visible = jnp.ones(square, bool)
    if problem.mask is not None:
        visible = jnp.broadcast_to(problem.mask.evaluate(problem.tile), square)
    kept = {"query": query, "key": key, "value": value, "output": attention_fn(query, key, value, **given)}
    if problem.bias is not None:
        kept["bias"] = jnp.broadcast_to(problem.bias.evaluate(problem.tile, jnp.float32), square)
    if problem.sinks is not None:
        kept["sinks"] = problem.sinks
    if problem.logits_soft_cap is not None:
        kept["cap"] = jnp.asarray(problem.logits_soft_cap)
    return {**kept, "visible": visible, "scale": jnp.broadcast_to(jnp.asarray(problem.scale), (heads,))}


def layers_of(captured: dict[str, jax.Array]) -> list[LayerArrays]:
    """One for each layer, of what `capture_layer` brought back, stacked."""
    rounding = float(jnp.finfo(captured["query"].dtype).eps)
    arrays = {
        name: np.asarray(x) if x.dtype == bool else np.asarray(x, np.float64)  # type: NDArray[Any]
        for name, x in captured.items()
    }
    layers = []
    for layer in range(len(arrays["query"])):
        own: dict[str, Any] = {name: x[layer] for name, x in arrays.items()}
        own |= {name: float(x) for name, x in own.items() if name == "cap"}
        layers.append(LayerArrays(**own, rounding=rounding))
    return layers


@dataclasses.dataclass(frozen=True)
class Context:
    """A layer on which explanations are tried: its arrays with one key/value head for each query head.

    Attributes:
        arrays: as they came.
        key, value: `[B, S, N, H]`, `[B, S, N, V]`.
        visible: `[B, N, T, S]`.
        scale: `[N]`, that was asked for, or the usual one.
        known: rows that are compared, `[B, N, T]`.
    """

    arrays: LayerArrays
    key: Array
    value: Array
    visible: Mask
    scale: Array
    known: Mask

    @property
    def query(self) -> Array:
        """`[B, T, N, H]`."""
        return self.arrays.query

    def logits(self, query: Array, key: Array, *, scale: Array | None = None, bias: Array | str | None = "") -> Array:
        """Scaled scores with the bias (the layer's own unless another is given), before cap and mask."""
        scale = self.scale if scale is None else scale
        logits = scale[:, None, None] * reference.scores(query, key)
        bias = self.arrays.bias if isinstance(bias, str) else bias
        return logits if bias is None else logits + bias

    def weights(self, logits: Array, visible: Mask | None = None) -> Array:
        """Softmax over what is seen."""
        visible = self.visible if visible is None else np.broadcast_to(visible, logits.shape)
        return reference.weights(logits, visible, cap=self.arrays.cap, sinks=self.arrays.sinks)

    def attend(
        self, query: Array | None = None, key: Array | None = None, value: Array | None = None,
        visible: Mask | None = None, bias: Array | str | None = "",
    ) -> Array:  # fmt: skip
        """Attention with some of it changed."""
        query, key = self.query if query is None else query, self.key if key is None else key
        weights = self.weights(self.logits(query, key, bias=bias), visible)
        return reference.outputs(weights, self.value if value is None else value)

    def misfit(self, output: Array, heads: Mask | None = None) -> Array:
        """‖output − o‖ / ‖o‖, `[N]`, or of some heads together, `[]`."""
        assert self.arrays.output is not None
        counted = np.swapaxes(self.known, 1, 2)[..., None]
        with np.errstate(all="ignore"):
            rest = np.where(counted, output - self.arrays.output, 0)
            rest, size = (rest**2).sum(axis=(0, 1, 3)), np.where(counted, self.arrays.output**2, 0).sum(axis=(0, 1, 3))
            if heads is not None:
                rest, size = rest[heads].sum(), size[heads].sum()
            return np.sqrt(np.nan_to_num(rest / np.where(size == 0, 1, size), nan=np.inf, posinf=np.inf))


def contexts(arrays: LayerArrays) -> list[Context]:
    """The layer with what is not known filled in: the usual scale, and masks, those first that explain it better.

    None, if it is too long: a layer that looks ahead cannot be cut.
    """
    assert arrays.output is not None
    _, _, length, keys = arrays.square
    looks_back = arrays.visible is None or not (arrays.visible & (np.arange(keys) > np.arange(length)[:, None])).any()
    cut = looks_back and length == keys and length > CUT
    if cut:
        arrays = arrays.first(CUT)
    elif max(length, keys) > LONGEST:
        return []
    _, heads, length, keys = arrays.square
    assert arrays.output is not None
    group = heads // arrays.key.shape[2]
    key, value = (np.repeat(x, group, axis=2) for x in (arrays.key, arrays.value))
    scale = np.full(heads, arrays.query.shape[-1] ** -0.5) if arrays.scale is None else arrays.scale
    known = np.isfinite(arrays.output).all(axis=-1) & np.isfinite(arrays.query).all(axis=-1)
    known = np.swapaxes(known, 1, 2)
    if cut:
        known = known & (np.arange(length) < length - EDGE)
    found = []
    options = [arrays.visible] if arrays.visible is not None else [np.tri(length, keys, dtype=bool), np.True_]
    for visible in options:
        seen = np.broadcast_to(visible, arrays.square)
        one = Context(arrays, key, value, seen, scale, known & seen.any(axis=-1))
        found.append((float(one.misfit(one.attend(), np.ones(heads, bool))), one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]

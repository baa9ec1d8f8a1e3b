"""What the parameters of attention layers show: ties, copies, heads that write nothing, an output that does not mix."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from attn_jax.diagnostics import head_weights
from attn_jax.diagnostics.diagnosis.findings import Finding
from attn_jax.diagnostics.diagnosis.limits import Limits
from attn_jax.diagnostics.diagnosis.rules import HALF, where
from attn_jax.diagnostics.diagnosis.words import finding
from attn_jax.diagnostics.head_weights import Array
from attn_jax.diagnostics.symmetry import weight_symmetry

DEAD, SAME = 1e-4, 1 - 1e-6  # of the median head; cosine of copies
SMALL_OUTPUT = 0.01  # gain of W_O beside that of W_V; a usual initialisation has 1, GPT-2's 0.1
LOW_RANK = 0.5  # of what W_O could have
ROLES = {
    "query": r"^(query|q|wq|w_q|to_q|q_proj|query_proj)$",
    "key": r"^(key|k|wk|w_k|to_k|k_proj|key_proj)$",
    "value": r"^(value|v|wv|w_v|to_v|v_proj|value_proj)$",
    "out": r"^(out|output|o|wo|w_o|to_out|o_proj|out_proj)$",
}

Weights = Mapping[str, Array]  # by role: [D, N, H], [D, K, H], [D, K, V], [N, V, D]


def of_transformer(model: Any) -> dict[int, Weights]:
    """The weights of the layers of an `attn_jax.nn.Transformer` that have attention, by layer."""
    found: dict[int, Weights] = {}
    kinds = model.config.layer_mixers
    stacks = [model.layers] if len(kinds) == 1 else list(model.layers)
    for kind, stack in enumerate(stacks):
        if stack.attention is None:
            continue
        names = {"query": "query_weight", "key": "key_weight", "value": "value_weight", "out": "output_weight"}
        read = {role: getattr(stack.attention, name) for role, name in names.items()}
        arrays = {role: np.asarray(x[...], np.float64) for role, x in read.items() if x is not None}
        for i in range(len(arrays["query"])):
            found[kind + i * len(kinds)] = {role: x[i] for role, x in arrays.items()}
    return dict(sorted(found.items()))


def flax_of(module: Any) -> Any:
    """`flax.nnx`, for a module of it, else None: attention in arrays needs no Flax, and does not load it."""
    nnx = sys.modules.get("flax.nnx")
    return nnx if nnx is not None and isinstance(module, nnx.Module) else None


def of_parameters(module: Any) -> dict[int, Weights]:
    """The weights of any NNX module, or of nested parameters by name, in the order of their names.

    A weight is found by its name (`query`, `q_proj`, `to_q`, …) and by an axis for heads.
    """
    nnx = flax_of(module)
    if nnx is not None:
        flat = {path: variable[...] for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    else:
        flat = dict(_flat(module))
    groups: dict[tuple[Any, ...], dict[str, Array]] = {}
    for path, x in flat.items():
        array = np.asarray(x)
        if array.ndim != 3 or array.dtype.kind != "f":
            continue
        for at, part in enumerate(path):
            role = next((role for role, name in ROLES.items() if re.match(name, str(part).lower())), None)
            if role is not None and not any(word in str(path[-1]).lower() for word in ("bias", "norm", "scale")):
                groups.setdefault(path[:at], {}).setdefault(role, array.astype(np.float64))
    ordered = sorted(groups.items(), key=lambda item: [_number(part) for part in item[0]])
    return dict(enumerate(weights for _, weights in ordered if "query" in weights))


def _flat(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, Mapping):
        for name, branch in tree.items():
            yield from _flat(branch, (*path, name))
    else:
        yield path, tree


def _number(part: Any) -> tuple[str, int]:
    """Names with numbers in the order of the numbers."""
    digits = re.search(r"\d+", str(part))
    return re.sub(r"\d+", "", str(part)), int(digits.group()) if digits else 0


def examine(layers: Mapping[int, Weights], limits: Limits, *, tied: bool = False) -> Iterator[Finding]:
    """Findings on the weights.

    Args:
        layers: by index.
        limits: lines.
        tied: whether a configuration says that keys are made by W_Q.
    """
    broken = {n for n, own in layers.items() if not all(np.isfinite(x).all() for x in own.values())}
    if broken:
        at = tuple(sorted(broken))
        yield finding("parameters", f"Weights are not finite ({where(at)}).", severity="serious", layers=at)
    sound = {n: own for n, own in layers.items() if n not in broken}
    if tied:
        evidence = "Keys are made by W_Q: the configuration ties them."
        yield finding("tied_projections", evidence, severity="notice", layers=tuple(sound), value=0.0, limit=0.0)
    yield from _ties(sound)
    yield from _symmetric(sound, limits)
    yield from _outputs(sound)
    yield from _heads(sound)


def _ties(layers: Mapping[int, Weights]) -> Iterator[Finding]:
    pairs: dict[tuple[str, str], list[int]] = {}
    for n, own in layers.items():
        for pair in head_weights.equal_projections(own):
            pairs.setdefault(pair, []).append(n)
    for (one, other), at in pairs.items():
        evidence = f"W_{one[0].upper()} and W_{other[0].upper()} are equal ({where(tuple(at))})."
        yield finding(
            "tied_projections", evidence, severity="serious", layers=tuple(at), value=0.0, limit=head_weights.ALIKE
        )


def _symmetric(layers: Mapping[int, Weights], limits: Limits) -> Iterator[Finding]:
    if limits.symmetry is None:
        return
    worst, heads = {}, []
    for n, own in layers.items():
        if "key" in own and not head_weights.equal_projections(own):
            symmetry = np.asarray(weight_symmetry(own["query"], own["key"]))
            beyond = symmetry > limits.symmetry
            if beyond.mean() >= HALF:
                worst[n] = float(symmetry.max())
                heads += [(n, int(head)) for head in np.flatnonzero(beyond)]
    if worst:
        value, at = max(worst.values()), tuple(worst)
        evidence = f"tr(W²) / |W|² of W_Q W_Kᵀ is {value:.3f} ({where(at)}), limit {limits.symmetry:g}."
        yield finding(
            "symmetry", evidence, severity="notice", layers=at, heads=tuple(heads), value=value, limit=limits.symmetry
        )


def _outputs(layers: Mapping[int, Weights]) -> Iterator[Finding]:
    kinds: dict[str, list[int]] = {}
    small, low = {}, {}
    for n, own in layers.items():
        if "out" not in own:
            continue
        out = own["out"]
        matrix = out.reshape(-1, out.shape[-1])
        kinds.setdefault(head_weights.mixing(out), []).append(n)
        size = float(np.sqrt((out**2).sum() / out.shape[-1]))
        usual = 1.0
        if "value" in own:  # what its input projections were drawn with says what is usual here
            usual = float(np.sqrt((own["value"] ** 2).sum() / np.prod(own["value"].shape[1:])))
        if usual > 0 and size < SMALL_OUTPUT * usual:
            small[n] = size / usual
        elif size > 0:
            sigma = np.linalg.svd(matrix, compute_uv=False)
            share = float((sigma > 1e-5 * sigma[0]).sum()) / min(matrix.shape)
            if share < LOW_RANK:
                low[n] = share
    for kind, says in (("identity", "is the identity"), ("blocks", "keeps each head to its own dimensions")):
        if kind in kinds:
            at = tuple(kinds[kind])
            evidence = f"W_O {says} ({where(at)})."
            yield finding("output_mixing", evidence, severity="serious", layers=at, value=0.0, limit=head_weights.ALIKE)
    if small:
        value, at = min(small.values()), tuple(small)
        zero = value == 0.0 and len(small) == len(layers)  # some begin so
        evidence = f"W_O gains {value:.2g} times what W_V does ({where(at)}), limit {SMALL_OUTPUT:g}."
        yield finding(
            "output_size",
            evidence,
            severity="notice" if zero else "serious",
            layers=at,
            value=value,
            limit=SMALL_OUTPUT,
        )
    if low:
        value, at = min(low.values()), tuple(low)
        evidence = f"W_O has {value:.0%} of the rank that it could have ({where(at)})."
        yield finding("output_rank", evidence, severity="notice", layers=at, value=value, limit=LOW_RANK)


def _heads(layers: Mapping[int, Weights]) -> Iterator[Finding]:
    whole = {n: own for n, own in layers.items() if {"query", "value", "out"} <= set(own)}
    norms = {n: head_weights.fetch_norms(own["value"], own["out"]) for n, own in whole.items()}
    dead: list[tuple[int, int]] = []
    for n, own in norms.items():
        if own.max() > 0:
            dead += [(n, int(head)) for head in np.flatnonzero(own < DEAD * np.median(own[own > 0]))]
    if dead:
        at = tuple(dict.fromkeys(n for n, _ in dead))
        evidence = f"W_V W_O of {where(at, tuple(dead))} is nothing beside the median head's."
        yield finding("dead_heads", evidence, severity="notice", layers=at, heads=tuple(dead), value=0.0, limit=DEAD)
    copies: dict[int, Sequence[Sequence[int]]] = {}
    for n, own in whole.items():
        match, fetch = head_weights.alike(own["query"], own.get("key", own["query"]), own["value"], own["out"])
        same = np.argwhere(np.triu(np.minimum(match, fetch) > SAME, 1)).tolist()
        patterns = np.argwhere(np.triu(match > SAME, 1)).tolist()
        if same or patterns:
            copies[n] = same or patterns
    if copies:
        at = tuple(copies)
        heads = tuple(dict.fromkeys((n, head) for n, pairs in copies.items() for pair in pairs for head in pair))
        (one, other) = next(iter(copies.values()))[0]
        evidence = (
            f"Heads {one} and {other} of layer {at[0]} have one W_Q W_Kᵀ; {len(heads)} such heads in {where(at)}."
        )
        yield finding("equal_heads", evidence, severity="serious", layers=at, heads=heads, value=1.0, limit=SAME)

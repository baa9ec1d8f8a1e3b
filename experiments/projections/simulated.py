"""What `projections` simulates of queries and keys: tokens on their own diagonal, symmetry, biases."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import attn_jax
from attn_jax import diagnostics, positions
from attn_jax.projections import project
from attn_jax.typing import Array, Float
from experiments.artifacts import Row
from experiments.projections.config import BIASES, POSITIONS, SPREADS, VARIANCES, ProjectionsConfig
from experiments.sampling import cut_to_widths, each_seed, measure_rows, rows_of

lecun = jax.nn.initializers.lecun_normal()


def diagonal(config: ProjectionsConfig) -> list[Row]:
    """How much a token attends to itself among n, at every width d.

    Without projections: with norms that differ and components of another variance, scaled by 1/√d, and unscaled.
    With projections W_Q and W_K of d columns, separate and tied.
    """
    widths, widest, longest = jnp.asarray(config.widths, jnp.float32), config.widths[-1], config.lengths[-1]
    scaled, lengths = 1 / jnp.sqrt(widths), jnp.asarray(config.lengths)
    bare = {f"spread {s}": (s, scaled) for s in SPREADS}
    bare |= {f"variance {v}": (0.0, v * scaled) for v in VARIANCES}  # q·k is quadratic in the tokens
    bare |= {"unscaled": (0.0, jnp.ones_like(widths))}
    spreads, scales = jnp.asarray([s for s, _ in bare.values()]), jnp.stack([f for _, f in bare.values()])

    def measure(key: Array) -> dict[str, Array]:
        streams = jax.random.split(key, 4)
        x = jax.random.normal(streams[0], (longest, widest))
        norms = jax.random.normal(streams[1], (longest, 1, 1))
        unit = _unit(cut_to_widths(x, config.widths)) * jnp.sqrt(widths)[None, :, None]

        def among(n: Array, query: Array, keys: Array, scale: Array) -> dict[str, Array]:
            return _on_diagonal(query, keys, scale, rows=config.rows, key_value_seq_lengths=n)

        def without(spread: Array, scale: Array) -> dict[str, Array]:
            tokens = unit * jnp.exp(spread * norms - spread**2)  # mean square 1
            return jax.lax.map(lambda n: among(n, tokens, tokens, scale), lengths)

        stream = _unit(x) * math.sqrt(widest)
        query, keys = (cut_to_widths(stream @ lecun(streams[i], (widest, widest)), config.widths) for i in (2, 3))
        found = [
            jax.lax.map(lambda one: without(*one), (spreads, scales)),
            jax.lax.map(lambda k: jax.lax.map(lambda n: among(n, query, k, scaled), lengths), jnp.stack([keys, query])),
        ]
        return jax.tree.map(lambda *x: jnp.concatenate(x), *found)

    values = each_seed(measure, config.seed, config.seeds, stream="diagonal")
    axes = {"arm": [*bare, "W_Q, W_K", "W_Q = W_K"], "length": config.lengths, "width": config.widths}
    return [row for name, x in values.items() for row in rows_of(x, axes, part="diagonal", measure=name)]


def _on_diagonal(
    query: Float[Array, "n w d"], key: Float[Array, "n w d"], scale: Float[Array, " w"], *, rows: int, **options: Any
) -> dict[str, Float[Array, " w"]]:
    """Mean weight of a token on itself, and the share of rows whose largest weight that is."""
    own = jnp.arange(rows)
    found = measure_rows(
        query, key, "diagonal_mass", "argmax_key", rows=own, scale=scale, implementation="dense", **options
    )
    return {
        "weight": found["diagonal_mass"].mean(axis=0),
        "largest": jnp.mean(found["argmax_key"] == own[:, None], axis=0),
    }


def _unit(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def symmetry(config: ProjectionsConfig) -> list[Row]:
    """What the scores of one layer can say of three contents, and whether its weights are symmetric.

    All but the asymmetry are root mean squares over that of as many unrelated scores: 1 if nothing forbids them.
    """
    width, heads, tokens = config.stream_width, config.heads, config.tokens
    own, later, earlier = jnp.arange(tokens), jnp.full(tokens, 5), jnp.full(tokens, 2)
    first = jnp.arange(tokens - 3)
    triples = first, first + 1, first + 3

    def measure(key: Array) -> dict[str, dict[str, dict[str, Array]]]:
        streams = jax.random.split(key, 4)
        x, places = (jax.random.normal(stream, (tokens, width)) for stream in streams[:2])
        weights = [lecun(stream, (width, width)).reshape(width, heads, -1) for stream in streams[2:]]

        def scores(kind: str, tied: bool, at: Array, key_at: Array) -> Float[Array, "n t t"]:
            """Of every content as a query that stands at its place of `at`, and as a key at that of `key_at`."""
            query, keys = (x + places[a] if kind == "additive" else x for a in (at, key_at))
            query, keys = project(query, weights[0]), project(keys, weights[0 if tied else 1])
            if kind == "rotary":
                query, keys = positions.apply_rotary(query, at), positions.apply_rotary(keys, key_at)
            return jnp.einsum("tnh,snh->nts", query, keys) / math.sqrt(config.head_width)

        def found(kind: str, tied: bool) -> dict[str, Array]:
            seen, swapped = scores(kind, tied, own, own), scores(kind, tied, later, earlier)
            log_weights, spread = jax.nn.log_softmax(seen, axis=-1), _root_mean_square(seen)
            i, j, _ = triples
            return {
                "cycle": _root_mean_square(_around(log_weights, triples)) / (math.sqrt(6) * spread),
                "swap": _root_mean_square((swapped - swapped.mT)[:, i, j]) / (math.sqrt(2) * spread),
                "ring": _root_mean_square(_around(swapped, triples)) / (math.sqrt(6) * spread),
                "asymmetry": jnp.mean(diagnostics.score_asymmetry(jnp.exp(log_weights))),
            }

        return {arm: {kind: found(kind, arm == "tied") for kind in POSITIONS} for arm in ("separate", "tied")}

    with jax.default_matmul_precision("highest"):
        values = each_seed(measure, config.seed, config.seeds, stream="symmetry")
    return [
        row
        for arm, by_kind in values.items()
        for kind, measured in by_kind.items()
        for name, x in measured.items()
        for row in rows_of(x, {}, part="symmetry", arm=arm, positions=kind, measure=name)
    ]


def _around(scores: Float[Array, "n t t"], triples: tuple[Array, Array, Array]) -> Float[Array, "n c"]:
    """s_ij + s_jk + s_ki − s_ik − s_kj − s_ji, in which what belongs to a row or a column alone cancels."""
    i, j, k = triples
    directed = scores - scores.mT
    return directed[:, i, j] + directed[:, j, k] + directed[:, k, i]


def _root_mean_square(x: Array) -> Array:
    return jnp.sqrt(jnp.mean(x**2))


def biases(config: ProjectionsConfig) -> list[Row]:
    """How much each bias, as large as what it is added to, changes the output of one layer."""
    width, heads, head_width, tokens = config.stream_width, config.heads, config.head_width, config.tokens

    def measure(key: Array) -> dict[str, dict[str, Array]]:
        streams = jax.random.split(key, 8)
        x = jax.random.normal(streams[0], (tokens, width))
        weights = [lecun(stream, (width, width)).reshape(width, heads, head_width) for stream in streams[1:4]]
        out = lecun(streams[4], (width, width)).reshape(heads, head_width, width)
        drawn = [jax.random.normal(stream, (heads, head_width)) for stream in streams[5:]]
        # None of the three, then each alone.
        one_by_one = [jnp.zeros((4, heads, head_width)).at[i + 1].set(bias) for i, bias in enumerate(drawn)]

        def layer(kind: str, added: Sequence[Array]) -> Float[Array, "t d"]:
            query, keys, value = (project(x, *both) for both in zip(weights, added, strict=True))
            if kind == "rotary":
                query, keys = (positions.apply_rotary(y, jnp.arange(tokens)) for y in (query, keys))
            return attn_jax.project_out(attn_jax.dot_product_attention(query, keys, value, is_causal=True), out)

        found = {}
        for kind in ("none", "rotary"):
            plain, *with_bias = jax.vmap(functools.partial(layer, kind))(one_by_one)
            change = {name: y - plain for name, y in zip(BIASES, with_bias, strict=True)}
            change["value, beyond b_V W_O"] = change["value"] - attn_jax.project_out(drawn[2][None], out)
            found[kind] = {name: jnp.linalg.norm(y) / jnp.linalg.norm(plain) for name, y in change.items()}
        return found

    values = each_seed(measure, config.seed, config.seeds, stream="biases")
    return [
        row
        for kind, changes in values.items()
        for name, x in changes.items()
        for row in rows_of(x, {}, part="biases", arm=name, positions=kind, measure="change")
    ]

"""When does the softmax saturate, and what does that do to the gradient?

Claims: S4, S5, S5b, S7 (the initialisation half).
Command: python -m experiments.softmax_saturation --preset=quick --out=results/softmax_saturation
Time: smoke 10 s, quick 40 s, full 3 min on two cores.

The largest weight and the entropy against the width d_k and the number of keys n, scaled by 1/√d_k and not; the range
of H ≈ ln n − v/2; the gradient at the logits, at q and at the projections; the whole Jacobian; two other readings of d.
"""

import math

import jax
import jax.numpy as jnp

import attn_jax
from attn_jax import scaling
from attn_jax.typing import Array
from experiments import harness
from experiments.artifacts import Row
from experiments.harness import Experiment, Result, Unit
from experiments.sampling import cut_to_widths, each_seed, measure_rows, rows_of
from experiments.softmax_saturation import results
from experiments.softmax_saturation.config import SATURATION, SCALES, SaturationConfig

READINGS = ("inverse_sqrt", "inverse_sqrt_model", "half_inverse", "half_inverse_sqrt")
VALUE_WIDTH = 64


def units(config: SaturationConfig) -> list[Unit]:
    by_length = [Unit(f"rows_n{n}", lambda n=n: _rows(config, n)) for n in sorted(config.lengths)]
    return [
        *by_length,
        Unit("small_variance", lambda: _small_variance(config)),
        Unit("projections", lambda: _projections(config)),
        Unit("jacobian", lambda: _jacobian(config)),
        Unit("readings", lambda: _readings(config)),
    ]


def _factors(config: SaturationConfig) -> Array:
    """One head for every scale and width: their factors, flat `[scales · widths]`."""
    return jnp.asarray([scaling.scale_factor(scale, width) for scale in SCALES for width in config.widths])


def _by_scale(config: SaturationConfig, x: Array) -> Array:
    """`[…, scales · widths]` to `[…, scales, widths]`."""
    return x.reshape(*x.shape[:-1], len(SCALES), len(config.widths))


def _rows(config: SaturationConfig, length: int) -> list[Row]:
    """Sharpness of the rows, and the gradient that reaches their logits and their queries, at one n."""
    widest, factors = config.widths[-1], _factors(config)

    def measure(key: Array) -> dict[str, Array]:
        streams = jax.random.split(key, 4)
        query = cut_to_widths(jax.random.normal(streams[0], (config.rows, widest)), config.widths * len(SCALES))
        keys = jax.random.normal(streams[1], (length, 1, widest))
        value = jax.random.normal(streams[2], (length, 1, VALUE_WIDTH))
        upstream = jax.random.normal(streams[3], (config.rows, 1, VALUE_WIDTH))
        fields = measure_rows(query, keys, "max_weight", "normalized_entropy", "sum_p2", scale=factors)
        found = {name: _by_scale(config, x.mean(axis=0)) for name, x in fields.items()}

        def loss(bias: Array, query: Array) -> Array:
            output = attn_jax.dot_product_attention(query, keys, value, bias, scale=factors)
            return jnp.sum(output * upstream)

        # An added bias of zero has the logits' own gradient.
        bias = jnp.zeros((len(factors), config.rows, length))
        at_logits, at_query = jax.grad(loss, argnums=(0, 1))(bias, query)
        for where, norm in {
            "logits": jnp.linalg.norm(at_logits, axis=-1).T,
            "query": jnp.linalg.norm(at_query, axis=-1),
        }.items():
            rows = _by_scale(config, norm)  # [rows, scales, widths]
            median = jnp.median(rows, axis=0)
            found[f"{where}_mean"], found[f"{where}_median"] = rows.mean(axis=0), median
            scaled_median = median[SCALES.index("inverse_sqrt")][None, None, :]
            found[f"{where}_dead"] = (rows < 0.01 * scaled_median).mean(axis=0)
        return found

    values = each_seed(measure, config.seed, config.seeds, stream=f"rows {length}")
    axes = {"arm": SCALES, "head_dim": config.widths}
    return [row for name, x in values.items() for row in rows_of(x, axes, part="rows", length=length, measure=name)]


def _small_variance(config: SaturationConfig) -> list[Row]:
    """How far the entropy is from ln n − v/2, against r = sd/√(2 ln n), with v the row's own logit variance."""
    lengths, ratios, width = sorted(config.lengths), jnp.asarray(SATURATION), 256

    def measure(key: Array) -> Array:
        for_query, for_key = jax.random.split(key)
        query = jax.random.normal(for_query, (config.rows, 1, width)).repeat(len(SATURATION), axis=1)
        keys = jax.random.normal(for_key, (lengths[-1], 1, width))

        def error(length: int) -> Array:
            scale = ratios * math.sqrt(2 * math.log(length) / width)  # sd of q·k is √width
            fields = measure_rows(query, keys[:length], "entropy", "logit_variance", scale=scale)
            return jnp.mean(fields["entropy"] - (math.log(length) - fields["logit_variance"] / 2), axis=0)

        return jnp.stack([error(length) for length in lengths])

    values = each_seed(measure, config.seed, config.seeds, stream="small variance")
    return rows_of(values, {"length": lengths, "ratio": SATURATION}, part="small_variance", measure="entropy_error")


def _projections(config: SaturationConfig) -> list[Row]:
    """The gradient that reaches W_Q, W_K and W_V of self-attention, scaled and not."""
    length, model, widths = config.gradient_length, config.model_width, config.projected
    factors = jnp.asarray([scaling.scale_factor(scale, width) for scale in SCALES for width in widths])

    def measure(key: Array) -> dict[str, Array]:
        streams = jax.random.split(key, 5)
        x, upstream = (
            jax.random.normal(streams[0], (length, model)),
            jax.random.normal(streams[1], (length, 1, VALUE_WIDTH)),
        )
        initial = jax.nn.initializers.lecun_normal()
        full = [initial(streams[i], (model, widths[-1])) for i in (2, 3)]
        query_weight, key_weight = (cut_to_widths(w, widths * len(SCALES)) for w in full)
        value_weight = initial(streams[4], (model, VALUE_WIDTH))[:, None, :].repeat(len(factors), axis=1)

        def loss(weights: tuple[Array, Array, Array]) -> Array:
            query, keys, value = attn_jax.project_qkv(x, *weights)
            return jnp.sum(attn_jax.dot_product_attention(query, keys, value, scale=factors) * upstream)

        gradients = jax.grad(loss)((query_weight, key_weight, value_weight))
        norms = [jnp.linalg.norm(g, axis=(0, 2)).reshape(len(SCALES), len(widths)) for g in gradients]
        return dict(zip(("query_weight", "key_weight", "value_weight"), norms, strict=True))

    values = each_seed(measure, config.seed, config.seeds, stream="projections")
    axes = {"arm": SCALES, "head_dim": widths}
    return [
        row for name, x in values.items() for row in rows_of(x, axes, part="projections", length=length, measure=name)
    ]


def _jacobian(config: SaturationConfig) -> list[Row]:
    """The Jacobian of one row of weights, by automatic differentiation, against its diagonal p(1 − p)."""
    length, widest = config.jacobian_length, config.widths[-1]

    def measure(key: Array) -> dict[str, Array]:
        streams, factors = jax.random.split(key, 3), _factors(config)
        query = cut_to_widths(jax.random.normal(streams[0], (1, widest)), config.widths * len(SCALES))
        keys = jax.random.normal(streams[1], (length, 1, widest))
        upstream = jax.random.normal(streams[2], (length,))

        def weights(bias: Array) -> Array:
            return attn_jax.attention_weights(query, keys, bias[None, None, :], scale=factors)[:, 0]

        bias = jnp.zeros(length)
        p, jacobian = weights(bias), jax.jacfwd(weights)(bias)  # [heads, n], [heads, n, n]: entry i, j is ∂p_i/∂s_j
        diagonal, largest = jnp.diagonal(jacobian, axis1=-2, axis2=-1), jnp.abs(jacobian).max(axis=(-2, -1))
        squared, whole = jnp.sum(jacobian**2, axis=(-2, -1)), jnp.einsum("nij,i->nj", jacobian, upstream)
        found = {
            "trace": jnp.sum(diagonal, axis=-1),
            "frobenius": jnp.sqrt(squared),
            "off_diagonal_share": 1 - _share(jnp.sum(diagonal**2, axis=-1), squared),
            "diagonal_error": _share(jnp.abs(diagonal - p * (1 - p)).max(axis=-1), largest),
            "row_sum": _share(jnp.abs(jacobian.sum(axis=-1)).max(axis=-1), largest),
            "diagonal_only_error": _share(
                jnp.linalg.norm(whole - diagonal * upstream[None, :], axis=-1), jnp.linalg.norm(whole, axis=-1)
            ),
        }
        return {name: _by_scale(config, x) for name, x in found.items()}

    with jax.enable_x64(True):  # of a leader at 1 − 1e-9 float32 only knows 1, and p(1 − p) = 0
        values = each_seed(measure, config.seed, config.seeds, stream="jacobian")
    axes = {"arm": SCALES, "head_dim": config.widths}
    return [row for name, x in values.items() for row in rows_of(x, axes, part="jacobian", length=length, measure=name)]


def _readings(config: SaturationConfig) -> list[Row]:
    """Variance and entropy when d is read as the model width, or doubled outside the root."""
    widths, length, widest = config.projected, config.gradient_length, config.projected[-1]
    factors = [scaling.scale_factor(rule, width, config.model_width) for rule in READINGS for width in widths]

    def measure(key: Array) -> dict[str, Array]:
        for_query, for_key = jax.random.split(key)
        query = cut_to_widths(jax.random.normal(for_query, (config.rows, widest)), widths * len(READINGS))
        keys = jax.random.normal(for_key, (length, 1, widest))
        fields = measure_rows(query, keys, "total_variance", "normalized_entropy", scale=jnp.asarray(factors))
        by_head = {
            "variance": fields["total_variance"],
            "normalized_entropy": fields["normalized_entropy"].mean(axis=0),
        }
        return {name: x.reshape(len(READINGS), len(widths)) for name, x in by_head.items()}

    values = each_seed(measure, config.seed, config.seeds, stream="readings")
    axes = {"arm": READINGS, "head_dim": widths}
    return [row for name, x in values.items() for row in rows_of(x, axes, part="readings", length=length, measure=name)]


def _share(part: Array, whole: Array) -> Array:
    """part / whole, 0 where there is no whole (a row so sharp that its Jacobian underflows)."""
    return jnp.where(whole == 0, 0.0, part / jnp.where(whole == 0, 1.0, whole))


EXPERIMENT = Experiment(
    name="softmax_saturation",
    question="When does the softmax saturate, and what does that do to the gradient?",
    config=SaturationConfig,
    presets={
        "smoke": {
            "head_dims": (4, 16, 64, 512),
            "lengths": (16, 64),
            "gradient_length": 64,
            "jacobian_length": 16,
            "model_width": 128,
        },
        "quick": {},
        "full": {"seeds": 128, "rows": 64},
    },
    units=units,
    judge=results.judge,
    figure=results.figure,
    alt="Six panels. Largest weight and normalised entropy against the head width for several numbers of keys: "
    "unscaled they run to 1 and 0, later for more keys; scaled they stay. The width where the largest weight passes "
    "one half, against ln n. The gradient of unscaled over scaled attention: the median at the logits falls by "
    "orders of magnitude, the mean at q does not. The error of ln n − v/2, small up to about r = 0.5. Trace and "
    "off-diagonal share of the Jacobian.",
    tables=results.tables,
    documentation=__doc__ or "",
)


def run(config: SaturationConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)

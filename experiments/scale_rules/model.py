"""The models of `scale_rules`: how a rule begins, what of it may learn, and what is seen of its logits."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attn_jax.diagnostics import attention_statistics
from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training import losses
from attn_jax.training.objectives import token_loss
from attn_jax.training.tasks import Batch
from attn_jax.typing import Array, Float
from experiments.arms import Arm, Constrained
from experiments.scale_rules.config import LAYERS, ScaleRulesConfig


def make_arm(config: ScaleRulesConfig, rule: str, head_dim: int, vocabulary_size: int) -> Arm:
    """A rule at one head width."""
    sizes: dict[str, Any] = {
        "vocabulary_size": vocabulary_size,
        "num_layers": LAYERS,
        "model_width": config.model_width,
        "num_heads": config.num_heads,
        "head_width": head_dim,
        "value_width": config.widths[0],
        "mlp_width": 2 * config.model_width,
    }
    if rule == "qk_norm":
        return Arm(rule, functools.partial(Transformer, TransformerConfig(**sizes, qk_norm="rms")), measured_loss)
    make_model = functools.partial(
        Scaled,
        TransformerConfig(**sizes, scale_rule="none", learned_temperature=True),
        factor=config.factor(rule, head_dim),
        fold=config.fold(rule, head_dim),
        learns=rule == "temperature",
    )
    return Arm(rule, make_model, scaled_loss)


class Scaled(Transformer):
    """A transformer whose logits are factor · q·k, with the factor among its parameters (the inverse of a temperature).

    So all rules of one head width share one program.

    Args:
        config: without a scale, with learned temperatures.
        factor: at first, and for good unless it learns.
        fold: W_Q begins that many times as large.
        learns: whether the factor is trained, one a head.
        rngs: as for `Transformer`.
    """

    def __init__(self, config: TransformerConfig, *, factor: float, fold: float, learns: bool, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        attention = self.layers.attention
        temperature = jnp.full((config.num_layers, config.num_heads), -math.log(factor))
        attention.log_temperature = nnx.Param(temperature)
        attention.query_weight = nnx.Param(fold * attention.query_weight[...])
        self.factor_learns = nnx.Param(jnp.asarray(float(learns)))


def measured_loss(model: Transformer, batch: Batch, *, key: Array | None) -> tuple[Array, dict[str, Array]]:
    """`token_loss`; in evaluation also what `observe` sees, the largest or the mean over layers."""
    if key is not None:
        return token_loss(model, batch, key=key)
    outputs, seen = model(batch.inputs, observe=observe)
    mean, _ = losses.cross_entropy(outputs, batch.targets, batch.weights)
    share, _ = losses.accuracy(outputs, batch.targets, batch.weights)
    over_layers = {name: jnp.max(x) if name == "max_logit" else jnp.mean(x) for name, x in seen.items()}
    return mean, {"accuracy": share, **over_layers}


def hold_factor(params: dict[str, Any]) -> None:
    """No gradient for the factor, unless the model says that it learns."""
    learns, attention = params["factor_learns"], params["layers"]["attention"]
    fixed = jax.lax.stop_gradient(attention["log_temperature"])
    attention["log_temperature"] = fixed + jax.lax.stop_gradient(learns) * (attention["log_temperature"] - fixed)


scaled_loss = Constrained(hold_factor, measured_loss)


def observe(
    query: Float[Array, "b t n h"], key: Float[Array, "b s n h"], value: Array, **options: Any
) -> dict[str, Float[Array, ""]]:
    """What one layer's logits are like, each but the largest a mean over heads.

    Returns:
        `max_logit`, the largest |logit|; `logit_variance`, over all visible pairs; `query_square` and `key_square`, the
        mean square of a component; `alignment`, that variance over the one of independent q and k of these sizes;
        `entropy` of the rows that have a choice, over its maximum.
    """
    names = ("max_abs_logit", "normalized_entropy", "logit_mean", "logit_variance", "visible_keys")
    found = vars(attention_statistics(query, key, statistics=names, **options))  # [B, T, N]
    share = found["visible_keys"] / jnp.sum(found["visible_keys"], axis=(0, 1), keepdims=True)  # of all visible pairs
    middle = jnp.sum(share * found["logit_mean"], axis=(0, 1), keepdims=True)
    variance = jnp.sum(share * (found["logit_variance"] + (found["logit_mean"] - middle) ** 2), axis=(0, 1))
    query_square, key_square = (jnp.mean(x**2, axis=(0, 1, 3)) for x in (query, key))
    width = query.shape[-1]
    independent = options.get("scale", width**-0.5) ** 2 * width * query_square * key_square
    return {
        "max_logit": jnp.max(found["max_abs_logit"]),
        "logit_variance": jnp.mean(variance),
        "query_square": jnp.mean(query_square),
        "key_square": jnp.mean(key_square),
        "alignment": jnp.mean(variance / independent),
        "entropy": jnp.mean(found["normalized_entropy"][:, 1:]),
    }

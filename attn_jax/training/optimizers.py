"""What turns gradients into steps: an optimizer of optax, its schedule and its clipping, from one frozen record.

    update = -(learning rate) · schedule(step) · direction(clipped gradient)

The schedule is a factor between 0 and 1. The learning rate that it multiplies is no part of the record: it lies in the
state of a run, as an array, so that runs differ in it and share one compile.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from attn_jax import checks
from attn_jax.typing import ArrayLike, Float, Int

OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("constant", "cosine", "linear")
ADAM_ONLY = ("beta2", "epsilon")
DECAY_ONLY = ("total_steps", "final_fraction")
# Gains, offsets, logits and rates are no directions in space: pulling them to 0 means something else. Random features
# and rotations are drawn once and must stay as they are.
NOT_DECAYED = (
    "scale",
    "bias",
    "norm_weight",
    "log_temperature",
    "relative_table",
    "sinks",
    "log_rate",
    "skip",
    "random_features",
    "rotations",
)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer, its schedule and its clipping.

    Attributes:
        name: "adamw", or "sgd" with momentum.
        schedule: after the warm-up "constant", or down to `final_fraction` at `total_steps` by a "cosine" or a line
            ("linear"), and constant from there.
        warmup_steps: w, over which the factor grows by equal steps, 1/(w+1), 2/(w+1), …; the first is not 0.
        total_steps: where the schedule ends, warm-up included.
        final_fraction: of the learning rate, what is left at the end.
        clip_norm: gradients whose norm, over all parameters, is above it are scaled down to it; None: never.
        weight_decay: decoupled from the gradient, times the learning rate; not on biases, norms, sinks and the like.
        beta1: decay of the first moment, or the momentum of "sgd".
        beta2, epsilon: of "adamw".

    Raises:
        ValueError, TypeError: on a value out of range, or one that the other choices leave without effect.

    Reference: Loshchilov and Hutter 2019 (AdamW); Pascanu et al. 2013 (clipping).

    >>> from attn_jax.training import OptimizerConfig
    >>> from attn_jax.training.optimizers import schedule
    >>> config = OptimizerConfig(schedule="linear", warmup_steps=3, total_steps=7)
    >>> [float(schedule(config, step)) for step in range(8)]
    [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]
    >>> OptimizerConfig(name="sgd", beta2=0.9)
    Traceback (most recent call last):
    ValueError: beta2 has no effect with name='sgd' and schedule='constant', got beta2=0.9
    """

    name: str = "adamw"
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    final_fraction: float = 0.0
    clip_norm: float | None = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        checks.one_of("name", self.name, OPTIMIZERS)
        checks.one_of("schedule", self.schedule, SCHEDULES)
        self._set("warmup_steps", checks.positive_int("warmup_steps", self.warmup_steps, least=0))
        if self.clip_norm is not None:
            self._set("clip_norm", checks.finite_number("clip_norm", self.clip_norm, positive=True))
        self._set("weight_decay", checks.finite_number("weight_decay", self.weight_decay, least=0.0))
        self._set("final_fraction", checks.finite_number("final_fraction", self.final_fraction, least=0.0))
        if self.final_fraction > 1:
            raise ValueError(f"final_fraction must be at most 1, got {self.final_fraction}")
        for name in ("beta1", "beta2"):
            self._set(name, checks.rate(name, getattr(self, name)))
        self._set("epsilon", checks.finite_number("epsilon", self.epsilon, positive=True))
        self._check_effect()

    def _check_effect(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        idle = ADAM_ONLY if self.name == "sgd" else ()
        idle += DECAY_ONLY if self.schedule == "constant" else ()
        for name in idle:
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name} has no effect with name={self.name!r} and schedule={self.schedule!r}, "
                    f"got {name}={getattr(self, name)}"
                )
        if self.schedule != "constant":
            self._set("total_steps", checks.positive_int("total_steps", self.total_steps))
            if self.warmup_steps >= self.total_steps:  # pyright: ignore[reportOperatorIssue] - checked above
                raise ValueError(f"warmup_steps must be below total_steps, got {self.warmup_steps}, {self.total_steps}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def schedule(config: OptimizerConfig, step: Int[ArrayLike, ""]) -> Float[jax.Array, ""]:
    """The factor on the learning rate of a step, in [0, 1]; the first step is number 0."""
    warmup = config.warmup_steps
    if config.schedule == "constant":
        main = optax.constant_schedule(1.0)
    else:
        steps = (config.total_steps or 0) - warmup
        if config.schedule == "cosine":
            main = optax.cosine_decay_schedule(1.0, steps, alpha=config.final_fraction)
        else:
            main = optax.linear_schedule(1.0, config.final_fraction, steps)
    if warmup:
        main = optax.join_schedules([optax.linear_schedule(1 / (warmup + 1), 1.0, warmup), main], [warmup])
    return jnp.asarray(main(step), jnp.float32)


def directions(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optax transformation of gradients to directions: what is subtracted at learning rate 1."""
    parts = [optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)]
    if config.name == "adamw":
        parts.append(optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon))
    elif config.beta1:
        parts.append(optax.trace(config.beta1))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decayed))
    return optax.chain(*parts)


def decayed(parameters: Any) -> Any:
    """Which parameters decay, by the last part of their path: all but gains, offsets and logits."""

    def decays(path: tuple[Any, ...], parameter: Any) -> bool:
        return not jax.tree_util.keystr(path[-1:], simple=True).endswith(NOT_DECAYED)

    return jax.tree_util.tree_map_with_path(decays, parameters)

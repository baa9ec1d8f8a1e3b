"""The monitor: what a training step measures of its attention, and how often."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import checks
from attn_jax.diagnostics.diagnosis.limits import Limits
from attn_jax.diagnostics.diagnosis.rows import ALL, DEFAULT, measure_rows
from attn_jax.exact.attention import dot_product_attention
from attn_jax.nn import Transformer
from attn_jax.training.state import wide
from attn_jax.typing import Array, ArrayLike

SEED = 0  # of the rows, which are the same in all runs: their numbers are compared


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AttentionMonitor:
    """Measures how the heads of a `Transformer` route while it is trained, and says when something changes.

        monitor = AttentionMonitor(every=10, rows=64)
        train(state, task, config=LoopConfig(steps=1000), monitor=monitor, reporter=Console())

    The step measures a few rows of what its own forward pass gets: there is no second pass, no gradient changes, and
    memory grows with T. Of `kind` "attention" the log then has the `measures` of every head, and of `kind`
    "finding" what went beyond its limit or came back.

    In a step of one's own, under `jit`, `scan`, `vmap` and `jax.checkpoint` alike:

        logits, seen = model(tokens, observe=monitor.observer(step))       # {"max_logit": [L, N], ...}
        seen |= monitor.gradient_norms(gradient)

    and outside of it:

        watch = Watch(monitor.limits)
        for text in explain(watch.look(monitor.row(step, seen))):
            print(text)

    Attributes:
        every: steps between measurements, of which the first step has one.
        rows: how many query rows of each head are measured, others every time; as many of every sequence of the batch
            (rounded up), at the same places. None: all.
        measures: names of `monitor.ALL`, which `attn_jax.diagnostics.diagnosis.rows` explains.
        limits: what is told of; those of what is not measured do nothing.

    Raises:
        ValueError, TypeError: on a number out of range, an unknown measure, or limits that are none.

    >>> import jax.numpy as jnp
    >>> from attn_jax.training import AttentionMonitor
    >>> monitor = AttentionMonitor(every=5, rows=None, measures=("max_logit", "normalized_entropy"))
    >>> [step for step in range(1, 12) if monitor.is_due(step)]
    [1, 6, 11]
    >>> x = jnp.zeros((3, 2, 4))  # [T, N, H]: all logits are 0, all weights alike
    >>> seen = monitor.observer(0)(x, x, x, is_causal=True)  # as a layer calls it
    >>> {name: measured.tolist() for name, measured in seen.items()}
    {'max_logit': [0.0, 0.0], 'normalized_entropy': [1.0, 1.0]}
    """

    every: int = 10
    rows: int | None = 64
    measures: Sequence[str] = DEFAULT
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", checks.positive_int("every", self.every))
        if self.rows is not None:
            object.__setattr__(self, "rows", checks.positive_int("rows", self.rows))
        if isinstance(self.measures, str) or not isinstance(self.measures, Sequence) or not self.measures:
            raise TypeError(f"measures must be a sequence of names, got {self.measures!r}")
        for name in self.measures:
            checks.one_of("measures", name, ALL)
        object.__setattr__(self, "measures", tuple(dict.fromkeys(self.measures)))
        if not isinstance(self.limits, Limits):
            raise TypeError(f"limits must be Limits, got {self.limits!r}")

    def observer(self, step: ArrayLike) -> Callable[..., dict[str, Array]]:
        """What measures every layer of a `Transformer`, as its `observe=`.

        Args:
            step: int, how many steps were done. The steps that are not measured read 0, and cost nothing as long as
                `vmap` does not map over the number.

        Returns:
            A pytree, which may be passed through `jit`: called as `observe(query, key, value, **options)`, it returns
            the measures, `[N]` each.

        Raises:
            ValueError, TypeError: if the step is no integer.
        """
        step = checks.integer_array("step", step)
        checks.rank("step", step, 0, "[]")
        rng = jax.random.fold_in(jax.random.key(SEED), step)
        due = None if self.every == 1 else step % self.every == 0
        return jax.tree_util.Partial(_observe, self, rng, due)

    def gradient_norms(self, gradient: Mapping[str, Any]) -> dict[str, Array]:
        """The norms over a layer of the gradients of W_Q, W_K (unless tied) and W_V, `[L]` each.

        Args:
            gradient: of the parameters of a `Transformer`, nested by name.

        Raises:
            ValueError: if it is that of another model.
        """
        try:
            layers, norms = gradient["layers"]["attention"], {}
        except (KeyError, TypeError) as error:
            found = list(gradient) if isinstance(gradient, Mapping) else type(gradient).__name__
            raise ValueError(f"gradient must be that of a Transformer's parameters by name, got {found}") from error
        for name in ("query", "key", "value"):
            if f"{name}_weight" in layers:
                weight = wide(layers[f"{name}_weight"])
                norms[f"{name}_gradient"] = jnp.sqrt((weight**2).sum(axis=tuple(range(1, weight.ndim))))
        return norms

    def unknown(self, name: str) -> float | int:
        """What a measure reads where it is not known."""
        return -1 if name == "nearest_head" else math.nan

    def is_due(self, step: int) -> bool:
        """Whether the log has a measurement of this step, counted from 1."""
        return (step - 1) % self.every == 0

    def row(self, step: int, measured: Mapping[str, ArrayLike]) -> dict[str, Any]:
        """What was measured in this step, counted from 1, as a row of the log: lists of six digits, None for NaN."""
        lists = {name: _short(np.asarray(measured[name]).tolist()) for name in sorted(measured)}
        return {"step": step, "kind": "attention", **lists}

    def check(self, model: Any) -> None:
        """Raises a TypeError unless `model` is one that can be monitored."""
        if not isinstance(model, Transformer):
            raise TypeError(f"a monitor needs a model that is an attn_jax.nn.Transformer, got {type(model).__name__}")
        if None in model.config.layer_attention:
            raise TypeError(f"a monitor needs attention in every layer, got mixer={model.config.mixer!r}")
        function, bound = model.config.attention_fn, {}
        if isinstance(function, functools.partial) and not function.args:
            function, bound = function.func, function.keywords
        if function is not dot_product_attention or bound.keys() - {"implementation"}:
            raise TypeError(
                "a monitor needs an attention_fn that is attn_jax.dot_product_attention, with at most an "
                f"implementation bound to it, got {model.config.attention_fn!r}"
            )


def _observe(
    monitor: AttentionMonitor, rng: Array, due: Array | None, query: Array, key: Array, value: Array, **options: Any
) -> dict[str, Array]:
    """The measures of a layer, or as many zeros."""
    query, key, value, options = jax.tree.map(
        lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x, (query, key, value, options)
    )

    def measure() -> dict[str, Array]:
        return measure_rows(query, key, value, names=monitor.measures, count=monitor.rows, rng=rng, **options)

    if due is None:
        return measure()
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(measure))
    return jax.lax.cond(due, measure, lambda: nothing)


def _short(value: Any) -> Any:
    """Lists of numbers with six digits."""
    if isinstance(value, list):
        return [_short(x) for x in value]
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if np.isfinite(value) else None

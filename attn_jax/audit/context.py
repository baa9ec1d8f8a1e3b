"""What every check works with: the function, what its author meant, problems to pose and the answers expected."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from attn_jax import checks
from attn_jax.audit.report import Finding
from attn_jax.audit.subject import Subject
from attn_jax.diagnostics import reference
from attn_jax.diagnostics.reference import Array, Mask
from attn_jax.scaling import RULES, scale_factor

POSITIONS = ("rotary", "rotary_interleaved")
TOLERANCE = 2e-4  # of float32 outputs of order one; what is wrong is off by a hundred times as much


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expectation:
    """What the author of the function meant, where that is not standard attention.

    Attributes:
        scale: a number, or a rule of `attn_jax.scaling.scale_factor`; None for 1/√H.
        causal: whether it applies a causal mask without being asked.
        window: `(left, right)`, both inclusive, or an int for both, that it applies without being asked.
        logits_soft_cap: that it applies without being asked.
        positions: "rotary" or "rotary_interleaved", that it applies to queries and keys itself; None: it has none.
        rotary_base: of these.
        model_width: D, for a `scale` of "inverse_sqrt_model".

    Raises:
        ValueError, TypeError: on a choice that is none.

    >>> import numpy as np
    >>> from attn_jax import audit
    >>> from scipy.special import softmax
    >>> def unscaled(*arrays):
    ...     query, key, value = (np.asarray(x, np.float64) for x in arrays)
    ...     return np.einsum("bnts,bsnv->btnv", softmax(np.einsum("btnh,bsnh->bnts", query, key), axis=-1), value)
    >>> audit.audit_attention(unscaled).ok, audit.audit_attention(unscaled, expect=audit.Expectation(scale=1.0)).ok
    (False, True)
    """

    scale: float | str | None = None
    causal: bool = False
    window: int | tuple[int, int] | None = None
    logits_soft_cap: float | None = None
    positions: str | None = None
    rotary_base: float = 10000.0
    model_width: int | None = None

    def __post_init__(self) -> None:
        checks.boolean("causal", self.causal)
        if isinstance(self.scale, str):
            checks.one_of("scale", self.scale, RULES)
        elif self.scale is not None:
            object.__setattr__(self, "scale", checks.finite_number("scale", self.scale))
        if self.window is not None:
            sides = self.window if isinstance(self.window, tuple) else (self.window, self.window)
            if len(sides) != 2:
                raise ValueError(f"window must be an int or (left, right), got {self.window!r}")
            sides = tuple(checks.positive_int("window", side, least=0) for side in sides)
            object.__setattr__(self, "window", sides)
        if self.logits_soft_cap is not None:
            cap = checks.finite_number("logits_soft_cap", self.logits_soft_cap, positive=True)
            object.__setattr__(self, "logits_soft_cap", cap)
        checks.one_of("positions", self.positions, (*POSITIONS, None))
        checks.finite_number("rotary_base", self.rotary_base, positive=True)

    def factor(self, head_width: int) -> float:
        """The scale at this head width."""
        if isinstance(self.scale, float):
            return self.scale
        return scale_factor("inverse_sqrt" if self.scale is None else self.scale, head_width, self.model_width)


class Arrays(NamedTuple):
    """Query `[B, T, N, H]`, key `[B, S, K, H]` and value `[B, S, K, V]`, float32."""

    query: Any
    key: Any
    value: Any


class NotApplicable(Exception):
    """A check cannot say anything; the message says why."""


@dataclasses.dataclass
class Audit:
    """One audit under way.

    Attributes:
        subject: the function.
        expected: what its author meant.
        scale: the factor on q·k: the one that was meant, until another one was found, so that it is told of once.
        explained: whether its weights are a softmax of scaled q·k, so that answers can be computed.
        grouped: whether it takes fewer key heads than query heads.
    """

    subject: Subject
    expected: Expectation
    scale: Callable[[int], float]
    explained: bool = False
    grouped: bool = False

    def problem(
        self, *, batch: int = 2, length: int = 8, keys: int | None = None, heads: int = 4, kv_heads: int | None = None,
        width: int = 8, value_width: int | None = None, seed: int = 0, size: float = 1.0,
    ) -> Arrays:  # fmt: skip
        """Independent normal arrays, queries and keys `size` times as large."""
        rng = np.random.default_rng(seed)
        keys, kv_heads = length if keys is None else keys, heads if kv_heads is None else kv_heads
        value_width = width if value_width is None else value_width
        query = size * rng.standard_normal((batch, length, heads, width))
        key = size * rng.standard_normal((batch, keys, kv_heads, width))
        value = rng.standard_normal((batch, keys, kv_heads, value_width))
        return Arrays(*(x.astype(np.float32) for x in (query, key, value)))

    def seen(self, length: int, keys: int, **options: Any) -> Mask:
        """Which keys queries may see, `[T, S]`, as the author meant, and by options besides."""
        causal = self.expected.causal or bool(options.get("is_causal"))
        offset = options.get("query_offset", 0)
        mask = np.ones((length, keys), bool)
        for window in (self.expected.window, options.get("local_window_size")):
            assert not isinstance(window, int)  # an `Expectation` has both sides
            mask &= reference.visible(length, keys, causal=causal, window=window, offset=offset)
        return mask

    def answer(self, arrays: Arrays, **options: Any) -> Array:
        """The expected output, with the scale that was found."""
        query, key, value = (np.asarray(x, np.float64) for x in arrays)
        return reference.outputs(self.answer_weights(query, key, **options), value)

    def answer_weights(self, query: Any, key: Any, **options: Any) -> Array:
        """The expected weights `[B, N, T, S]`."""
        query, key = (self.positioned(np.asarray(x, np.float64)) for x in (query, key))
        scale = options.get("scale") or self.scale(query.shape[-1])
        logits = scale * reference.scores(query, key)
        mask = np.broadcast_to(self.seen(*logits.shape[-2:], **options), logits.shape).copy()
        if "mask" in options:
            mask &= np.broadcast_to(options["mask"], logits.shape)
        if "bias" in options:
            bias = np.asarray(options["bias"], np.float64)
            mask &= np.broadcast_to(bias != -np.inf, logits.shape)
            logits = logits + np.where(bias == -np.inf, 0, bias)
        if "key_value_seq_lengths" in options:
            mask &= (np.arange(logits.shape[-1]) < options["key_value_seq_lengths"][:, None])[:, None, None, :]
        cap = options.get("logits_soft_cap", self.expected.logits_soft_cap)
        return reference.weights(logits, mask, cap=cap, sinks=options.get("sinks"))

    def positioned(self, x: Array) -> Array:
        """Queries or keys with the positions that the function itself applies."""
        if self.expected.positions is None:
            return x
        interleaved = self.expected.positions == "rotary_interleaved"
        return reference.rotate(x, base=self.expected.rotary_base, interleaved=interleaved)

    def error(self, arrays: Arrays, **options: Any) -> float:
        """The largest difference from the expected output; NaN counts as infinite."""
        return worst(self.subject(*arrays, **options) - self.answer(arrays, **options))

    def read_weights(self, query: Any, key: Any, **options: Any) -> Array:
        """The weights `[B, N, T, S]`, read off the output for the identity as values: S = V."""
        keys, heads = key.shape[1:3]
        identity = np.broadcast_to(np.eye(keys, dtype=np.float32)[None, :, None, :], (key.shape[0], keys, heads, keys))
        return np.moveaxis(self.subject(query, key, identity, **options), 2, 1)

    def needs(self, *options: str) -> None:
        """Raises unless the function has these options."""
        missing = [name for name in options if name not in self.subject.options]
        if missing:
            raise NotApplicable(f"it has no {missing[0]}")


Check = Callable[[Audit], Iterator[Finding]]


@dataclasses.dataclass(frozen=True)
class Registered:
    """A check by its name, and what it stands on: it is not run where one of these found a fault."""

    name: str
    link: str
    run: Callable[[Audit, "Registered"], Iterator[Finding]]
    after: tuple[str, ...]
    needs_answers: bool

    def fault(self, evidence: str, advice: str, *, link: str | None = None) -> Finding:
        """A finding of this check, of its own link or another one."""
        return Finding("fault", link or self.link, self.name, evidence, advice)

    def difference(self, evidence: str, advice: str, *, link: str | None = None) -> Finding:
        """A convention that is another one."""
        return Finding("difference", link or self.link, self.name, evidence, advice)


def check(
    name: str, link: str, *, after: tuple[str, ...] = (), answers: bool = True
) -> Callable[[Callable[[Audit, Registered], Iterator[Finding]]], Registered]:
    """Makes a check of a generator of findings.

    Args:
        name: of the check.
        link: that it is about.
        after: checks that must not have found a fault.
        answers: whether it compares with computed answers, and so needs weights that were explained.
    """

    def register(run: Callable[[Audit, Registered], Iterator[Finding]]) -> Registered:
        return Registered(name, link, run, after, answers)

    return register


def worst(x: Array) -> float:
    """The largest absolute value; infinite if something is not finite."""
    return float("inf") if not np.isfinite(x).all() else float(np.abs(x).max(initial=0.0))


def shares(x: Array) -> str:
    """A short list of numbers."""
    return ", ".join(f"{value:.3g}" for value in np.ravel(x))

"""What a `MultiHeadAttention` is made of, checked in one place: the module and `TransformerConfig` both come here."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from attn_jax import checks, scaling
from attn_jax import positions as position
from attn_jax.exact.attention import dot_product_attention
from attn_jax.nn import parameters

# Options that act with one kind of positions only.
_NEEDS = {
    "rotary_base": "rotary",
    "rotary_interleaved": "rotary",
    "rotary_scaling": "rotary",
    "relative_buckets": "relative",
    "relative_max_distance": "relative",
}


class Sizes(NamedTuple):
    """D, N, K, H, V and C, with the defaults filled in."""

    model_width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    value_width: int
    context_width: int


def fill_sizes(
    model_width: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_width: int | None = None,
    value_width: int | None = None,
    context_width: int | None = None,
) -> Sizes:
    """The sizes of `MultiHeadAttention`, checked; None becomes the default."""
    model_width = checks.positive_int("model_width", model_width)
    num_heads = checks.positive_int("num_heads", num_heads)
    num_kv_heads = num_heads if num_kv_heads is None else checks.positive_int("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
    if head_width is None and model_width % num_heads:
        raise ValueError(
            f"model_width must be a multiple of num_heads where head_width is not given, "
            f"got {model_width} and {num_heads}"
        )
    head_width = model_width // num_heads if head_width is None else checks.positive_int("head_width", head_width)
    value_width = head_width if value_width is None else checks.positive_int("value_width", value_width)
    context_width = model_width if context_width is None else checks.positive_int("context_width", context_width)
    return Sizes(model_width, num_heads, num_kv_heads, head_width, value_width, context_width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """What one layer of a pattern has of its own; the names are those of `MultiHeadAttention`.

    Gemma 3 repeats five layers `LayerOptions(local_window_size=(511, 0))` and one `LayerOptions(rotary_base=1e6)`.

    Attributes:
        local_window_size: (left, right), both inclusive; an int w is (w, w); None: no window.
        rotary_base, rotary_scaling: as in `attn_jax.positions.apply_rotary`.

    >>> from attn_jax.nn import LayerOptions, TransformerConfig
    >>> pattern = (LayerOptions(local_window_size=(2, 0)), LayerOptions(rotary_base=1e6))
    >>> config = TransformerConfig(
    ...     vocabulary_size=9, num_layers=4, model_width=8, num_heads=2, layer_pattern=pattern
    ... )
    >>> [(one.window, one.rotary_base) for one in config.layer_attention]  # of layers 0 and 2, and of 1 and 3
    [((2, 0), 10000.0), (None, 1000000.0)]
    """

    local_window_size: int | tuple[int, int] | None = None
    rotary_base: float = 10000.0
    rotary_scaling: position.Scaling | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The choices of a `MultiHeadAttention`, which explains them; a frozen value that is checked when it is built.

    An option that could not act (a rotary base without rotary positions) may only be left at its default.
    """

    sizes: Sizes
    scale_rule: str | float = "inverse_sqrt"
    learned_temperature: bool = False
    tie_query_key: bool = False
    qk_norm: str | None = None
    qk_norm_epsilon: float = 1e-6
    positions: str | None = None
    rotary_base: float = 10000.0
    rotary_interleaved: bool = False
    rotary_scaling: position.Scaling | None = None
    relative_buckets: int = 32
    relative_max_distance: int = 128
    is_causal: bool = False
    local_window_size: int | tuple[int, int] | None = None
    logits_soft_cap: float | None = None
    use_sinks: bool = False
    use_bias: bool = False
    dropout_rate: float = 0.0
    attention_fn: Callable[..., Any] = dot_product_attention

    def __post_init__(self) -> None:
        flags = "learned_temperature", "tie_query_key", "rotary_interleaved", "is_causal", "use_sinks", "use_bias"
        for name in flags:
            self._set(name, checks.boolean(name, getattr(self, name)))
        if isinstance(self.scale_rule, str):
            checks.one_of("scale_rule", self.scale_rule, scaling.RULES)
        else:
            self._set("scale_rule", checks.finite_number("scale_rule", self.scale_rule))
        checks.one_of("qk_norm", self.qk_norm, ("rms", "l2", None))
        self._set("qk_norm_epsilon", checks.finite_number("qk_norm_epsilon", self.qk_norm_epsilon, positive=True))
        checks.one_of("positions", self.positions, ("rotary", "alibi", "relative", None))
        self._set("local_window_size", _window_pair(self.local_window_size))
        if self.logits_soft_cap is not None:
            self._set("logits_soft_cap", scaling.check_cap("logits_soft_cap", self.logits_soft_cap))
        self._set("dropout_rate", checks.rate("dropout_rate", self.dropout_rate))
        parameters.check_function("attention_fn", self.attention_fn)
        self._check_rotary()
        self._check_buckets()
        self._check_tie()
        self._check_idle()

    def options(self) -> dict[str, Any]:
        """The choices as keywords of `MultiHeadAttention`, without the sizes."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name != "sizes"}

    @property
    def window(self) -> tuple[int, int] | None:
        """`local_window_size` as (left, right)."""
        return _window_pair(self.local_window_size)

    @property
    def scale(self) -> float:
        """The factor on q · k."""
        return scaling.scale_factor(self.scale_rule, self.sizes.head_width, self.sizes.model_width)

    def _check_rotary(self) -> None:
        self._set("rotary_base", checks.finite_number("rotary_base", self.rotary_base))
        if self.rotary_base <= 1:
            raise ValueError(f"rotary_base must be greater than 1, got {self.rotary_base}")
        if not isinstance(self.rotary_scaling, position.Scaling | None):
            raise TypeError(
                f"rotary_scaling must be None or one of Linear, NTK, DynamicNTK, YaRN, Llama3; "
                f"got {type(self.rotary_scaling).__name__}"
            )
        width = self.sizes.head_width
        if self.positions == "rotary":
            if width % 2:
                raise ValueError(f"head_width must be even for positions='rotary', got {width}")
            position.rotary_frequencies(width, base=self.rotary_base, scaling=self.rotary_scaling, length=1)

    def _check_buckets(self) -> None:
        for name in ("relative_buckets", "relative_max_distance"):
            self._set(name, checks.positive_int(name, getattr(self, name)))
        if self.positions != "relative":
            return
        least = 2 if self.is_causal else 4
        near = self.relative_buckets // least  # distances with a bucket of their own
        if near < 1:
            raise ValueError(
                f"relative_buckets must be at least {least} with is_causal={self.is_causal}, "
                f"got {self.relative_buckets}"
            )
        if self.relative_max_distance <= near:
            raise ValueError(
                f"relative_max_distance must exceed the {near} distances with a bucket of their own, "
                f"got {self.relative_max_distance}"
            )

    def _check_tie(self) -> None:
        sizes = self.sizes
        for name, this, other in (
            ("num_kv_heads", sizes.num_kv_heads, sizes.num_heads),
            ("context_width", sizes.context_width, sizes.model_width),
        ):
            if self.tie_query_key and this != other:
                raise ValueError(f"{name} must be {other} where tie_query_key shares one projection, got {this}")

    def _check_idle(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        idle = {name: f"positions={kind!r}" for name, kind in _NEEDS.items() if self.positions != kind}
        if self.qk_norm is None:
            idle["qk_norm_epsilon"] = "a qk_norm"
        for name, need in idle.items():
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} has no effect without {need}, got {getattr(self, name)!r}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _window_pair(window: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """A window as (left, right), from an int or a pair, or None."""
    if window is None:
        return None
    sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"local_window_size must be an int or (left, right), got {window!r}")
    left, right = (checks.positive_int("local_window_size", side, least=0) for side in sides)
    return left, right

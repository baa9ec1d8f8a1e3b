"""What a `Transformer` is made of: one frozen, hashable record that is checked when it is built."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from attn_jax import checks
from attn_jax.exact.attention import dot_product_attention
from attn_jax.nn.mixers import ATTENTION_WORDS, READERS, WORDS, MixerOptions
from attn_jax.nn.mlp import ACTIVATIONS
from attn_jax.nn.norms import NORMS
from attn_jax.nn.options import AttentionConfig, LayerOptions, fill_sizes
from attn_jax.nn.parameters import floating_name

_LAYER_FIELDS = {field.name for field in dataclasses.fields(LayerOptions)}
POSITIONS = ("rotary", "sinusoidal", "learned", "alibi", "relative", None)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The sizes and choices of a `Transformer`. Equal configurations are equal values and share a trace.

    The defaults are the Llama family's. An encoder of the BERT family is `causal=False, head=None, norm="layer",
    norm_position="post", embedding_norm=True, mlp="plain", activation="gelu", use_bias=True, positions="learned"`.

    Attributes:
        vocabulary_size: number of token ids.
        num_layers, model_width, num_heads: L, D and N.
        num_kv_heads: K, which divides N; None: N.
        head_width: H; None: D / N.
        value_width: V; None: H.
        mlp_width: F; None: 4 D.
        mlp: "gated" (`down(act(gate x) * up x)`) or "plain" (`down(act(up x))`).
        activation: "silu", "gelu" (exact), "gelu_tanh" or "relu".
        norm: "rms" or "layer".
        norm_position: "pre" (`x + f(norm x)`, and a norm before the head), "post" (`norm(x + f x)`) or "both"
            (`x + norm(f(norm x))`, and a norm before the head).
        norm_epsilon: added to the mean square or variance.
        embedding_norm: whether the sum of embeddings and positions is normalised before the first layer.
        use_bias: whether projections and MLP have biases: True, False, or "attention" or "mlp", which alone has them.
        causal: True for a decoder, False for an encoder.
        head: "tied" (the embedding, transposed), "untied", or None: hidden states come out.
        positions: "rotary" on queries and keys; "sinusoidal" or "learned", added to the embeddings; "alibi" or
            "relative" (T5 buckets, learned in every layer) added to the logits; or None.
        rotary_base, rotary_interleaved, rotary_scaling: as in `attn_jax.positions.apply_rotary`.
        max_length: rows of the learned position table.
        num_token_types: rows of the learned table of token types (segments), which is added to the embeddings; None:
            there is none.
        relative_buckets, relative_max_distance: as in `attn_jax.biases.RelativeBuckets`.
        scale_embedding: whether embeddings are multiplied by √D (Vaswani et al. 2017, section 3.4).
        scale_rule: a rule of `attn_jax.scaling.scale_factor`, or a number.
        learned_temperature, tie_query_key, qk_norm, local_window_size, logits_soft_cap, use_sinks: as in
            `MultiHeadAttention`.
        layer_pattern: `LayerOptions` of the first layers, repeated over the rest: layers that differ in window or
            rotary positions. What they say, the configuration itself leaves at its default. None: all layers are
            alike.
        mixer: what mixes the tokens of a layer: "softmax" (`MultiHeadAttention`), "window" (the same in a window),
            or one of the others of `attn_jax.nn.mixers`: "linear", "retention", "state_space", "lsh", "routing",
            "convolution", "gru". One word for all layers, or a tuple of one word a layer.
        mixer_options: what the words leave open.
        dropout_rate: on the attention weights, on the sum of embeddings and positions, and on what each branch adds.
        attention_fn: any function with the keywords of `attn_jax.dot_product_attention`.
        dtype: of the computation, by name; None: that of the parameters.
        param_dtype: of the parameters, by name.
        precision: of the matrix products: None, "default", "high" or "highest".

    Raises:
        ValueError, TypeError: on a size or choice that is none, sizes or choices that do not go together, or an option
            that has no effect beside the others and is not at its default.

    >>> import dataclasses
    >>> from attn_jax.nn import TransformerConfig
    >>> config = TransformerConfig(vocabulary_size=9, num_layers=2, model_width=8, num_heads=2)
    >>> config.head_width, config.mlp_width, config.positions
    (4, 32, 'rotary')
    >>> dataclasses.replace(config, positions="alibi", rotary_base=1e6)
    Traceback (most recent call last):
    ValueError: rotary_base has no effect without positions='rotary', got 1000000.0
    """

    vocabulary_size: int
    num_layers: int
    model_width: int
    num_heads: int
    num_kv_heads: int | None = None
    head_width: int | None = None
    value_width: int | None = None
    mlp_width: int | None = None
    mlp: str = "gated"
    activation: str = "silu"
    norm: str = "rms"
    norm_position: str = "pre"
    norm_epsilon: float = 1e-6
    embedding_norm: bool = False
    use_bias: bool | str = False
    causal: bool = True
    head: str | None = "tied"
    positions: str | None = "rotary"
    rotary_base: float = 10000.0
    rotary_interleaved: bool = False
    rotary_scaling: Any = None
    max_length: int | None = None
    num_token_types: int | None = None
    relative_buckets: int = 32
    relative_max_distance: int = 128
    scale_embedding: bool = False
    scale_rule: str | float = "inverse_sqrt"
    learned_temperature: bool = False
    tie_query_key: bool = False
    qk_norm: str | None = None
    local_window_size: int | tuple[int, int] | None = None
    layer_pattern: tuple[LayerOptions, ...] | None = None
    mixer: str | tuple[str, ...] = "softmax"
    mixer_options: MixerOptions = dataclasses.field(default_factory=MixerOptions)
    logits_soft_cap: float | None = None
    use_sinks: bool = False
    dropout_rate: float = 0.0
    attention_fn: Callable[..., Any] = dot_product_attention
    dtype: str | None = None
    param_dtype: str = "float32"
    precision: str | None = None

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "num_layers"):
            self._set(name, checks.positive_int(name, getattr(self, name)))
        sizes = fill_sizes(self.model_width, self.num_heads, self.num_kv_heads, self.head_width, self.value_width)
        for name in ("model_width", "num_heads", "num_kv_heads", "head_width", "value_width"):
            self._set(name, getattr(sizes, name))
        width = 4 * self.model_width if self.mlp_width is None else self.mlp_width
        self._set("mlp_width", checks.positive_int("mlp_width", width))
        self._check_choices()
        self._check_mixer()
        own = {field.name for field in dataclasses.fields(AttentionConfig)} & {f.name for f in dataclasses.fields(self)}
        if self.layer_pattern is not None:
            self._check_pattern()
            own -= _LAYER_FIELDS
        attention = next((one for one in self.layer_attention if one is not None), None)
        for name in own - {"positions", "use_bias"} if attention else ():  # as attention has them: checked, in one form
            self._set(name, getattr(attention, name))
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) is not None or name == "param_dtype":
                self._set(name, floating_name(name, getattr(self, name)))

    @functools.cached_property
    def layer_mixers(self) -> tuple[str, ...]:
        """The words of the layers of one period, the shortest that gives `mixer` when repeated."""
        words = (self.mixer,) if isinstance(self.mixer, str) else self.mixer
        periods = range(1, len(words) + 1)
        return words[: next(p for p in periods if all(word == words[i % p] for i, word in enumerate(words)))]

    @functools.cached_property
    def layer_attention(self) -> tuple[AttentionConfig | None, ...]:
        """The attention of the layers of one period: of all layers, if they are alike. None: another mixer."""
        own = {field.name for field in dataclasses.fields(self)}
        options = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(AttentionConfig) if field.name in own
        }
        options["sizes"] = fill_sizes(
            self.model_width, self.num_heads, self.num_kv_heads, self.head_width, self.value_width
        )
        options["is_causal"] = self.causal
        options["positions"] = None if self.positions in ("sinusoidal", "learned") else self.positions
        options["use_bias"] = self.use_bias in (True, "attention")
        if self.qk_norm is not None:
            options["qk_norm_epsilon"] = self.norm_epsilon
        if self.layer_pattern is not None:
            return tuple(AttentionConfig(**{**options, **vars(one)}) for one in self.layer_pattern)
        window = self.mixer_options.window - 1
        own = {"softmax": {}, "window": {"local_window_size": (window, 0 if self.causal else window)}}
        return tuple(
            AttentionConfig(**{**options, **own[word]}) if word in ATTENTION_WORDS else None
            for word in self.layer_mixers
        )

    def _check_mixer(self) -> None:
        """The words, and that no choice is left without a layer that it acts in."""
        if not isinstance(self.mixer, str):
            if not isinstance(self.mixer, (tuple, list)) or len(self.mixer) != self.num_layers:
                raise ValueError(
                    f"mixer must be a word or a tuple of num_layers = {self.num_layers} words, got {self.mixer!r}"
                )
            self._set("mixer", tuple(self.mixer))
        for word in self.layer_mixers:
            checks.one_of("mixer", word, WORDS)
        if len(self.layer_mixers) == 1:
            self._set("mixer", self.layer_mixers[0])
        if isinstance(self.mixer_options, Mapping):  # as JSON has it
            self._set("mixer_options", MixerOptions(**self.mixer_options))
        if not isinstance(self.mixer_options, MixerOptions):
            raise TypeError(f"mixer_options must be MixerOptions, got {self.mixer_options!r}")
        self.mixer_options.check_read(self.layer_mixers)
        if self.layer_pattern is not None and self.mixer != "softmax":
            raise ValueError(f"layer_pattern goes with mixer='softmax' in all layers, got mixer={self.mixer!r}")
        if "softmax" not in self.layer_mixers and self.local_window_size is not None:
            raise ValueError(
                "local_window_size acts in layers of mixer='softmax' (mixer_options.window in those of 'window'), "
                f"got {self.local_window_size!r} and mixer={self.mixer!r}"
            )
        if not set(ATTENTION_WORDS).intersection(self.layer_mixers):
            self._check_unused()
        width = self.model_width // self.num_heads
        for name, default in (
            ("num_kv_heads", self.num_heads),
            ("head_width", width),
            ("value_width", self.head_width),
        ):
            if getattr(self, name) != default and READERS[name].isdisjoint(self.layer_mixers):
                raise ValueError(
                    f"{name} has no effect without mixer {' or '.join(sorted(READERS[name]))}, "
                    f"got {getattr(self, name)} and mixer={self.mixer!r}"
                )

    def _check_unused(self) -> None:
        """Without attention, what is said of it stays at its default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        own = {field.name for field in dataclasses.fields(AttentionConfig)} & defaults.keys()
        for name in sorted(own - {"use_bias", "dropout_rate"}):
            needed = name == "positions" and self.positions in ("sinusoidal", "learned", None)
            if getattr(self, name) != defaults[name] and not needed:
                raise ValueError(
                    f"{name} has no effect without a layer of softmax attention, got {getattr(self, name)!r} and "
                    f"mixer={self.mixer!r}"
                )

    def _check_pattern(self) -> None:
        pattern = self.layer_pattern
        if (
            not isinstance(pattern, (tuple, list))
            or not pattern
            or not all(isinstance(x, LayerOptions) for x in pattern)
        ):
            raise TypeError(f"layer_pattern must be None or a tuple of LayerOptions, got {pattern!r}")
        if len(pattern) > self.num_layers:
            raise ValueError(
                f"layer_pattern must have at most num_layers = {self.num_layers} entries, got {len(pattern)}"
            )
        for field in dataclasses.fields(LayerOptions):
            if getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{field.name} has no effect beside a layer_pattern, which says it for each layer, "
                    f"got {getattr(self, field.name)!r}"
                )
        self._set("layer_pattern", tuple(pattern))
        options = [{name: getattr(one, name) for name in _LAYER_FIELDS} for one in self.layer_attention]
        self._set("layer_pattern", tuple(LayerOptions(**one) for one in options))

    def _check_choices(self) -> None:
        checks.one_of("mlp", self.mlp, ("gated", "plain"))
        checks.one_of("activation", self.activation, tuple(ACTIVATIONS))
        checks.one_of("norm", self.norm, NORMS)
        checks.one_of("norm_position", self.norm_position, ("pre", "post", "both"))
        checks.one_of("use_bias", self.use_bias, (True, False, "attention", "mlp"))
        checks.one_of("head", self.head, ("tied", "untied", None))
        checks.one_of("positions", self.positions, POSITIONS)
        checks.one_of("precision", self.precision, (None, "default", "high", "highest"))
        self._set("norm_epsilon", checks.finite_number("norm_epsilon", self.norm_epsilon, positive=True))
        for name in ("causal", "scale_embedding", "embedding_norm"):
            checks.boolean(name, getattr(self, name))
        if self.num_token_types is not None:
            self._set("num_token_types", checks.positive_int("num_token_types", self.num_token_types))
        if self.positions == "learned":
            self._set("max_length", checks.positive_int("max_length", self.max_length))
        elif self.max_length is not None:
            raise ValueError(f"max_length sizes the table of positions='learned', got positions={self.positions!r}")
        if self.positions == "sinusoidal" and self.model_width % 2:
            raise ValueError(f"model_width must be even for positions='sinusoidal', got {self.model_width}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

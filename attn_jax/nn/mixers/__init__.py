"""What can stand where attention stands in a block, by one word.

    "linear"        features of queries and keys in place of the softmax
    "retention"     a memory that each head forgets at a rate of its own
    "state_space"   a memory that each token writes to and forgets as it says itself
    "lsh"           attention among tokens whose keys hash alike
    "routing"       attention among tokens of a cluster
    "convolution"   each channel sees its neighbourhood
    "gru"           one vector carries all, from token to token

Each is a module that maps `[*B, T, D]` to `[*B, T, D]`; a causal one continues a sequence from a state of fixed size.
"softmax" and "window" are `MultiHeadAttention`, whole or within a window, and are made by `TransformerBlock` itself.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flax import nnx

from attn_jax import checks
from attn_jax.nn import parameters
from attn_jax.nn.mixers.base import Mixer
from attn_jax.nn.mixers.convolution import Convolution, ConvolutionState
from attn_jax.nn.mixers.gru import GRU, GRUState
from attn_jax.nn.mixers.linear import LinearAttention, MemoryState
from attn_jax.nn.mixers.options import ATTENTION_WORDS, MIXERS, READERS, WORDS, MixerOptions
from attn_jax.nn.mixers.retention import Retention
from attn_jax.nn.mixers.routed import GroupState, LSHAttention, RoutingAttention
from attn_jax.nn.mixers.state_space import StateSpace, StateSpaceState
from attn_jax.nn.parameters import Initializer

if TYPE_CHECKING:
    from attn_jax.nn.config import TransformerConfig

Make = Callable[..., Mixer[Any]]


def _sizes(config: "TransformerConfig", *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def _linear(config: "TransformerConfig") -> Make:
    options = config.mixer_options
    return functools.partial(
        LinearAttention,
        **_sizes(config, "num_heads", "num_kv_heads", "head_width", "value_width"),
        feature_map=options.feature_map,
        num_features=options.num_features,
    )


def _retention(config: "TransformerConfig") -> Make:
    names = "num_heads", "num_kv_heads", "head_width", "value_width", "norm_epsilon"
    return functools.partial(Retention, **_sizes(config, *names))


def _state_space(config: "TransformerConfig") -> Make:
    options = config.mixer_options
    return functools.partial(
        StateSpace,
        **_sizes(config, "num_heads", "value_width", "norm_epsilon"),
        state_width=config.head_width if options.state_width is None else options.state_width,
        convolution_width=options.short_convolution_width,
    )


def _lsh(config: "TransformerConfig") -> Make:
    options = config.mixer_options
    if config.num_kv_heads != config.num_heads:
        raise ValueError(
            f"num_kv_heads must be num_heads = {config.num_heads} for mixer 'lsh', whose queries are its keys, "
            f"got {config.num_kv_heads}"
        )
    return functools.partial(
        LSHAttention,
        **_sizes(config, "num_heads", "head_width", "value_width"),
        num_buckets=options.num_buckets,
        num_rounds=options.num_rounds,
        window=options.group_window,
    )


def _routing(config: "TransformerConfig") -> Make:
    options = config.mixer_options
    return functools.partial(
        RoutingAttention,
        **_sizes(config, "num_heads", "num_kv_heads", "head_width", "value_width"),
        num_clusters=options.num_clusters,
        window=options.group_window,
    )


def _convolution(config: "TransformerConfig") -> Make:
    return functools.partial(Convolution, width=config.mixer_options.convolution_width)


def _gru(config: "TransformerConfig") -> Make:
    return GRU


_MAKERS: dict[str, Callable[["TransformerConfig"], Make]] = {
    "linear": _linear,
    "retention": _retention,
    "state_space": _state_space,
    "lsh": _lsh,
    "routing": _routing,
    "convolution": _convolution,
    "gru": _gru,
}

__all__ = [
    "ATTENTION_WORDS",
    "GRU",
    "MIXERS",
    "READERS",
    "WORDS",
    "Convolution",
    "ConvolutionState",
    "GRUState",
    "GroupState",
    "LSHAttention",
    "LinearAttention",
    "MemoryState",
    "Mixer",
    "MixerOptions",
    "Retention",
    "RoutingAttention",
    "StateSpace",
    "StateSpaceState",
    "make_mixer",
]


def make_mixer(
    word: str, config: "TransformerConfig", *, kernel_init: Initializer = parameters.lecun, rngs: nnx.Rngs
) -> Mixer[Any]:
    """The mixer of a word, with the sizes and choices of a configuration.

    Args:
        word: one of `MIXERS`.
        config: whose sizes, `causal`, `use_bias`, dtypes, precision and `mixer_options` it has.
        kernel_init: initializer of the weights, seen as matrices `[fan in, fan out]`; LeCun by default.
        rngs: the stream `params` draws the weights.

    Returns:
        A module that maps `[*B, T, D]` to `[*B, T, D]`.

    Raises:
        ValueError, TypeError: on another word, or choices that the mixer cannot have.

    >>> from flax import nnx
    >>> from attn_jax.nn import TransformerConfig
    >>> from attn_jax.nn.mixers import make_mixer
    >>> config = TransformerConfig(vocabulary_size=9, num_layers=1, model_width=8, num_heads=2)
    >>> [type(make_mixer(word, config, rngs=nnx.Rngs(0))).__name__ for word in ("linear", "gru")]
    ['LinearAttention', 'GRU']
    """
    checks.one_of("word", word, MIXERS)
    return _MAKERS[word](config)(
        config.model_width,
        is_causal=config.causal,
        use_bias=config.use_bias in (True, "attention"),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        precision=config.precision,
        kernel_init=kernel_init,
        rngs=rngs,
    )

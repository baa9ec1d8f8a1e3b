"""The function under audit: how it is called, which options it knows, and what comes of it."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

# Our option, and other names under which functions have it with the same meaning.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "bias": (),
    "mask": (),
    "scale": ("softmax_scale", "sm_scale"),
    "is_causal": ("causal",),
    "query_seq_lengths": (),
    "key_value_seq_lengths": (),
    "local_window_size": (),
    "query_offset": (),
    "logits_soft_cap": ("softcap", "soft_cap"),
    "sinks": (),
    "dropout_rate": (),
    "dropout_rng": (),
    "deterministic": (),
}

Convert = Callable[[Any], Any]


class Refused(Exception):
    """The function raised; the message says what, in one line."""


class WrongOutput(Exception):
    """The function returned something that is no output of attention."""


class Subject:
    """Calls the function with JAX arrays, or NumPy arrays if it does not take those.

    Args:
        function: called as `function(query, key, value, **options)`.
        arguments: our options by the names of the function's own: `{"mask": "attn_mask"}`, or
            `{"mask": ("key_padding_mask", convert)}` where its values are others; None for one that it has and that is
            to be left alone. What is not said is read off its signature.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> None:
        if not callable(function):
            raise TypeError(f"fn must be callable, got {type(function).__name__}")
        self.function = function
        self.name = getattr(function, "__name__", None) or type(function).__name__
        arguments = {} if arguments is None else arguments
        parameters = _parameters(function)
        self._names = _known(parameters, arguments)
        known = {own for own, _ in self._names.values()}
        known |= {own for name, given in arguments.items() if given is None for own in (name, *OPTIONS[name])}
        self.unmapped = tuple(name for name in [*parameters][3:] if name not in known and parameters[name] not in _OPEN)
        self._make: Convert = jnp.asarray

    @property
    def options(self) -> frozenset[str]:
        """Ours that it knows."""
        return frozenset(self._names)

    def __call__(self, query: Any, key: Any, value: Any, **options: Any) -> NDArray[np.float64]:
        """The output in float64, `[B, T, N, V]`.

        Raises:
            Refused: if the function raises.
            WrongOutput: if what it returns has another shape, or is no array of numbers.
        """
        expected = (*np.shape(query)[:-1], np.shape(value)[-1])
        found = np.asarray(self.raw(query, key, value, **options))
        if found.shape != expected:
            raise WrongOutput(f"it returned shape {found.shape} where {expected}, [B, T, N, V], was expected")
        return found.astype(np.float64)

    def raw(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        """What the function returns, as an array of its own dtype."""
        try:
            returned = self.traced(*(self._make(x) for x in (query, key, value)), **options)
        except Exception as error:
            raise Refused(f"it raised {type(error).__name__}: {_line(error)}") from error
        if isinstance(returned, (tuple, list)) and returned:
            returned = returned[0]  # with weights, a residual or a cache beside it
        try:
            found = jnp.asarray(returned)
        except Exception as error:
            raise WrongOutput(f"it returned {type(returned).__name__} where an array was expected") from error
        if not jnp.issubdtype(found.dtype, jnp.number) or jnp.issubdtype(found.dtype, jnp.complexfloating):
            raise WrongOutput(f"it returned an array of {found.dtype} where real numbers were expected")
        return found

    def traced(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        """The function itself, with options under its own names: to be differentiated or jitted."""
        named = {}
        for name, option in options.items():
            own, convert = self._names[name]
            named[own] = option if convert is None else convert(option)
        return self.function(query, key, value, **named)

    def prefer_numpy(self) -> None:
        """From now on hands over NumPy arrays."""
        self._make = np.asarray


_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The kind of each parameter, in order; none where a signature cannot be read."""
    try:
        return {name: one.kind for name, one in inspect.signature(function).parameters.items()}
    except (TypeError, ValueError):
        return {}


def _known(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, tuple[str, Convert | None]]:
    """Our options by the function's name for them and a conversion."""
    unknown = sorted(set(arguments) - set(OPTIONS))
    if unknown:
        raise ValueError(f"arguments must name options among {', '.join(OPTIONS)}, got {unknown[0]!r}")
    closed = bool(parameters) and inspect.Parameter.VAR_KEYWORD not in parameters.values()
    found: dict[str, tuple[str, Convert | None]] = {}
    for name, others in OPTIONS.items():
        if name in arguments:
            given = arguments[name]
            if given is None:
                continue
            own, convert = given if isinstance(given, tuple) else (given, None)
            if not isinstance(own, str) or not (convert is None or callable(convert)):
                raise TypeError(f"arguments[{name!r}] must be a name, or a name and a function, got {given!r}")
            if closed and own not in parameters:
                raise ValueError(
                    f"arguments[{name!r}] must be a parameter of the function ({', '.join(parameters)}), got {own!r}"
                )
            found[name] = (own, convert)
        else:
            own = next((own for own in (name, *others) if own in parameters), None)
            if own is not None:
                found[name] = (own, None)
    return found


def _line(error: Exception) -> str:
    """The first line of a message, short."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return text if len(text) <= 160 else f"{text[:157]}..."

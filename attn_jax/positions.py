"""Positions: rotary phases and their scalings, sinusoids, a learned table.

A rotary position turns each pair of coordinates of a query and a key by an angle proportional to the position, so
that q·k depends on the distance alone. The value is not touched.

Precision. At position 131071 a float32 angle is off by up to 4e-3, so angles are counted in turns, in fixed point with
48 binary places: whole turns fall off as the integer overflows, and two's complement gives negative positions. The
angle is right to 3e-5 at every 32-bit position (float64 inputs use float64 throughout).
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.typing import Array, ArrayLike, Float, Int


def rotary_frequencies(
    width: int, *, base: float = 10000.0, scaling: "Scaling | None" = None, length: int | None = None
) -> tuple[np.ndarray, float]:
    """The angle per position of each pair, in radians: `f_i = base^(-2i/width)`, then scaled.

    Args:
      width: H, the width that is rotated; even.
      base: greater than 1.
      scaling: a rule that extends the trained length, or None.
      length: the length of the sequence, which `DynamicNTK` needs; the other rules do not depend on it.

    Returns:
      The frequencies, float64 NumPy `[width // 2]`, and the magnitude that multiplies every rotated vector (1 but for
      YaRN). Nothing is remembered: the same arguments give the same result, whatever was asked before.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: an odd width, a base of 1 or less, or `DynamicNTK` without a length.

    Reference: Su et al. 2021 (RoFormer), equation 15.

    >>> frequencies, magnitude = rotary_frequencies(4)
    >>> frequencies.round(4).tolist(), magnitude
    ([1.0, 0.01], 1.0)
    """
    width = checks.positive_int("width", width)
    if width % 2:
        raise ValueError(f"width must be even, since rotary positions turn pairs, got {width}")
    base = checks.finite_number("base", base)
    if base <= 1.0:
        raise ValueError(f"base must be greater than 1, got {base}")
    if length is not None:
        length = checks.positive_int("length", length)
    if scaling is None:
        return _frequencies(width, base), 1.0
    if not isinstance(scaling, Scaling):
        raise TypeError(f"scaling must be None or one of Linear, NTK, DynamicNTK, YaRN, Llama3; got {scaling!r}")
    return scaling.frequencies(width, base, length)


def apply_rotary(
    x: Float[ArrayLike, "*b t n h"],
    positions: Int[ArrayLike, "*#b t"],
    *,
    base: float = 10000.0,
    scaling: "Scaling | None" = None,
    length: int | None = None,
    interleaved: bool = False,
) -> Float[Array, "*b t n h"]:
    """Turns pair i of a query or key at position p by the angle `p · f_i`.

        (a, b) -> magnitude · (a cos pf_i − b sin pf_i,  a sin pf_i + b cos pf_i)

    Args:
      x: `[*B, T, N, H]` (or K for N), H even.
      positions: integers `[T]`, shared by all items, or `[*B, T]`; any value, negative ones too.
      base: greater than 1.
      scaling: a rule that extends the trained length, or None.
      length: the length of the sequence, which `DynamicNTK` needs. Keys that were rotated under another length (cached
        ones, say) have other frequencies: rotate all of them under one length.
      interleaved: the pairing: (i, i + H/2) if False, (2i, 2i + 1) if True. Weights are trained for one of them.

    Returns:
      The shape and dtype of x, computed in float32 or better.

    Raises:
      TypeError: x is not floating, positions are not integers.
      ValueError: an odd H, positions of another shape, or `DynamicNTK` without a length.

    Reference: Su et al. 2021 (RoFormer), equation 34.

    >>> x = jnp.array([[[1.0, 2.0, 3.0, 4.0]]] * 2)  # a query and a key
    >>> near, far = (apply_rotary(x, jnp.array(at))[:, 0] for at in ([7, 5], [1007, 1005]))
    >>> bool(jnp.allclose(near[0] @ near[1], far[0] @ far[1], atol=1e-3))  # two apart, wherever they are
    True
    """
    x = checks.floating_array("x", x)
    checks.minimum_rank("x", x, 3, "[*B, T, N, H]")
    positions = checks.integer_array("positions", positions)
    if positions.shape not in (x.shape[-3:-2], x.shape[:-2]):
        raise ValueError(
            f"positions must have shape [T] = {x.shape[-3:-2]} or [*B, T] = {x.shape[:-2]} for x {x.shape}, "
            f"got {positions.shape}"
        )
    frequencies, magnitude = rotary_frequencies(x.shape[-1], base=base, scaling=scaling, length=length)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    angles = _angles(positions, frequencies, dtype)
    angles = angles.reshape((1,) * (x.ndim - angles.ndim - 1) + angles.shape[:-1] + (1, angles.shape[-1]))
    cos, sin = magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)
    layout = "(pair two)" if checks.boolean("interleaved", interleaved) else "(two pair)"
    first, second = rearrange(x.astype(dtype), f"... {layout} -> two ... pair", two=2)
    turned = jnp.stack([first * cos - second * sin, first * sin + second * cos])
    return rearrange(turned, f"two ... pair -> ... {layout}").astype(x.dtype)


def sinusoidal(
    positions: Int[ArrayLike, "*#b t"], width: int, *, base: float = 10000.0, dtype: DTypeLike = jnp.float32
) -> Float[Array, "*b t width"]:
    """Sinusoids to be added to the input: `sin(p f_i)` at 2i and `cos(p f_i)` at 2i + 1, `f_i = base^(-2i/width)`.

    Args:
      positions: integers of any shape and value.
      width: D, even.
      base: greater than 1.
      dtype: of the result; the angles are float32 or better.

    Returns:
      `[*positions.shape, width]`.

    Raises:
      TypeError: positions are not integers, or dtype is not floating.
      ValueError: an odd width, or a base of 1 or less.

    Reference: Vaswani et al. 2017, section 3.5.

    >>> added = sinusoidal(jnp.array([0, 1]), 2)
    >>> bool(jnp.allclose(added, jnp.array([[0.0, 1.0], [jnp.sin(1.0), jnp.cos(1.0)]])))
    True
    """
    positions = checks.integer_array("positions", positions)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be floating, got {dtype}")
    frequencies, _ = rotary_frequencies(width, base=base)
    angles = _angles(positions, frequencies, jnp.promote_types(dtype, jnp.float32))
    return rearrange(jnp.stack([jnp.sin(angles), jnp.cos(angles)]), "two ... pair -> ... (pair two)").astype(dtype)


def learned(table: Float[ArrayLike, "l d"], positions: Int[ArrayLike, "*#b t"]) -> Float[Array, "*b t d"]:
    """Looks positions up in a learned table: row p of `table` for position p.

    Args:
      table: `[L, D]`.
      positions: integers of any shape, from 0 to L - 1. A position outside raises; under a trace, where its value
        cannot be seen, its row is NaN (never the nearest row, nor one counted from the end).

    Returns:
      `[*positions.shape, D]`.

    Raises:
      TypeError: the table is not floating, positions are not integers.
      ValueError: a table of another rank, or a position outside of it.

    Reference: Gehring et al. 2017, section 3.1.

    >>> table = jnp.array([[0.0, 1.0], [2.0, 3.0]])
    >>> learned(table, jnp.array([1, 0, 1])).tolist()
    [[2.0, 3.0], [0.0, 1.0], [2.0, 3.0]]
    >>> learned(table, jnp.array([2]))
    Traceback (most recent call last):
    ValueError: positions must lie in 0..1, got values in 2..2
    """
    table = checks.floating_array("table", table)
    checks.rank("table", table, 2, "[L, D]")
    positions = checks.integer_array("positions", positions)
    checks.within("positions", positions, 0, table.shape[0] - 1)
    return table.at[positions].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A rule that extends rotary positions past the trained length: one of the classes below, or one of your own.

    Raises:
      ValueError, TypeError: when one of them is built: a factor below 1, or other numbers that make no sense.

    >>> from attn_jax import positions
    >>> class Half(positions.Scaling):
    ...     def frequencies(self, width, base, length):
    ...         return positions.rotary_frequencies(width, base=base)[0] / 2, 1.0
    >>> positions.rotary_frequencies(4, scaling=Half())[0].round(4).tolist()
    [0.5, 0.005]
    """

    def frequencies(self, width: int, base: float, length: int | None) -> tuple[np.ndarray, float]:
        """The scaled frequencies `[width // 2]` and the magnitude."""
        raise NotImplementedError(f"{type(self).__name__} must define frequencies(width, base, length)")


@dataclasses.dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: every frequency divided by `factor`. Reference: Chen et al. 2023, equation 4.

    >>> from attn_jax import positions
    >>> positions.rotary_frequencies(4, scaling=positions.Linear(4.0))[0].round(4).tolist()
    [0.25, 0.0025]
    """

    factor: float

    def __post_init__(self):
        checks.finite_number("factor", self.factor, least=1.0)

    def frequencies(self, width: int, base: float, length: int | None) -> tuple[np.ndarray, float]:
        """`f_i / factor`."""
        return _frequencies(width, base) / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class NTK(Scaling):
    """A larger base, `base · factor^(H/(H-2))`: the slowest pair is interpolated by `factor`, the fastest not at all.

    Reference: Peng et al. 2023 (YaRN), section 3.1.

    >>> from attn_jax import positions
    >>> positions.rotary_frequencies(4, scaling=positions.NTK(4.0))[0].round(4).tolist()
    [1.0, 0.0025]
    """

    factor: float

    def __post_init__(self):
        checks.finite_number("factor", self.factor, least=1.0)

    def frequencies(self, width: int, base: float, length: int | None) -> tuple[np.ndarray, float]:
        """`(base · factor^(H/(H-2)))^(-2i/H)`."""
        return _ntk(width, base, self.factor), 1.0


@dataclasses.dataclass(frozen=True)
class DynamicNTK(Scaling):
    """NTK whose factor grows with the length: `factor · length / original_length - (factor - 1)` past the trained one.

    Reference: Peng et al. 2023 (YaRN), section 3.3; the formula is the one of Hugging Face transformers.

    >>> from attn_jax import positions
    >>> rule = positions.DynamicNTK(2.0, original_length=100)
    >>> [positions.rotary_frequencies(4, scaling=rule, length=n)[0].round(4).tolist() for n in (100, 250)]
    [[1.0, 0.01], [1.0, 0.0025]]
    """

    factor: float
    original_length: int

    def __post_init__(self):
        checks.finite_number("factor", self.factor, least=1.0)
        checks.positive_int("original_length", self.original_length)

    def frequencies(self, width: int, base: float, length: int | None) -> tuple[np.ndarray, float]:
        """A function of the length alone: no call changes a later one."""
        if length is None:
            raise ValueError("length must be given for DynamicNTK, whose frequencies depend on it, got None")
        stretch = max(length / self.original_length, 1.0)
        return _ntk(width, base, self.factor * stretch - (self.factor - 1.0)), 1.0


@dataclasses.dataclass(frozen=True)
class YaRN(Scaling):
    """Interpolates pairs that turn less than `beta_slow` times in the trained length, keeps those above `beta_fast`.

    In between a linear ramp over the pair index. The vectors grow by `attention_factor`, `0.1 ln(factor) + 1` if None,
    which sharpens the softmax.

    Reference: Peng et al. 2023 (YaRN), sections 3.2 and 3.4; the ends of the ramp are rounded outwards to whole pairs.

    >>> from attn_jax import positions
    >>> frequencies, magnitude = positions.rotary_frequencies(64, scaling=positions.YaRN(4.0, original_length=2048))
    >>> slower = positions.rotary_frequencies(64)[0] / frequencies  # the fastest and the slowest pair
    >>> slower[[0, -1]].round(4).tolist(), round(magnitude, 4)
    ([1.0, 4.0], 1.1386)
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self):
        checks.finite_number("factor", self.factor, least=1.0)
        checks.positive_int("original_length", self.original_length)
        checks.finite_number("beta_fast", self.beta_fast, positive=True)
        checks.finite_number("beta_slow", self.beta_slow, positive=True)
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow must be less than beta_fast = {self.beta_fast}, got {self.beta_slow}")
        if self.attention_factor is not None:
            checks.finite_number("attention_factor", self.attention_factor, positive=True)

    def frequencies(self, width: int, base: float, length: int | None) -> tuple[np.ndarray, float]:
        """`f_i · (1 - ramp_i) + f_i / factor · ramp_i`."""

        def pair_that_turns(times: float) -> float:
            # solves original_length · base^(-2i/width) = 2π · times for i
            return width * math.log(self.original_length / (2 * math.pi * times)) / (2 * math.log(base))

        low = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(self.beta_slow)), width - 1)
        high = max(high, low + 0.001)  # a ramp of no width is a step
        ramp = np.clip((np.arange(width // 2) - low) / (high - low), 0.0, 1.0)
        plain = _frequencies(width, base)
        magnitude = 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else float(self.attention_factor)
        return plain * (1.0 - ramp) + plain / self.factor * ramp, magnitude


@dataclasses.dataclass(frozen=True)
class Llama3(Scaling):
    """Interpolates pairs that turn less than `low_freq_factor` times, keeps those above `high_freq_factor`.

    In between a linear ramp over the number of turns in the trained length.

    Reference: Grattafiori et al. 2024 (Llama 3); the formula is the one of the Llama 3.1 release.

    >>> from attn_jax import positions
    >>> rule = positions.Llama3(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)
    >>> frequencies, _ = positions.rotary_frequencies(64, base=500000.0, scaling=rule)
    >>> slower = positions.rotary_frequencies(64, base=500000.0)[0] / frequencies  # the fastest and the slowest pair
    >>> slower[[0, -1]].round(4).tolist()
    [1.0, 8.0]
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self):
        checks.finite_number("factor", self.factor, least=1.0)
        checks.finite_number("low_freq_factor", self.low_freq_factor, positive=True)
        checks.finite_number("high_freq_factor", self.high_freq_factor, positive=True)
        checks.positive_int("original_length", self.original_length)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be less than high_freq_factor = {self.high_freq_factor}, "
                f"got {self.low_freq_factor}"
            )

    def frequencies(self, width: int, base: float, length: int | None) -> tuple[np.ndarray, float]:
        """`f_i · keep_i + f_i / factor · (1 - keep_i)`."""
        plain = _frequencies(width, base)
        turns = self.original_length * plain / (2 * math.pi)
        keep = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return plain * keep + plain / self.factor * (1.0 - keep), 1.0


def _frequencies(width: int, base: float) -> np.ndarray:
    return base ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def _ntk(width: int, base: float, factor: float) -> np.ndarray:
    if width < 4:
        raise ValueError(f"width must be at least 4 for NTK scaling, got {width}")
    return _frequencies(width, base * factor ** (width / (width - 2)))


def _angles(positions: Array, frequencies: np.ndarray, dtype: jnp.dtype) -> Array:
    """`positions · frequencies` in radians, in float32 within half a turn of zero: `[*positions.shape, width // 2]`."""
    if jnp.finfo(dtype).bits > 32:
        return jnp.multiply.outer(positions.astype(dtype), frequencies)
    # a frequency in units of 2^-48 turns: a word that counts 2^-32 turns, and 16 further places
    turns = np.round(np.mod(frequencies / (2 * math.pi), 1.0) * 2.0**48).astype(np.uint64)
    word, places = (turns >> 16).astype(np.uint32), (turns & 0xFFFF).astype(np.uint32)
    if jnp.iinfo(positions.dtype).bits < 32:
        positions = positions.astype(jnp.int32)
    upper, lower = (positions >> 16).astype(jnp.uint32), (positions & 0xFFFF).astype(jnp.uint32)
    phase = jnp.multiply.outer(positions.astype(jnp.uint32), word)
    phase += jnp.multiply.outer(upper, places) + (jnp.multiply.outer(lower, places) >> 16)
    return lax.bitcast_convert_type(phase, jnp.int32).astype(dtype) * (2 * math.pi / 2**32)

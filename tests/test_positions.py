"""Rotary, sinusoidal and learned positions against float64 NumPy, and rotary scalings against published numbers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from attn_jax import positions as P

DYNAMIC = P.DynamicNTK(factor=2.0, original_length=16)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rotary_oracle(x, positions, base=10000.0, interleaved=False, factor=1.0):
    """Pair by pair, as a complex number that is turned: no layout trick of the library is repeated."""
    x, width = np.asarray(x, np.float64), np.shape(x)[-1]
    y = np.empty_like(x)
    for i in range(width // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        turn = np.exp(1j * (np.asarray(positions, np.float64) / factor * base ** (-2 * i / width)))[..., None]
        turned = (x[..., a] + 1j * x[..., b]) * turn
        y[..., a], y[..., b] = turned.real, turned.imag
    return y


class RotaryTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(interleaved=[False, True], base=[10000.0, 500000.0])
    def test_against_oracle(self, interleaved, base):
        x = draw(0, 2, 5, 3, 8)
        rotate = self.variant(lambda x, p: P.apply_rotary(x, p, base=base, interleaved=interleaved))
        shared = np.array([0, 1, 100, 4095, 131071])
        per_item = np.array([[-1, 0, 1, 2, 3], [2**31 - 1, -(2**31), 7, 70000, -70000]])
        y = rotate(x, shared)
        np.testing.assert_allclose(y, rotary_oracle(x, shared, base, interleaved), atol=2e-6)
        np.testing.assert_allclose(rotate(x, per_item), rotary_oracle(x, per_item, base, interleaved), atol=2e-4)
        np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_the_two_pairings_differ_by_a_permutation(self):
        perm = np.array([0, 2, 4, 6, 1, 3, 5, 7])
        x, y = draw(1, 1, 1, 8), draw(2, 1, 1, 8)
        half = self.variant(lambda x, p: P.apply_rotary(x, p))
        pairs = self.variant(lambda x, p: P.apply_rotary(x, p, interleaved=True))
        p, q = np.array([7]), np.array([3])
        np.testing.assert_array_equal(pairs(x, p)[..., perm], half(x[..., perm], p))
        one = np.sum(pairs(x, p) * pairs(y, q))
        np.testing.assert_allclose(one, np.sum(half(x[..., perm], p) * half(y[..., perm], q)), rtol=1e-5)
        assert abs(one - np.sum(half(x, p) * half(y, q))) > 0.1

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(255, 4095, 32767, 131071, 1048575, -131071)
    def test_phases_far_out(self, position):
        # x = (1, .., 1, 0, .., 0) reads off the cosines and the sines
        for width in (64, 128):
            x = np.repeat(np.array([1.0, 0.0], np.float32), width // 2).reshape(1, 1, width)
            y = np.asarray(self.variant(P.apply_rotary)(x, np.array([position])), np.float64).ravel()
            angles = position * 10000.0 ** (-np.arange(0, width, 2) / width)
            np.testing.assert_allclose(y, np.concatenate([np.cos(angles), np.sin(angles)]), atol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters("bfloat16", "float16")
    def test_low_precision_input_has_phases_of_full_precision(self, dtype):
        x, position = jnp.asarray(draw(3, 1, 2, 128)).astype(dtype), np.array([131071])
        y = self.variant(P.apply_rotary)(x, position)
        assert y.dtype == x.dtype
        # the one rounding is that of the result
        expected = rotary_oracle(np.asarray(x, np.float32), position)
        error = np.abs(np.asarray(y, np.float64) - expected)
        assert np.all(error <= 0.5 * float(jnp.finfo(dtype).eps) * np.abs(expected) + 1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_scores_depend_on_the_distance_only(self):
        query, key = draw(4, 1, 1, 64), draw(5, 1, 1, 64)
        rotate = self.variant(P.apply_rotary)
        for distance in (0, 1, 17, 4000):
            scores = [
                float(np.sum(rotate(query, np.array([p])) * rotate(key, np.array([p + distance]))))
                for p in (0, 30000, 131000, -500)
            ]
            np.testing.assert_allclose(scores, scores[0], atol=2e-5)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(None, P.Linear(4.0), P.NTK(4.0), P.YaRN(4.0, 64), P.Llama3(8.0, 1.0, 4.0, 64))
    def test_an_offset_is_a_slice(self, scaling):
        x = draw(6, 9, 2, 16)
        rotate = self.variant(lambda x, p: P.apply_rotary(x, p, scaling=scaling))
        whole = rotate(x, np.arange(9))
        np.testing.assert_allclose(rotate(x[5:], np.arange(5, 9)), whole[5:], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(rotate(x, np.arange(9)), whole)

    @chex.variants(with_jit=True, without_jit=True)
    def test_linear_scaling_is_a_slower_clock(self):
        x, positions = draw(7, 3, 1, 8), np.array([64, 100, 1000])
        y = self.variant(lambda x, p: P.apply_rotary(x, p, base=1e6, scaling=P.Linear(8.0)))(x, positions)
        np.testing.assert_allclose(y, rotary_oracle(x, positions, base=1e6, factor=8.0), atol=2e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_yarn_magnifies_the_vectors(self):
        x = draw(8, 3, 1, 16)
        y = self.variant(lambda x: P.apply_rotary(x, jnp.arange(3), scaling=P.YaRN(4.0, 2048)))(x)
        ratio = np.linalg.norm(y, axis=-1) / np.linalg.norm(x, axis=-1)
        np.testing.assert_allclose(ratio, 1.138629436111989, rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters("int8", "uint8", "int16", "int32", "uint32")
    def test_every_integer_dtype(self, dtype):
        x, positions = draw(9, 3, 1, 8), np.array([0, 5, 127], dtype)
        np.testing.assert_allclose(self.variant(P.apply_rotary)(x, positions), rotary_oracle(x, positions), atol=2e-6)


def test_rotary_under_vmap_and_grad():
    x, positions = draw(10, 2, 3, 1, 8), np.array([[0, 1, 2], [5, 9, 70000]])
    np.testing.assert_allclose(
        jax.vmap(P.apply_rotary)(x, positions), P.apply_rotary(x, positions), rtol=1e-6, atol=1e-6
    )
    # a rotation's gradient is the rotation back
    weights = draw(11, 2, 3, 1, 8)
    grad = jax.grad(lambda x: jnp.sum(P.apply_rotary(x, positions) * weights))(x)
    np.testing.assert_allclose(grad, rotary_oracle(weights, -positions), atol=2e-6)


def test_rotary_of_float64_is_float64(x64):
    x, positions = draw(12, 3, 1, 8).astype(np.float64), np.array([3, 131071, -(2**40)])
    np.testing.assert_allclose(P.apply_rotary(x, positions), rotary_oracle(x, positions), atol=1e-10)
    # positions of 64 bits keep the phases of float32 inputs too, as far as 48 binary places go
    far = np.array([3, 131071, 2**33 + 5])
    np.testing.assert_allclose(P.apply_rotary(x.astype(np.float32), far), rotary_oracle(x, far), atol=5e-4)


# transformers 5.24.0, ROPE_INIT_FUNCTIONS[rope_type](LlamaConfig(head_dim=width, rope_parameters=...)) with
# torch.float and torch.float32 set to torch.float64, so that the numbers are those of the formula.
PUBLISHED = {
    "linear": (8, 1e4, P.Linear(8.0), None, [0.125, 0.0125, 0.00125, 0.000125], 1.0),
    "dynamic, long": (8, 1e4, DYNAMIC, 64, [1.0, 0.0522757958575, 0.00273275883253, 0.000142857142857], 1.0),
    "dynamic, short": (8, 1e4, DYNAMIC, 8, [1.0, 0.1, 0.01, 0.001], 1.0),
    "yarn": (
        16,
        1e4,
        P.YaRN(4.0, 2048),
        None,
        [1.0, 0.316227766017, 0.1, 0.0256935059889, 0.00625, 0.00138349647632, 0.00025, 7.90569415042e-05],
        1.138629436111989,
    ),
    "yarn, all fields": (
        16,
        150000.0,
        P.YaRN(32.0, 4096, beta_fast=16, beta_slow=2, attention_factor=1.25),
        None,
        [
            1.0,
            0.225418000203,
            0.0508132748155,
            0.00590608568997,
            8.0687153046e-05,
            1.81883366817e-05,
            4.0999784818e-06,
            9.24208950243e-07,
        ],
        1.25,
    ),
    "llama3": (
        16,
        500000.0,
        P.Llama3(8.0, 1.0, 4.0, 8192),
        None,
        [
            1.0,
            0.193922744749,
            0.0376060309309,
            0.00729266473722,
            0.000524846160993,
            3.42810219595e-05,
            6.64786987118e-06,
            1.28917317215e-06,
        ],
        1.0,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_scalings_equal_published_numbers(name):
    width, base, scaling, length, expected, magnitude = PUBLISHED[name]
    frequencies, actual_magnitude = P.rotary_frequencies(width, base=base, scaling=scaling, length=length)
    assert type(frequencies) is np.ndarray
    assert frequencies.dtype == np.float64
    np.testing.assert_allclose(frequencies, expected, rtol=1e-11)
    assert actual_magnitude == pytest.approx(magnitude, rel=1e-12)


def test_frequencies_without_scaling():
    frequencies, magnitude = P.rotary_frequencies(8)
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-15)
    assert magnitude == 1.0


def test_ntk_slows_the_last_pair_by_the_factor_and_the_first_not_at_all():
    plain, _ = P.rotary_frequencies(64)
    scaled, _ = P.rotary_frequencies(64, scaling=P.NTK(8.0))
    np.testing.assert_allclose((plain / scaled)[[0, -1]], [1.0, 8.0], rtol=1e-12)


def test_dynamic_ntk_is_a_function_of_the_length_alone():
    def base_at(length):
        frequencies, _ = P.rotary_frequencies(4, scaling=DYNAMIC, length=length)
        return frequencies[1] ** -2  # base^(-2/4)

    for length in (64, 8, 16, 17, 64, 8):
        expected = 10000.0 * max(2 * length / 16 - 1, 1) ** 2
        assert base_at(length) == pytest.approx(expected, rel=1e-12)
    assert base_at(64) == pytest.approx(490000.0)
    x = draw(13, 8, 1, 4)
    short = P.apply_rotary(x, jnp.arange(8), scaling=DYNAMIC, length=8)
    P.apply_rotary(draw(14, 64, 1, 4), jnp.arange(64), scaling=DYNAMIC, length=64)
    np.testing.assert_array_equal(P.apply_rotary(x, jnp.arange(8), scaling=DYNAMIC, length=8), short)
    np.testing.assert_array_equal(P.apply_rotary(x, jnp.arange(8)), short)


def test_yarn_interpolates_everything_when_no_pair_turns_once():
    # a trained length shorter than every period: all pairs but the first, the end of the ramp, are interpolated
    plain, _ = P.rotary_frequencies(16)
    scaled, _ = P.rotary_frequencies(16, scaling=P.YaRN(4.0, 1))
    np.testing.assert_allclose(plain[1:] / scaled[1:], 4.0)


def test_equal_scalings_share_a_trace():
    @functools.partial(jax.jit, static_argnames="scaling")
    @chex.assert_max_traces(n=1)
    def rotate(x, scaling):
        return P.apply_rotary(x, jnp.arange(3), scaling=scaling)

    for _ in range(3):
        rotate(draw(15, 3, 1, 8), scaling=P.YaRN(4.0, 2048))


class SinusoidalTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_against_oracle(self):
        positions = np.array([[0, 1, 2], [511, 131071, -3]])
        expected = np.empty((2, 3, 6))
        for i in range(3):
            expected[..., 2 * i] = np.sin(positions / 10000 ** (2 * i / 6))
            expected[..., 2 * i + 1] = np.cos(positions / 10000 ** (2 * i / 6))
        y = self.variant(lambda p: P.sinusoidal(p, 6))(positions)
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, expected, atol=1e-6)
        half = self.variant(lambda p: P.sinusoidal(p, 6, dtype=jnp.bfloat16))(positions)
        assert half.dtype == jnp.bfloat16
        np.testing.assert_allclose(half.astype(np.float32), expected, atol=2.0**-8)


TABLE = draw(16, 4, 3)


class LearnedTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_rows(self):
        positions = np.array([[0, 3], [1, 1]])
        np.testing.assert_array_equal(self.variant(P.learned)(TABLE, positions), TABLE[positions])

    def test_outside_the_table(self):
        for positions in ([0, 4], [-1, 2], [2**31 - 1, 0]):
            with pytest.raises(ValueError, match=r"positions must lie in 0\.\.3, got values in") as caught:
                P.learned(TABLE, np.array(positions))
            assert "\n" not in str(caught.value)
            constant = jnp.array(positions)
            with pytest.raises(ValueError, match=r"positions must lie in 0\.\.3, got values in"):
                jax.jit(lambda table, constant=constant: P.learned(table, constant))(TABLE)
            rows = jax.jit(P.learned)(TABLE, np.array(positions))
            outside = (np.array(positions) < 0) | (np.array(positions) > 3)
            np.testing.assert_array_equal(np.isnan(rows), np.broadcast_to(outside[:, None], (2, 3)))

    @chex.variants(with_jit=True, without_jit=True)
    def test_gradient_reaches_the_rows_that_were_read(self):
        grad = self.variant(jax.grad(lambda t: jnp.sum(P.learned(t, jnp.array([1, 1, 3])))))(TABLE)
        np.testing.assert_array_equal(grad[:, 0], [0, 2, 0, 1])


X = draw(17, 2, 3, 1, 8)


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [
        (ValueError, lambda: P.apply_rotary(X[..., :7], np.arange(3)), "width must be even, .* got 7"),
        (ValueError, lambda: P.apply_rotary(X, np.arange(4)), r"\[T\] = \(3,\) or \[\*B, T\] = \(2, 3\) .* got \(4,\)"),
        (ValueError, lambda: P.apply_rotary(X, 5), r"positions must have shape .* got \(\)"),
        (ValueError, lambda: P.apply_rotary(X, np.zeros((3, 2), int)), r"positions must have shape .* got \(3, 2\)"),
        (TypeError, lambda: P.apply_rotary(X, np.arange(3.0)), "positions must have an integer dtype, got float32"),
        (ValueError, lambda: P.apply_rotary(X, np.array([0, 1, 2**40])), "positions must fit int32"),
        (TypeError, lambda: P.apply_rotary(X.astype(int), np.arange(3)), "x must have a floating dtype"),
        (ValueError, lambda: P.apply_rotary(X[0, 0], np.arange(3)), "x must have at least 3 axes"),
        (TypeError, lambda: P.apply_rotary(X, np.arange(3), interleaved=1), "interleaved must be True or False"),
        (ValueError, lambda: P.apply_rotary(X, np.arange(3), scaling=DYNAMIC), "length must be given for DynamicNTK"),
        (TypeError, lambda: P.apply_rotary(X, np.arange(3), scaling="yarn"), "scaling must be None or one of .*'yarn'"),
        (TypeError, lambda: P.apply_rotary(X, np.arange(3), scaling=P.Linear), "scaling must be None or one of"),
        (ValueError, lambda: P.rotary_frequencies(0), "width must be at least 1, got 0"),
        (ValueError, lambda: P.rotary_frequencies(8, base=1.0), "base must be greater than 1, got 1.0"),
        (ValueError, lambda: P.rotary_frequencies(8, base=np.nan), "base must be finite, got nan"),
        (ValueError, lambda: P.rotary_frequencies(8, scaling=DYNAMIC), "length must be given for DynamicNTK"),
        (ValueError, lambda: P.rotary_frequencies(8, scaling=DYNAMIC, length=0), "length must be at least 1, got 0"),
        (ValueError, lambda: P.rotary_frequencies(2, scaling=P.NTK(2.0)), "width must be at least 4 for NTK"),
        (ValueError, lambda: P.Linear(0.5), "factor must be at least 1, got 0.5"),
        (TypeError, lambda: P.NTK("2"), "factor must be one number"),
        (ValueError, lambda: P.DynamicNTK(2.0, 0), "original_length must be at least 1, got 0"),
        (TypeError, lambda: P.YaRN(2.0, 16.0), "original_length must be an integer"),
        (ValueError, lambda: P.YaRN(2.0, 16, 1, 32), "beta_slow must be less than beta_fast = 1, got 32"),
        (ValueError, lambda: P.YaRN(2.0, 16, attention_factor=0.0), "attention_factor must be positive and finite"),
        (ValueError, lambda: P.Llama3(8.0, 4.0, 4.0, 8192), "low_freq_factor must be less than high_freq_factor = 4.0"),
        (ValueError, lambda: P.sinusoidal(np.arange(3), 5), "width must be even, .* got 5"),
        (TypeError, lambda: P.sinusoidal(np.arange(3.0), 4), "positions must have an integer dtype"),
        (TypeError, lambda: P.sinusoidal(np.arange(3), 4, dtype=int), "dtype must be floating"),
        (ValueError, lambda: P.learned(TABLE[0], np.arange(3)), r"table must have rank 2, \[L, D\]"),
        (TypeError, lambda: P.learned(TABLE, np.array([True])), "positions must have an integer dtype, got bool"),
    ],
)
def test_wrong_arguments_raise(error, call, words):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)

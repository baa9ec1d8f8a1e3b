"""Every check lets the right argument through and names the wrong one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import checks


@pytest.mark.parametrize(
    ("error", "check", "words"),
    [
        (TypeError, lambda: checks.as_array("q", None), "q must be an array, got NoneType None"),
        (TypeError, lambda: checks.as_array("q", "text"), "q must be an array, got str 'text'"),
        (TypeError, lambda: checks.as_array("q", [[1.0, 2.0], [3.0]]), "q must be an array, got list"),
        (ValueError, lambda: checks.as_array("p", [2**40]), "p holds an integer that does not fit"),
        (TypeError, lambda: checks.floating_array("q", [1, 2]), "q must have a floating dtype, got int32"),
        (TypeError, lambda: checks.floating_array("q", [1j]), "q must have a floating dtype, got complex64"),
        (TypeError, lambda: checks.integer_array("p", [1.0]), "p must have an integer dtype, got float32"),
        (TypeError, lambda: checks.integer_array("p", [True]), "p must have an integer dtype, got bool"),
        (ValueError, lambda: checks.integer_array("p", np.array([2**31])), "p must fit int32, got values from 2147"),
        (ValueError, lambda: checks.rank("m", np.ones(3), (2, 4), "[T, S]"), r"m must have rank 2 or 4, \[T, S\]; got"),
        (
            ValueError,
            lambda: checks.minimum_rank("q", np.ones(3), 2, "[T, H]"),
            r"at least 2 axes, \[T, H\]; got shape",
        ),
        (
            ValueError,
            lambda: checks.shape("w", np.ones(3), (4,), "[H]"),
            r"w must have shape \[H\] = \(4,\), got \(3,\)",
        ),
        (ValueError, lambda: checks.broadcastable("b", np.ones(3), (2, 3), "[T, S]"), "b must broadcast to"),
        (ValueError, lambda: checks.broadcastable("b", np.ones((2, 2)), (2, 3), "[T, S]"), "b must broadcast to"),
        (TypeError, lambda: checks.positive_int("n", 2.0), "n must be an integer, got float 2.0"),
        (TypeError, lambda: checks.positive_int("n", True), "n must be an integer, got bool True"),
        (ValueError, lambda: checks.positive_int("n", 0), "n must be at least 1, got 0"),
        (ValueError, lambda: checks.grouped_heads(3, 2), "got 3 query heads and 2 key/value heads"),
        (ValueError, lambda: checks.grouped_heads(4, 0), "got 4 query heads and 0 key/value heads"),
        (ValueError, lambda: checks.grouped_heads(0, 1), "got 0 query heads and 1 key/value heads"),
        (TypeError, lambda: checks.finite_number("c", "1"), "c must be one number, got str '1'"),
        (TypeError, lambda: checks.finite_number("c", False), "c must be one number, got bool False"),
        (TypeError, lambda: checks.finite_number("c", np.bool_(True)), "c must be one number"),
        (TypeError, lambda: checks.finite_number("c", np.array(1j)), "c must be one number"),
        (
            TypeError,
            lambda: checks.finite_number("c", jnp.ones(1)),
            "c must be one number, got .* of dtype float32 and",
        ),
        (ValueError, lambda: checks.finite_number("c", float("nan")), "c must be finite, got nan"),
        (ValueError, lambda: checks.finite_number("c", 0.0, positive=True), "c must be positive and finite, got 0.0"),
        (ValueError, lambda: checks.finite_number("c", 0.5, least=1), "c must be at least 1, got 0.5"),
        (ValueError, lambda: checks.rate("r", 1.0), r"r must lie in \[0, 1\), got 1.0"),
        (ValueError, lambda: checks.rate("r", -0.1), r"r must lie in \[0, 1\), got -0.1"),
        (ValueError, lambda: checks.rate("r", float("nan")), r"r must lie in \[0, 1\), got nan"),
        (TypeError, lambda: checks.rate("r", "half"), "r must be one number"),
        (TypeError, lambda: checks.rate("r", None), "r must be one number"),
        (TypeError, lambda: checks.boolean("flag", 1), "flag must be True or False, got int 1"),
        (ValueError, lambda: checks.one_of("rule", "x", ("a", "b")), "rule must be one of 'a', 'b'; got 'x'"),
        (ValueError, lambda: checks.one_of("rule", 1, (True,)), "rule must be one of True; got 1"),
        (TypeError, lambda: checks.prng_key("rng", 0), "rng must be one key, .* got int 0"),
        (
            TypeError,
            lambda: checks.prng_key("rng", jax.random.split(jax.random.key(0))),
            r"rng must be one key.*\(2,\)",
        ),
    ],
)
def test_wrong_arguments_are_named(error, check, words):
    with pytest.raises(error, match=words):
        check()


def test_right_arguments_pass():
    assert checks.integer_array("p", np.array([-1, 2**31 - 1])).tolist() == [-1, 2**31 - 1]
    assert checks.as_array("q", [1.0, 2.0]).dtype == jnp.float32
    assert checks.floating_array("q", jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    assert checks.positive_int("n", np.int64(3)) == 3
    assert checks.positive_int("n", 0, least=0) == 0
    assert checks.grouped_heads(6, 2) == 3
    assert checks.finite_number("c", jnp.float32(0.5), positive=True) == 0.5
    assert checks.finite_number("c", np.int32(-2)) == -2.0
    assert checks.finite_number("c", 1, least=1) == 1.0
    assert checks.rate("r", np.float32(0.5)) == 0.5
    assert checks.boolean("flag", np.True_) is True
    checks.one_of("rule", None, ("a", None))
    checks.rank("m", jnp.ones((2, 3)), (2, 4), "[T, S]")
    checks.broadcastable("b", np.ones((1, 3)), (2, 3), "[T, S]")
    old, new = checks.prng_key("rng", jnp.array([0, 1], jnp.uint32)), checks.prng_key("rng", jax.random.key(1))
    assert jax.random.uniform(old) == jax.random.uniform(new)


def test_values_of_64_bits_fit_with_x64(x64):
    assert checks.integer_array("p", np.array([2**40])).tolist() == [2**40]


def test_a_traced_number_is_refused_and_seen_as_traced():
    @jax.jit
    def f(x):
        assert not checks.is_concrete(x)
        with pytest.raises(TypeError, match="c must be a concrete number, got a traced value"):
            checks.finite_number("c", x)
        with pytest.raises(TypeError, match="r must be a concrete number"):
            checks.rate("r", x)
        return x

    assert checks.is_concrete(f(1.0))

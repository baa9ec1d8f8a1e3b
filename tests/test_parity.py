"""Drop-in for `jax.nn.dot_product_attention`: same call, same values, same gradients where the semantics agree."""

import functools
import inspect

import jax
import numpy as np
import pytest

import attn_jax

B, T, S, N, K, H = 2, 6, 8, 4, 2, 8
rng = np.random.default_rng(0)
QUERY, D_OUTPUT = rng.standard_normal((2, B, T, N, H), np.float32)
KEY, VALUE = rng.standard_normal((2, B, S, K, H), np.float32)
BIAS = rng.standard_normal((B, N, T, S), np.float32)
MASK = rng.random((B, N, T, S)) < 0.6
MASK[..., 0] = True  # no row is empty: there `jax.nn` gives the mean of the values

SAME = {
    "bare": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "scale 0": {"scale": 0.0},
    "window": {"local_window_size": (3, 1)},
    "window by one number": {"local_window_size": 2},
    "causal window": {"local_window_size": (2, 5), "is_causal": True},
    "bias": {"bias": BIAS},
    "bias of one head": {"bias": BIAS[:, :1]},
    "bias of one item": {"bias": BIAS[:1]},
    "mask": {"mask": MASK},
    "mask of one head": {"mask": MASK[:1, :1], "is_causal": True},
    "mask of the keys": {"mask": MASK[:, :1, :1]},
    "lengths of keys": {"key_value_seq_lengths": np.array([3, 8], np.int32)},
    "lengths of queries": {"query_seq_lengths": np.array([6, 2], np.int32)},
    "all": {
        "bias": BIAS, "mask": MASK, "is_causal": True, "local_window_size": (7, 7), "scale": 0.5,
        "query_seq_lengths": np.array([5, 6], np.int32), "key_value_seq_lengths": np.array([8, 4], np.int32),
    },
}  # fmt: skip


def evaluated(attend, name, heads, unbatched):
    """Output and gradients of a call, by name."""
    key, value = (KEY, VALUE) if heads == "groups" else (np.repeat(x, N // K, axis=2) for x in (KEY, VALUE))
    inputs, options = {"query": QUERY, "key": key, "value": value}, dict(SAME[name])
    cotangent = D_OUTPUT
    if unbatched:
        inputs, cotangent = {n: x[0] for n, x in inputs.items()}, D_OUTPUT[0]
        options = {n: {1: x[:1], 4: x[0]}[x.ndim] if isinstance(x, np.ndarray) else x for n, x in options.items()}
    if "bias" in options:
        inputs["bias"] = options.pop("bias")

    @jax.jit  # one compilation for both directions
    def run(inputs, cotangent):
        output, pull = jax.vjp(lambda inputs: attend(**inputs, **options), inputs)
        return {"output": output} | pull(cotangent)[0]

    return run(inputs, cotangent)


@pytest.mark.parametrize(("name", "heads"), [(name, "groups") for name in SAME] + [("bare", "heads"), ("all", "heads")])
def test_values_and_gradients(name, heads):
    ours = evaluated(attn_jax.dot_product_attention, name, heads, False)
    theirs = evaluated(jax.nn.dot_product_attention, name, heads, False)
    compare(ours, theirs)


@pytest.mark.parametrize("name", ["bare", "all", "lengths of keys"])
def test_values_and_gradients_without_a_batch(name):
    ours = evaluated(attn_jax.dot_product_attention, name, "groups", True)
    theirs = evaluated(jax.nn.dot_product_attention, name, "groups", True)
    compare(ours, theirs)


@pytest.mark.parametrize("name", ["bare", "all"])
def test_log_sum_exp(name):
    ours, theirs = (
        jax.jit(functools.partial(attend, **SAME[name], return_residual=True))(QUERY, KEY, VALUE)[1]
        for attend in (attn_jax.dot_product_attention, jax.nn.dot_product_attention)
    )
    seeing = np.isfinite(ours)  # a row past its length: -inf with us, a large negative number there
    np.testing.assert_allclose(ours[seeing], theirs[seeing], atol=1e-5)
    assert (np.asarray(theirs)[~seeing] < -1e30).all()


def test_the_call_is_a_superset():
    ours = inspect.signature(attn_jax.dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert [p for p in ours if ours[p].kind == positional] == [p for p in theirs if theirs[p].kind == positional]
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name


def compare(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert (x.dtype, x.shape) == (theirs[name].dtype, theirs[name].shape), name
        np.testing.assert_allclose(x, theirs[name], atol=1e-5 * np.abs(theirs[name]).max(), err_msg=name)

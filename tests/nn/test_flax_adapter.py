"""Stock Flax modules with our attention inside give the stock outputs and gradients."""

import functools
import inspect

import chex
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attn_jax
from attn_jax import biases, masks
from attn_jax.diagnostics.statistics import attention_statistics
from attn_jax.nn import as_attention_fn
from tests import oracles

B, T, D, N = 2, 5, 12, 6
rng = np.random.default_rng(0)
X = jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32)
CONTEXT = jnp.asarray(rng.standard_normal((B, 7, D)), jnp.float32)
TOKENS = jnp.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
CAUSAL = nnx.make_causal_mask(TOKENS)
PADDING = nnx.make_attention_mask(jnp.ones_like(TOKENS), TOKENS)
QKV = tuple(jnp.asarray(rng.standard_normal((B, T, N, 4)), jnp.float32) for _ in range(3))


@functools.cache
def nnx_pair(**options):
    """The stock module, and the same parameters with our attention."""
    stock = nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0), **options)
    ours = nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0), attention_fn=as_attention_fn(), **options)
    return stock, ours


def check_same(call, stock, ours, x, *arguments):
    """Equal outputs, and equal gradients of parameters and input."""

    def loss(module, x):
        output = call(module, x, *arguments)
        return jnp.sum(jnp.sin(output)), output

    run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (expected_gradients, expected), (gradients, output) = run(stock, x), run(ours, x)
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-5)
    for g, e in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(g, e, rtol=0, atol=1e-5 * max(1.0, float(jnp.abs(e).max())))


@pytest.mark.parametrize(
    "mask",
    [None, CAUSAL, PADDING, nnx.combine_masks(CAUSAL, PADDING), jnp.broadcast_to(CAUSAL, (B, N, T, T)), CAUSAL[0]],
    ids=["none", "causal", "padding", "both", "per head", "without batch"],
)
def test_nnx_with_the_masks_flax_makes(mask):
    if mask is not None:
        assert mask.dtype == jnp.float32
    check_same(lambda module, x: module(x, mask=mask), *nnx_pair(), X)


def test_nnx_is_causal_and_normalised_queries():
    # a norm over heads of width 2 leaves only signs, with gradients that are all rounding
    check_same(lambda module, x: module(x, is_causal=True), *nnx_pair(normalize_qk=True, qkv_features=48), X)


def test_nnx_grouped_cross_attention():
    mask = nnx.make_attention_mask(TOKENS, jnp.ones((B, 7)))
    stock, ours = nnx_pair(num_kv_heads=2)
    mask = mask.at[:, :, 3:].set(1)  # a query that sees nothing gives 0 here and the mean of values there
    check_same(lambda module, x: module(x, CONTEXT, mask=mask), stock, ours, X)


def test_nnx_decodes_from_its_cache():
    outputs = []
    for module in nnx_pair():
        graph, state = nnx.split(module)
        module = nnx.merge(graph, state)
        module.init_cache((B, T, D))
        step = nnx.jit(lambda module, x: module(x, decode=True))
        outputs.append(jnp.concatenate([step(module, X[:, t : t + 1]) for t in range(T)], axis=1))
    chex.assert_trees_all_close(*outputs, atol=1e-5)
    chex.assert_trees_all_close(outputs[0], nnx_pair()[0](X, mask=CAUSAL), atol=1e-5)


def test_linen():
    combined = nnx.combine_masks(CAUSAL, PADDING)
    for arguments in ({}, {"mask": combined}):
        stock = flax.linen.MultiHeadDotProductAttention(N)
        ours = flax.linen.MultiHeadDotProductAttention(N, attention_fn=as_attention_fn(), force_fp32_for_softmax=True)
        variables = stock.init(jax.random.key(0), X)
        outputs = [module.apply(variables, X, **arguments) for module in (ours, stock)]
        np.testing.assert_allclose(*outputs, rtol=0, atol=1e-5)
        gradients = [
            jax.jit(jax.grad(lambda v, m=m, a=arguments: jnp.sum(jnp.sin(m.apply(v, X, **a)))))(variables)
            for m in (stock, ours)
        ]
        chex.assert_trees_all_close(*gradients, atol=1e-5, rtol=1e-5)


def test_linen_decodes_from_its_cache():
    outputs = []
    for options in ({}, {"attention_fn": as_attention_fn()}):
        module = flax.linen.MultiHeadDotProductAttention(N, decode=True, **options)
        variables = module.init(jax.random.key(0), X)
        parameters, cache = variables["params"], variables["cache"]
        step = jax.jit(lambda v, x, module=module: module.apply(v, x, mutable=["cache"]))
        rows = []
        for t in range(T):
            output, changed = step({"params": parameters, "cache": cache}, X[:, t : t + 1])
            cache = changed["cache"]
            rows.append(output)
        outputs.append(jnp.concatenate(rows, axis=1))
    chex.assert_trees_all_close(*outputs, atol=1e-5)


def test_without_batch_and_with_two_batch_axes():
    for x in (X[0], jnp.stack([X, X + 1])):
        check_same(lambda module, x: module(x, is_causal=True), *nnx_pair(), x)


def test_bfloat16_keeps_flax_dtype():
    stock, ours = nnx_pair(dtype=jnp.bfloat16)
    output = ours(X)
    assert output.dtype == stock(X).dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(output), np.float32(stock(X)), atol=2e-2)


def test_dropout_is_off_in_evaluation():
    ours = nnx_pair(dropout_rate=0.5)[1]
    for rngs in (None, nnx.Rngs(1), nnx.Rngs(2)):
        np.testing.assert_allclose(ours(X, deterministic=True, rngs=rngs), nnx_pair()[1](X), atol=1e-6)


@pytest.mark.parametrize("mask", [None, CAUSAL, jnp.broadcast_to(PADDING, (B, N, T, T))], ids=["none", "causal", "all"])
def test_broadcast_dropout_is_one_mask_for_batch_and_heads(mask):
    """With one-hot values the output is the dropped weights: what was dropped shows as zero."""
    query, key, _ = QKV
    value = jnp.broadcast_to(jnp.eye(T)[None, :, None, :], (B, T, N, T))
    attend = jax.jit(functools.partial(as_attention_fn(), dropout_rate=0.4), static_argnames="deterministic")
    weights = attend(query, key, value, mask=mask, deterministic=True)
    shared = attend(query, key, value, mask=mask, dropout_rng=jax.random.key(1))
    kept = np.asarray(shared != 0) | np.asarray(weights == 0)  # a masked entry says nothing
    one = kept.all(axis=(0, 2))
    assert (kept == (one[None, :, None, :] | np.asarray(weights == 0))).all()
    assert 0 < one.sum() < T * T
    np.testing.assert_allclose(shared, np.where(kept, weights / 0.6, 0), rtol=1e-5, atol=1e-6)
    own = jax.jit(functools.partial(as_attention_fn(), dropout_rate=0.4, broadcast_dropout=False))(
        query, key, value, mask=mask, dropout_rng=jax.random.key(1)
    )
    kept = np.asarray(own != 0) | np.asarray(weights == 0)
    assert not (kept == (kept.all(axis=(0, 2))[None, :, None, :] | np.asarray(weights == 0))).all()


def test_shared_dropout_takes_grouped_heads_and_biases():
    query, (key, value) = QKV[0], (x[:, :, :2] for x in QKV[1:])
    bias = jnp.asarray(rng.standard_normal((1, N, T, T)), jnp.float32)
    call = functools.partial(as_attention_fn(), dropout_rate=0.5, dropout_rng=jax.random.key(0))
    output = call(query, key, value, bias=bias, mask=CAUSAL)
    keep = call(jnp.zeros((T, 1, 1)), jnp.zeros((T, 1, 1)), jnp.eye(T)[:, None, :])[:, 0] > 0  # the mask of this key
    forward = oracles.attention(
        query, key, value, np.asarray(bias), np.asarray(CAUSAL) > 0, dropout_rate=0.5, dropout_keep=np.asarray(keep)
    )
    np.testing.assert_allclose(output, forward.output, atol=1e-5)


def test_fixed_options():
    query, key, value = QKV
    attend = as_attention_fn(scale=0.3, mask=masks.SlidingWindow(2), bias=biases.Alibi(N), logits_soft_cap=2.0)
    expected = attn_jax.dot_product_attention(
        query, key, value, biases.Alibi(N), masks.SlidingWindow(2) & (PADDING > 0), scale=0.3, logits_soft_cap=2.0
    )
    chex.assert_trees_all_close(attend(query, key, value, mask=PADDING), expected, atol=1e-6)


OPTIONS = {
    "scale": 0.3,
    "scale per head": {"scale": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)},
    "is_causal": True,
    "sinks": (0.5, -1.0, 2.0, 0.0, 1.0, 3.0),
    "logits_soft_cap": 2.0,
    "query_seq_lengths": (3, 5),
    "key_value_seq_lengths": (4, 2),
    "local_window_size": (1, 2),
    "query_offset": {"query_offset": (2, 0), "is_causal": True},
    "query_positions": {"query_positions": ((4, 3, 2, 1, 0), (0, 1, -1, 3, 9)), "is_causal": True},
    "key_positions": {"key_positions": (4, 3, 2, -1, 0), "local_window_size": 1},
    "mask": masks.SlidingWindow(2),
    "bias": biases.Alibi(N),
    "implementation": "dense",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_act_in_training_as_in_evaluation(name):
    """With all but no dropout the shared mask drops nothing, and each option must still be there."""
    option = OPTIONS[name] if isinstance(OPTIONS[name], dict) else {name: OPTIONS[name]}
    attend, bias = as_attention_fn(**option), jnp.asarray(rng.standard_normal((1, N, T, T)), jnp.float32)
    key, value = (x[:, :, : 6 if "Alibi" in str(option) else 3] for x in QKV[1:])
    expected = attn_jax.dot_product_attention(
        QKV[0], key, value, bias if "bias" not in option else option["bias"] + bias,
        PADDING > 0 if "mask" not in option else option["mask"] & (PADDING > 0),
        **{name: x for name, x in option.items() if name not in ("bias", "mask")},
    )  # fmt: skip
    arguments = {"mask": PADDING, "dropout_rate": 1e-9, "dropout_rng": jax.random.key(0)}
    for shared in (True, False):
        output = jax.jit(functools.partial(attend, **arguments, broadcast_dropout=shared))(QKV[0], key, value, bias)
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_every_option_is_tried_in_training():
    accepted = inspect.signature(attn_jax.dot_product_attention).parameters.keys()
    given_by_flax = {"query", "key", "value", "dropout_rate", "dropout_rng", "precision", "return_residual"}
    assert accepted - given_by_flax == OPTIONS.keys() - {"scale per head"}


def test_shared_dropout_without_entries():
    empty = jnp.zeros((B, 0, N, 4))
    output = as_attention_fn()(empty, *QKV[1:], dropout_rate=0.5, dropout_rng=jax.random.key(0))
    assert output.shape == empty.shape


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"implementation": "foo"}, {}, "implementation must be one of"),
        (
            {"implementation": "xla", "logits_soft_cap": 3.0},
            {},
            "'xla' cannot do this: it does not take logits_soft_cap",
        ),
        ({"implementation": "xla"}, {"mask": PADDING}, "'xla' cannot do this: it does not take mask"),
        (
            {"implementation": "xla"},
            {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
            "'xla' cannot do this: it does not take dropout_rate",
        ),
    ],
)
def test_an_implementation_is_refused_in_every_mode(options, arguments, message):
    class Sink:
        def sow(self, collection, name, value):
            pass

    for statistics in ({}, {"module": Sink()}):
        for shared in (True, False):
            with pytest.raises(ValueError, match=message):
                as_attention_fn(statistics=True, **options)(*QKV, **arguments, **statistics, broadcast_dropout=shared)


def test_statistics_are_sown_only_when_handed_the_module():
    module = nnx.MultiHeadAttention(
        N, D, decode=False, attention_fn=as_attention_fn(statistics=True), rngs=nnx.Rngs(0), num_kv_heads=3
    )
    call = nnx.capture(nnx.Intermediate)(lambda module, sow: module(X, mask=PADDING, sow_weights=sow))
    silent, nothing = call(module, False)
    output, sown = call(module, True)
    assert not jax.tree.leaves(nothing)
    chex.assert_trees_all_close(output, silent, atol=1e-6)
    expected = attention_statistics(
        module.query(X), module.key(X), mask=PADDING > 0, statistics=("entropy", "max_logit", "max_weight")
    )
    values = {name: np.asarray(sown[name][0]) for name in sown}
    assert values.keys() == {
        "attention_entropy", "attention_normalized_entropy", "attention_max_logit", "attention_max_weight"
    }  # fmt: skip
    assert all(x.shape == (N,) for x in values.values())
    np.testing.assert_allclose(values["attention_entropy"], expected.entropy.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(values["attention_max_weight"], expected.max_weight.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(values["attention_max_logit"], expected.max_logit.max((0, 1)), rtol=1e-5)


def test_linen_sows_the_same_numbers():
    module = flax.linen.MultiHeadDotProductAttention(
        N, attention_fn=as_attention_fn(statistics=True), dropout_rate=0.5, deterministic=False
    )
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(0)}, X)
    _, sown = module.apply(
        variables, X, sow_weights=True, mutable=["intermediates"], rngs={"dropout": jax.random.key(1)}
    )
    sown = sown["intermediates"]
    assert {x[0].shape for x in sown.values()} == {(N,)}
    assert (sown["attention_normalized_entropy"][0] <= 1).all()
    assert (sown["attention_entropy"][0] > 0).all()


def test_rows_that_see_nothing_do_not_count():
    nothing = nnx.make_attention_mask(TOKENS, TOKENS)  # queries past the length see no key

    class Sink:
        def sow(self, collection, name, value):
            assert collection == "intermediates"
            seen[name] = value

    seen = {}
    output = as_attention_fn(statistics=True)(*QKV, mask=nothing, module=Sink())
    assert (output[0, 3:] == 0).all()
    entropy = attention_statistics(*QKV[:2], mask=nothing > 0).entropy
    expected = (entropy[0, :3].sum(0) + entropy[1].sum(0)) / 8
    np.testing.assert_allclose(seen["attention_entropy"], expected, rtol=1e-5)
    assert np.isfinite(seen["attention_max_logit"]).all()


def test_equal_options_are_equal_functions():
    first, second = (as_attention_fn(local_window_size=(1, 0), mask=masks.Strided(2)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != as_attention_fn(local_window_size=(2, 0), mask=masks.Strided(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 3}, "window is no option of as_attention_fn; it takes bias, mask, scale, is_causal"),
        ({"dropout_rate": 0.1}, "dropout_rate is no option of as_attention_fn"),
        ({"return_residual": True}, "return_residual is no option of as_attention_fn"),
        ({"sinks": jnp.zeros(N)}, r"sinks must be a static, hashable value here.*dtype float32 and shape \(6,\)$"),
        ({"mask": np.ones((9, 9), bool)}, r"mask must be a static.* with an array of dtype bool and shape \(9, 9\)$"),
        ({"mask": masks.Padding(jnp.array([3, 5]))}, r"mask must be a static.*got Padding, with an array .* \(2,\)$"),
        ({"scale": [1.0, 2.0]}, "scale must be a static, hashable value here.*got list$"),
        ({"local_window_size": (1, [2])}, "local_window_size must be a static, hashable value here.*got tuple$"),
        ({"statistics": 1}, "statistics must be True or False"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(TypeError, match=message) as raised:
        as_attention_fn(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general must be None"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum must be None"),
        ({"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum must be None"),
        ({"module": object()}, r"sow_weights asks for the n×n weights.*as_attention_fn\(statistics=True\)"),
        ({"dropout_rate": 1.0}, r"dropout_rate must lie in \[0, 1\)"),
        ({"dropout_rate": 0.5}, "dropout_rng must be a key"),
        ({"mask": jnp.ones((1, B, N, T, T))}, r"mask must broadcast to \[\*B, N, T, S\], 4 axes"),
        ({"mask": jnp.ones((3, 1, T, T))}, "mask must broadcast to"),
        (
            {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0), "mask": jnp.ones((3, 1, T, T))},
            "mask must broadcast",
        ),
        ({"is_causal": 1}, "is_causal must be True or False"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        as_attention_fn()(*QKV, **arguments)
    assert "\n" not in str(raised.value)


def test_observe_is_handed_what_attention_gets_and_is_sown():
    def shapes(query, key, value, *, mask, is_causal):
        assert is_causal
        return {"seen": mask.sum(), "query": query}

    module = nnx.MultiHeadAttention(
        N, D, decode=False, attention_fn=as_attention_fn(observe=shapes), rngs=nnx.Rngs(0), num_kv_heads=3
    )
    call = nnx.capture(nnx.Intermediate)(lambda module: module(X, mask=PADDING, is_causal=True, sow_weights=True))
    output, sown = call(module)
    (found,) = sown["attention_measures"]
    assert int(found["seen"]) == int((PADDING > 0).sum())
    np.testing.assert_allclose(found["query"], module.query(X), rtol=1e-6)
    np.testing.assert_allclose(output, module(X, mask=PADDING, is_causal=True), atol=1e-6)


def test_observe_must_be_callable():
    with pytest.raises(TypeError, match=r"^observe must be callable, got int$"):
        as_attention_fn(observe=3)

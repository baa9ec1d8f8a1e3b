"""Whole modules: faults planted in Flax's attention and ours, each named at its link."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_jax import empty_cache, positions
from attn_jax.audit import Expectation, audit_module
from attn_jax.nn import MultiHeadAttention

ROTARY = Expectation(positions="rotary", causal=True)


def ours(**options):
    return MultiHeadAttention(16, 4, rngs=nnx.Rngs(0), **options)


def flax(**options):
    return nnx.MultiHeadAttention(num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0), **options)


def changed(name, change, **options):
    """Ours with one weight changed."""
    module = ours(**options)
    parameter = getattr(module, name)
    parameter[...] = change(parameter[...])
    return module


def copied_head():
    module = ours()
    for name in ("query_weight", "key_weight", "value_weight"):
        parameter = getattr(module, name)
        parameter[...] = parameter[...].at[:, 1].set(parameter[...][:, 0])
    module.output_weight[...] = module.output_weight[...].at[1].set(module.output_weight[...][0])
    return module


def tied_values():
    module = ours()
    module.key_weight[...] = module.query_weight[...]
    return module


class Wrapped(nnx.Module):
    """A module inside another one that does something more."""

    def __init__(self, inner, before=lambda x: x, after=lambda x: x):
        self.inner, self.before, self.after = inner, before, after

    def __call__(self, x):
        return self.after(self.inner(self.before(x)))


class Plain(nnx.Module):
    """Matrices without an axis of heads, and a choice of how they are cut."""

    def __init__(self, cut="transpose"):
        keys = jax.random.split(jax.random.key(0), 4)
        self.wq, self.wk, self.wv, self.wo = (nnx.Param(jax.random.normal(k, (16, 16)) / 4) for k in keys)
        self.cut = cut

    def __call__(self, x):
        batch, length, _ = x.shape

        def heads(x):
            if self.cut == "transpose":
                return jnp.swapaxes(x.reshape(batch, length, 4, 4), 1, 2)
            return x.reshape(batch, 4, length, 4)

        q, k, v = (heads(x @ w[...]) for w in (self.wq, self.wk, self.wv))
        weights = jax.nn.softmax(jnp.einsum("bnth,bnsh->bnts", q, k) / 2, axis=-1)
        return jnp.swapaxes(weights @ v, 1, 2).reshape(batch, length, 16) @ self.wo[...]


class Grouped(nnx.Module):
    """Matrices, four heads of queries and two of keys, rotary, causal: the layers of many decoders, in another hand."""

    def __init__(self, *, turn=("query", "key"), order="repeat", names=("wq", "wk", "wv", "wo")):
        keys = jax.random.split(jax.random.key(0), 4)
        for name, columns, key in zip(names, (16, 8, 8, 16), keys, strict=True):
            setattr(self, name, nnx.Linear(16, columns, use_bias=False, rngs=nnx.Rngs(key)))
        self.names, self.turn, self.order = names, turn, order

    def __call__(self, x):
        batch, length, _ = x.shape
        wq, wk, wv, wo = (getattr(self, name) for name in self.names)
        q, k, v = (w(x).reshape(batch, length, -1, 4) for w in (wq, wk, wv))
        q = positions.apply_rotary(q, np.arange(length)) if "query" in self.turn else q
        k = positions.apply_rotary(k, np.arange(length)) if "key" in self.turn else k
        k, v = jnp.tile(k, (1, 1, 2, 1)) if self.order == "tile" else jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
        logits = jnp.where(np.tri(length, dtype=bool)[None, None], jnp.einsum("btnh,bsnh->bnts", q, k) / 2, -jnp.inf)
        return wo(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v).reshape(batch, length, 16))


GROUPED = {"num_heads": 4, "expect": ROTARY}
HEALTHY = {
    "flax": (lambda: flax(), {}),
    "flax, causal": (
        lambda: flax(),
        {
            "call": lambda module, x: module(x, mask=nnx.make_causal_mask(x[..., 0])),
            "expect": Expectation(causal=True),
        },
    ),
    "ours, biases": (lambda: ours(use_bias=True), {}),
    "ours, grouped": (lambda: ours(num_kv_heads=2), {}),
    "ours, rotary, causal": (lambda: ours(positions="rotary", is_causal=True), {"expect": ROTARY}),
    "matrices": (lambda: Plain(), {"num_heads": 4}),
    "matrices, grouped, rotary": (lambda: Grouped(), GROUPED),
}
STEP = np.linspace(0, 1, 8, dtype=np.float32)[None, :, None]
FAULTY = {
    "no scale": (lambda: ours(scale_rule="none"), {}, "scale"),
    "1/H": (lambda: ours(scale_rule="inverse"), {}, "scale"),
    "causal": (lambda: ours(is_causal=True), {}, "mask"),
    "not causal": (lambda: ours(), {"expect": Expectation(causal=True)}, "mask"),
    "rotary": (lambda: ours(positions="rotary"), {}, "positions"),
    "no positions": (lambda: ours(), {"expect": Expectation(positions="rotary")}, "positions"),
    "positions added": (lambda: Wrapped(ours(), before=lambda x: x + STEP), {}, "values"),
    "keys by the query's weight": (lambda: ours(tie_query_key=True), {}, "projections"),
    "equal weights of query and key": (lambda: tied_values(), {}, "projections"),
    "no output projection": (lambda: changed("output_weight", lambda w: jnp.eye(16).reshape(w.shape)), {}, "output"),
    "output in blocks": (
        lambda: changed("output_weight", lambda w: w * jnp.eye(4)[:, None, :].repeat(4, axis=2)),
        {},
        "output",
    ),
    "a dead head": (lambda: changed("output_weight", lambda w: w.at[2].set(0)), {}, "heads"),
    "a copied head": (lambda: copied_head(), {}, "heads"),
    "items mixed": (lambda: Wrapped(ours(), before=lambda x: x - x.mean(axis=0, keepdims=True)), {}, "batch"),
    "heads by reshape": (lambda: Plain("reshape"), {"num_heads": 4}, "heads"),
    "rotary on the queries alone": (lambda: Grouped(turn=("query",)), GROUPED, "positions"),
    "rotary on the keys alone": (lambda: Grouped(turn=("key",)), GROUPED, "positions"),
    "keys of another group": (lambda: Grouped(order="tile"), GROUPED, "heads"),
    "no gradient": (lambda: Wrapped(ours(), after=jax.lax.stop_gradient), {}, "gradients"),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_modules_have_no_fault(name):
    make, options = HEALTHY[name]
    report = audit_module(make(), width=16, **options)
    assert report.ok, str(report)
    unrun = {outcome.check for outcome in report.outcomes if outcome.result == "not applicable"}
    assert unrun <= {"decoding", "order of the tokens", "heads are cut"}


@pytest.mark.parametrize("name", FAULTY)
def test_the_broken_link_is_named(name):
    make, options, link = FAULTY[name]
    report = audit_module(make(), width=16, **options)
    assert report.faults, "no fault"
    assert report.faults[0].link == link, str(report)


def test_dropout_that_is_on():
    module, streams = flax(dropout_rate=0.5), nnx.Rngs(3)

    def call(module, x):
        return module(x, deterministic=False, rngs=streams)

    assert audit_module(module, width=16, call=call).faults[0].link == "dropout"
    assert audit_module(module, width=16, call=lambda module, x: module(x, deterministic=True)).ok


def decode(module, x, wrong=0):
    """Token by token from a cache; `wrong` puts the cached keys off by as many places."""
    cache, rows = empty_cache(x.shape[0], 16, num_kv_heads=4, head_width=4), []
    for token in range(x.shape[1]):
        row, new = module.extend(x[:, token : token + 1], cache)
        rows.append(row)
        cache = cache.append(*(jnp.roll(one, wrong, axis=2) for one in new))
    return jnp.concatenate(rows, axis=1)


def test_decoding_is_compared():
    module = ours(positions="rotary", is_causal=True)
    right = audit_module(module, width=16, expect=ROTARY, decode=decode)
    assert right.ok
    assert {outcome.check: outcome.result for outcome in right.outcomes}["decoding"] == "passed"
    wrong = audit_module(module, width=16, expect=ROTARY, decode=functools.partial(decode, wrong=1))
    (fault,) = wrong.faults
    assert fault.link == "cache"
    assert "rows [1, 2, 3, 4, 5, 6, 7]" in fault.evidence


def test_parameters_can_be_named():
    class Odd(nnx.Module):
        def __init__(self):
            self.alpha, self.beta, self.gamma, self.delta = (nnx.Param(p[...]) for p in four)

        def __call__(self, x):
            inner = ours()
            for name, p in zip(names, (self.alpha, self.beta, self.gamma, self.delta), strict=True):
                getattr(inner, name)[...] = p[...]
            return inner(x)

    names = ("query_weight", "key_weight", "value_weight", "output_weight")
    four = [getattr(ours(), name) for name in names]
    unnamed = {o.check: o for o in audit_module(Odd(), width=16).outcomes}
    assert unnamed["explained by its parameters"].note.startswith(
        "no weight of query, key, value, out was found: say par"
    )
    told = {"query": "alpha", "key": "beta", "value": "gamma", "out": "delta"}
    report = audit_module(Odd(), width=16, parameters=told)
    assert {o.check: o.result for o in report.outcomes}["explained by its parameters"] == "passed"


def test_matrices_need_the_number_of_heads_and_it_is_said():
    names = {"query": "a.kernel", "key": "b.kernel", "value": "c.kernel", "out": "d.kernel"}
    make = functools.partial(Grouped, names=("a", "b", "c", "d"), turn=("query",))
    unrun = audit_module(make(), width=16, expect=ROTARY, parameters=names)
    assert unrun.ok  # as far as could be seen: it says what could not
    assert "num_heads=" in str(unrun)
    assert f"{sum(o.result == 'not applicable' for o in unrun.outcomes)} not run" in str(unrun).splitlines()[0]
    (fault,) = audit_module(make(), width=16, parameters=names, **GROUPED).faults
    assert fault.link == "positions"
    assert "rotary of the queries and None of the keys" in fault.evidence


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: audit_module(np.eye(3), width=16), "module must be a flax.nnx.Module"),
        (lambda: audit_module(ours(), width=0), "width must be"),
        (lambda: audit_module(ours(), width=16, num_heads=0), "num_heads must be"),
        (lambda: audit_module(ours(), width=16, num_heads=True), "num_heads must be"),
        (
            lambda: audit_module(Grouped(), width=16, num_heads=3, parameters={"query": "wq.kernel"}),
            r"parameters\['query'\] must be a weight that num_heads=3 and width=16 cut, got shape \(16, 16\)",
        ),
        (lambda: audit_module(ours(), width=16, expect=3), "expect must be an Expectation"),
        (lambda: audit_module(ours(), width=16, parameters={"w": "x"}), "parameters must name roles among query"),
        (
            lambda: audit_module(ours(), width=16, parameters={"out": "x"}),
            r"parameters\['out'\] must be the path of a param.*query_w",
        ),
    ],
)
def test_bad_arguments(call, says):
    with pytest.raises((ValueError, TypeError), match=says):
        call()


def test_a_module_that_cannot_be_called_is_one_fault():
    report = audit_module(ours(), width=8)
    (fault,) = report.faults
    assert (fault.link, fault.check) == ("output", "runs")
    assert all(outcome.result == "not applicable" for outcome in report.outcomes[1:])

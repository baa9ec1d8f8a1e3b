"""The monitor in a step: the same numbers however it is run, and a training that it does not touch."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from attn_jax.diagnostics import sample_rows
from attn_jax.diagnostics.diagnosis import rows
from attn_jax.exact.attention import dot_product_attention
from attn_jax.nn import Transformer
from attn_jax.training import step
from attn_jax.training.loop import train
from attn_jax.training.monitor import ALL, DEFAULT, AttentionMonitor, Limits, Watch, explain
from attn_jax.training.monitor.monitor import SEED
from attn_jax.training.objectives import token_loss
from attn_jax.training.state import init_states, key_for, take_run
from tests import oracles
from tests.training import toy
from tests.training.test_loop import Interruption, Reporter, interrupt, log_of
from tests.training.test_run_log import points

MONITOR = AttentionMonitor(every=3, rows=6, limits=Limits(max_logit=2.5, sink_mass=0.25, logit_sd=0.9))
EVERY_STEP = dataclasses.replace(MONITOR, every=1)
run = functools.partial(train, task=toy.TASK, config=toy.CONFIG)
L, N = toy.TRANSFORMER.num_layers, toy.TRANSFORMER.num_heads


def many_states():
    return init_states(toy.make_transformer, toy.OPTIMIZER, seeds=[0, 1], learning_rates=[0.01, 0.03])


def of_kind(rows, kind):
    return [row for row in rows if row["kind"] == kind]


def batch_of(state, index=0):
    return toy.TASK.batch(key_for(state.key, "data"), index, 3)


def remembered(query, key, value, **options):
    return query, key, value


def test_numbers_are_those_of_what_the_model_computes():
    model, tokens = toy.begin(toy.make_transformer).model, batch_of(toy.begin(toy.make_transformer)).inputs
    _, seen = model(tokens, observe=EVERY_STEP.observer(5))
    _, captured = model(tokens, observe=remembered)
    assert seen.keys() == set(DEFAULT)
    rows = np.asarray(sample_rows(jax.random.fold_in(jax.random.key(SEED), 5), 6, 2))
    for layer in range(L):
        forward = oracles.attention(*(np.asarray(x[layer]) for x in captured), is_causal=True)
        fields = oracles.statistics(forward)
        choosing = rows[rows > 0]  # the first row sees one key
        for name, field in (("normalized_entropy", "normalized_entropy"), ("sink_mass", "first_key_mass")):
            np.testing.assert_allclose(seen[name][layer], fields[field][:, choosing].mean(axis=(0, 1)), rtol=1e-5)
        np.testing.assert_allclose(seen["max_logit"][layer], fields["max_logit"][:, choosing].max(axis=(0, 1)), 1e-5)
        norms = (forward.output[:, choosing] ** 2).sum(axis=-1).mean(axis=(0, 1)) ** 0.5
        np.testing.assert_allclose(seen["output_norm"][layer], norms, rtol=1e-5)


def test_other_rows_every_step_the_same_in_every_run():
    model, tokens = toy.begin(toy.make_transformer).model, batch_of(toy.begin(toy.make_transformer)).inputs
    observe = jax.jit(lambda number: model(tokens, observe=EVERY_STEP.observer(number))[1]["normalized_entropy"])
    first, second = observe(0), observe(1)
    assert (first != second).any()
    np.testing.assert_array_equal(first, observe(0))


def loss_of(params, graphdef, batch, number, *, monitor, remat):
    def loss(model, batch, observe):
        return token_loss(model, batch, key=None, observe=observe)

    model = nnx.merge(graphdef, params)
    value, measured = (jax.checkpoint(loss) if remat else loss)(model, batch, monitor.observer(number))
    return value, measured["observed"]


@pytest.mark.parametrize("remat", [False, True])
def test_the_same_under_scan_remat_and_vmap(remat):
    states = many_states()
    batch = batch_of(take_run(states, 0))
    gradient = jax.grad(functools.partial(loss_of, monitor=MONITOR, remat=remat), has_aux=True)

    @jax.jit
    def steps(params):
        def body(_, number):
            _, seen = gradient(params, states.graphdef, batch, number)
            return None, seen

        return jax.lax.scan(body, None, jnp.arange(4))[1]

    together = jax.jit(jax.vmap(steps))(states.params)
    alone = jax.jit(lambda params, number: gradient(params, states.graphdef, batch, number)[1])
    for run_index, number in ((0, 0), (1, 3), (3, 3)):
        expected = alone(take_run(states, run_index).params, number)
        for name in DEFAULT:
            actual = together[name][run_index, number]
            np.testing.assert_allclose(actual, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    for name in DEFAULT:  # in the steps between there is nothing
        assert (together[name][:, 1:3] == 0).all()


@pytest.mark.parametrize("many", [False, True])
def test_training_ends_in_the_same_bits_and_a_resumed_one_writes_the_same_lines(tmp_path, many):
    state = many_states() if many else toy.begin(toy.make_transformer)
    reporter = Reporter()
    whole = run(state, monitor=MONITOR, directory=tmp_path / "whole", reporter=reporter)
    without = run(state)
    assert toy.bits(whole.state) == toy.bits(without.state)
    assert [row for row in whole.rows if row["kind"] not in ("attention", "finding")] == without.rows

    measured, findings = of_kind(whole.rows, "attention"), of_kind(whole.rows, "finding")
    assert [row["step"] for row in measured] == [1, 4, 7, 10]
    assert np.shape(measured[0]["max_logit"]) == ((4, L, N) if many else (L, N))
    assert {row["severity"] for row in findings} == {"information", "notice"}
    assert len(reporter.notes) >= 2
    assert all(note.startswith("step ") and ", notice: " in note for note in reporter.notes)
    steps = [row["step"] for row in whole.rows if row["kind"] != "evaluation"]
    assert steps == sorted(steps)

    for at in (4, 10):
        directory = tmp_path / str(at)
        with pytest.raises(Interruption):
            run(state, monitor=MONITOR, directory=directory, reporter=Reporter(at, interrupt))
        again = Reporter()
        resumed = run(state, monitor=MONITOR, directory=directory, reporter=again)
        assert resumed.rows == whole.rows
        assert log_of(directory) == log_of(tmp_path / "whole")
        assert again.notes[1:] == [note for note in reporter.notes if step_of(note) > at // 4 * 4]


def step_of(note):
    return int(note.split(",")[0].removeprefix("step "))


def test_many_runs_are_measured_as_each_alone():
    states = many_states()
    together = run(states, monitor=MONITOR)
    for index in (0, 3):
        alone = of_kind(run(take_run(states, index), monitor=MONITOR).rows, "attention")
        for row, expected in zip(of_kind(together.rows, "attention"), alone, strict=True):
            for name in (*DEFAULT, "query_gradient", "key_gradient", "value_gradient"):
                np.testing.assert_allclose(row[name][index], expected[name], rtol=2e-3, atol=1e-4, err_msg=name)


def test_what_is_not_due_is_skipped_whether_one_run_or_many():
    for state, shape in ((toy.begin(toy.make_transformer), (N,)), (many_states(), (4, N))):
        trace = jax.make_jaxpr(
            lambda s: step.train_steps(s, toy.TASK, loss=token_loss, batch_size=3, count=2, monitor=MONITOR)
        )
        shapes = [[out.aval.shape for out in equation.outvars] for equation in conditionals(trace(state).jaxpr)]
        assert [shape] * len(DEFAULT) in shapes


def conditionals(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from conditionals(inner)


one_step = jax.jit(functools.partial(step.train_step, loss=token_loss, monitor=MONITOR))


def test_gradient_norms_are_those_of_each_layer():
    state = toy.begin(toy.make_transformer)
    _, metrics = one_step(state, batch_of(state))
    key = jax.random.fold_in(key_for(state.key, "dropout"), 0)
    loss = jax.jit(lambda params: token_loss(nnx.merge(state.graphdef, params), batch_of(state), key=key)[0])
    attention = jax.grad(loss)(state.params)["layers"]["attention"]
    for name in ("query", "key", "value"):
        weights = np.asarray(attention[f"{name}_weight"], np.float64)
        expected = [np.linalg.norm(weights[layer]) for layer in range(L)]
        np.testing.assert_allclose(metrics["attention"][f"{name}_gradient"], expected, rtol=1e-5)


def test_tied_keys_have_no_gradient_of_their_own():
    gradient = {
        "layers": {"attention": {"query_weight": jnp.ones((2, 3, 1, 4)), "value_weight": jnp.ones((2, 3, 1, 1))}}
    }
    norms = MONITOR.gradient_norms(gradient)
    assert norms.keys() == {"query_gradient", "value_gradient"}
    np.testing.assert_allclose(norms["query_gradient"], [12**0.5] * 2, rtol=1e-6)


def test_a_step_that_cannot_be_done_has_no_measurement():
    state = toy.begin(toy.make_transformer)
    batch = batch_of(state)
    _, metrics = one_step(state, batch._replace(weights=batch.weights * jnp.nan))
    assert np.isnan(metrics["loss"])
    row = MONITOR.row(1, metrics["attention"])
    for name in DEFAULT:
        assert row[name] == [[-1 if name == "nearest_head" else None] * N] * L
    assert Watch(MONITOR.limits).look(json.loads(json.dumps(row))) == []


def test_a_step_of_ones_own():
    state, monitor = toy.begin(toy.make_transformer), EVERY_STEP
    tokens = batch_of(state).inputs

    @jax.jit
    def own_step(params, number):
        def loss(params):
            logits, seen = nnx.merge(state.graphdef, params)(tokens, observe=monitor.observer(number))
            return (logits**2).mean(), seen

        gradient, seen = jax.grad(loss, has_aux=True)(params)
        return params, seen | monitor.gradient_norms(gradient)

    watch, lines = Watch(Limits(max_logit=0.1)), []
    for number in range(1, 3):
        _, seen = own_step(state.params, number - 1)
        lines += explain(watch.look(monitor.row(number, seen)))
    assert len(lines) == 1
    assert lines[0].startswith("step 1, notice: largest logit ")


def test_lines_of_the_log_are_short_and_curves_are_drawn_by_layer_and_head(tmp_path):
    pytest.importorskip("tensorboardX")
    config = dataclasses.replace(toy.CONFIG, steps=4, evaluate_every=None)
    result = run(toy.begin(toy.make_transformer), config=config, monitor=MONITOR, directory=tmp_path)
    (path,) = (tmp_path / "tensorboard").iterdir()
    drawn = {(at, tag): value for at, tag, value in points(path)}
    first = of_kind(result.rows, "attention")[0]
    for layer, head in np.ndindex(L, N):
        value = drawn[1, f"attention/max_logit/{layer}/{head}"]
        np.testing.assert_allclose(value, first["max_logit"][layer][head], rtol=1e-6)
    assert (1, "attention/query_gradient/1") in drawn
    assert not any(tag.startswith("finding") for _, tag in drawn)
    assert all(x == float(f"{x:.6g}") for name in DEFAULT for x in np.ravel(first[name]))


def test_monitors_are_values():
    assert AttentionMonitor(measures=["max_logit", "max_logit"]) == AttentionMonitor(measures=("max_logit",))
    assert hash(AttentionMonitor()) == hash(AttentionMonitor(every=10, rows=64, limits=Limits()))
    assert AttentionMonitor(every=2) != AttentionMonitor()
    assert jax.tree.leaves(AttentionMonitor()) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 2.0}, TypeError, "every must be an integer, got float 2.0"),
        ({"rows": 0}, ValueError, "rows must be at least 1, got 0"),
        ({"measures": ("entropies",)}, ValueError, "measures must be one of 'normalized_entropy', .*; got 'entropies'"),
        ({"measures": "entropy"}, TypeError, "measures must be a sequence of names, got 'entropy'"),
        ({"measures": ()}, TypeError, r"measures must be a sequence of names, got \(\)"),
        ({"limits": {"max_logit": 3}}, TypeError, "limits must be Limits, got {'max_logit': 3}"),
    ],
)
def test_a_wrong_argument_is_one_clear_error(arguments, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        AttentionMonitor(**arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MONITOR.observer(1.5), "step must have an integer dtype, got float32"),
        (lambda: MONITOR.observer("1"), "step must be .*"),
        (lambda: MONITOR.observer(np.arange(2)), r"step must have rank 0, \[\]; got shape \(2,\)"),
        (lambda: MONITOR.gradient_norms({"table": np.ones(2)}), "gradient must be that of a Transformer's .*'table'.*"),
    ],
)
def test_what_a_step_of_ones_own_gets_wrong_is_one_clear_error(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


def loss_that_cannot(model, batch, *, key):
    return token_loss(model, batch, key=key)


def loss_that_forgets(model, batch, *, key, observe):
    value, _ = token_loss(model, batch, key=key)
    return value, {}


def other_attention(*arguments, **options):
    return dot_product_attention(*arguments, **options)


def make(attention_fn):
    return functools.partial(Transformer, dataclasses.replace(toy.TRANSFORMER, attention_fn=attention_fn))


@pytest.mark.parametrize(
    ("make_model", "loss", "monitor", "message"),
    [
        (toy.make_bigrams, token_loss, MONITOR, "a monitor needs a model that is an .*Transformer, got Bigrams"),
        (
            make(other_attention),
            token_loss,
            MONITOR,
            "a monitor needs an attention_fn that is .*, got .*other_attention.*",
        ),
        (
            make(functools.partial(dot_product_attention, scale=2.0)),
            token_loss,
            MONITOR,
            "a monitor needs an attention_fn that is .* with at most an implementation bound to it, got .*",
        ),
        (toy.make_transformer, loss_that_cannot, MONITOR, "with a monitor, loss must take observe= .*"),
        (toy.make_transformer, loss_that_forgets, MONITOR, 'with a monitor, loss must return .* as "observed"'),
        (
            toy.make_transformer,
            token_loss,
            dataclasses.replace(MONITOR, rows=19),
            "rows must be at most the 18 of a batch, 3 sequences of T = 6, got 19; None measures all",
        ),
    ],
)
def test_what_cannot_be_monitored_is_one_clear_error(make_model, loss, monitor, message):
    config = dataclasses.replace(toy.CONFIG, evaluate_every=None)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        run(toy.begin(make_model), config=config, loss=loss, monitor=monitor)


def test_an_implementation_may_be_bound():
    MONITOR.check(toy.begin(make(functools.partial(dot_product_attention, implementation="dense"))).model)


def test_every_measure_has_its_words():
    described = rows.__doc__
    statistics = {"entropy", "logsumexp", "max_weight", "sum_p2", "logit_mean", "mean_distance", "diagonal_mass"}
    for name in set(ALL) - statistics - {"sink_share", "visible_keys"}:
        assert name in described

"""One fault of every link is named at its link, healthy functions have none, and bad targets are one clear line."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax.audit import LINKS, Expectation, Finding, assert_attention_ok, audit_attention
from attn_jax.audit.battery import BATTERY
from attn_jax.audit.subject import Subject
from experiments.benchmarks.planted.functions import FAULTS, HEALTHY, attention

# What takes JAX to be wrong, and one of each kind; the mistakes of scores, options and structure are planted in functions
# of NumPy, a hundred in seconds, by the other modules.
QUICK = ("1/H", "heads by reshape", "mask inverted", "values turned", "bfloat16 inside", "gradient times sqrt(H)")


def named(name):
    planted = FAULTS[name]
    report = audit_attention(planted.function, expect=planted.expect)
    assert report.faults, f"{name}: no fault"
    assert report.faults[0].link == planted.link, str(report)
    assert not report.ok


@pytest.mark.parametrize("name", QUICK)
def test_the_broken_link_is_named(name):
    named(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAULTS) - set(QUICK)))
def test_the_broken_link_is_named_of_the_others(name):
    named(name)


def test_every_link_has_a_planted_fault():
    assert {planted.link for planted in FAULTS.values()} == set(LINKS)


@pytest.mark.parametrize("name", ["textbook", "textbook, causal"])
def test_a_healthy_function_has_no_fault(name):
    function, expect = HEALTHY[name]
    assert_attention_ok(function, expect=expect)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(HEALTHY) - {"textbook", "textbook, causal"}))
def test_other_healthy_functions_have_none(name):
    function, expect = HEALTHY[name]
    assert_attention_ok(function, expect=expect)


@pytest.mark.slow
def test_ours_passes_every_check():
    report = audit_attention(attn_jax.dot_product_attention)
    left = [outcome.check for outcome in report.outcomes if outcome.result != "passed"]
    assert left == ["many positions"]  # it has none of its own
    assert report.findings == ()


@pytest.mark.slow
def test_where_jax_nn_differs():
    report = audit_attention(jax.nn.dot_product_attention)
    assert report.ok
    told = {finding.check: finding for finding in report.differences}
    assert set(told) == {"rows that see nothing", "hidden NaN", "float64", "other shapes"}
    assert "the mean of all values" in told["rows that see nothing"].evidence
    assert "a value width of 5" in told["other shapes"].evidence


def plain(query, key, value):
    """In NumPy."""
    logits = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.einsum("bnts,bsnv->btnv", raised / raised.sum(axis=-1, keepdims=True), value)


def test_a_function_of_numpy_arrays_can_be_audited():
    report = audit_attention(plain)
    assert "gradients" not in [finding.link for finding in report.faults]
    outcomes = {outcome.check: outcome for outcome in report.outcomes}
    assert outcomes["scale of the scores"].result == "passed"
    assert "cannot be differentiated" in outcomes["gradients"].note


def test_float64_is_not_held_against_a_scale_read_from_float32():
    def unscaled(*arrays):
        query, key, value = (np.asarray(x, np.float64) for x in arrays)
        return plain(query * np.sqrt(query.shape[-1]), key, value)

    report = audit_attention(unscaled)
    assert {finding.check for finding in report.faults} >= {"scale of the scores"}
    assert "float64" not in {finding.check for finding in report.findings}


def test_what_it_is_given_stays():
    def writes(query, key, value):
        output = plain(query, key, value)
        if isinstance(value, np.ndarray):
            value *= 0
        return output

    (fault,) = audit_attention(writes).faults[:1]
    assert fault.check == "inputs stay"
    assert "changed the value" in fault.evidence


def test_random_outputs_are_dropout_that_is_on():
    draws = iter(range(10**6))

    def noisy(query, key, value):
        keep = jax.random.bernoulli(jax.random.key(next(draws)), 0.9, (1, query.shape[1], 1, 1))
        return attention(query, key, value) * keep

    assert audit_attention(noisy).faults[0].link == "dropout"


def test_what_was_meant_is_no_fault():
    def scaled(query, key, value):
        return attention(query, key, value, scale=0.2)

    assert audit_attention(scaled).faults[0].link == "scale"
    assert audit_attention(scaled, expect=Expectation(scale=0.2)).ok
    meant = audit_attention(attention, expect=Expectation(scale="inverse"))
    assert meant.faults[0].link == "scale"


def test_arguments_of_other_names_and_meanings():
    def other(query, key, value, hide=None, causal=False):
        return attention(query, key, value, mask=None if hide is None else ~jnp.asarray(hide), is_causal=causal)

    unknown = {o.check: o for o in audit_attention(other).outcomes}
    assert unknown["mask option"].note == "it has no mask"
    assert unknown["causal option"].result == "passed"
    report = audit_attention(other, arguments={"mask": ("hide", np.logical_not)})
    assert {o.check: o.result for o in report.outcomes}["mask option"] == "passed"
    assert report.ok
    wrong = audit_attention(other, arguments={"mask": "hide", "is_causal": None})
    assert "the other way round" in wrong.faults[0].evidence
    assert {o.check: o.note for o in wrong.outcomes}["causal option"] == "it has no is_causal"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda query, key, value: 1 / 0, "it raised ZeroDivisionError"),
        (lambda query, key, value: jnp.swapaxes(query, 1, 2), r"returned shape \(2, 4, 8, 8\) where \(2, 8, 4, 8\)"),
        (lambda query, key, value: "weights", "it returned str where an array was expected"),
        (lambda query, key, value: query > 0, "it returned an array of bool where real numbers"),
        (lambda query: query, "it raised TypeError"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_one_clear_fault(function, says):
    report = audit_attention(function)
    (fault,) = report.faults
    assert (fault.link, fault.check) == ("output", "runs")
    assert jnp.array(0).dtype == jnp.int32  # nothing is left switched on
    assert __import__("re").search(says, fault.evidence)
    assert all(outcome.result == "not applicable" for outcome in report.outcomes[1:])


def test_a_report_can_be_read_and_stored():
    report = audit_attention(FAULTS["no scale"].function)
    text = str(report)
    assert text.startswith("<lambda>: 1 fault")
    assert "fault: scale (scale of the scores). The effective scale is 1 at head width 16" in text
    assert json.loads(json.dumps(report.as_dict()))["findings"][0]["link"] == "scale"
    assert len(report.outcomes) == len(BATTERY) == len({one.name for one in BATTERY})
    with pytest.raises(AssertionError, match="fault: scale"):
        assert_attention_ok(FAULTS["no scale"].function)


def test_what_checks_stand_on_comes_before_them():
    seen = set()
    for one in BATTERY:
        assert set(one.after) <= seen, one.name
        assert one.link in LINKS
        seen.add(one.name)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: audit_attention(3), "fn must be callable, got int"),
        (lambda: audit_attention(plain, expect="causal"), "expect must be an Expectation, got str"),
        (lambda: audit_attention(plain, arguments={"masks": "m"}), "arguments must name options among bias, mask"),
        (lambda: audit_attention(plain, arguments={"mask": 3}), r"arguments\['mask'\] must be a name"),
        (lambda: Expectation(scale="sqrt"), "scale must be one of"),
        (lambda: Expectation(window=(1, 2, 3)), "window must be an int or"),
        (lambda: Expectation(window=-1), "window must be"),
        (lambda: Expectation(positions="alibi"), "positions must be one of"),
        (lambda: Expectation(logits_soft_cap=0), "logits_soft_cap must be"),
        (lambda: Finding("fault", "head", "x", "y", "z"), "link must be one of"),
    ],
)
def test_bad_arguments(call, says):
    with pytest.raises((ValueError, TypeError), match=says):
        call()


def test_parameters_that_stand_for_nothing_are_told():
    def mine(query, key, value, causal=False, chunk=8, *, mask=None, **others):
        return attn_jax.dot_product_attention(query, key, value, mask=mask, is_causal=causal, **others)

    assert Subject(mine).unmapped == ("chunk",)
    assert Subject(mine, {"is_causal": None, "mask": None}).unmapped == ("chunk",)  # left alone on purpose
    assert Subject(mine, {"scale": "scale"}).unmapped == ("chunk",)  # by way of **others
    assert Subject(mine, {"query_offset": "chunk"}).unmapped == ()
    assert Subject(len).unmapped == ()

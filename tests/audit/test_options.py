"""Each option that is not honoured, or means something else, is told: one function of NumPy, one mistake at a time."""

import re

import numpy as np
import pytest

from attn_jax.audit import Expectation, audit_attention

FAULT, DIFFERENCE = "fault", "difference"


def attention(broken=""):
    """A function with every option, right but for one thing."""

    def function(
        query, key, value, *, bias=None, mask=None, scale=None, is_causal=False, query_seq_lengths=None,
        key_value_seq_lengths=None, local_window_size=None, logits_soft_cap=None, sinks=None, query_offset=0,
        dropout_rate=0.0, dropout_rng=None, deterministic=True,
    ):  # fmt: skip
        del dropout_rng
        q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
        groups = q.shape[2] // k.shape[2]
        k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
        (batch, length, heads, width), keys = q.shape, k.shape[1]
        if broken == "causal refuses unequal lengths" and is_causal and length != keys and not query_offset:
            raise ValueError("T and S must be equal")
        factor = width**-0.5
        if scale is not None and broken != "scale not read":
            factor = factor * scale if broken == "scale on top" else scale
        logits = factor * np.einsum("btnh,bsnh->bnts", q, k)
        if bias is not None:
            logits = added(logits, np.asarray(bias, np.float64), factor, beside=mask is not None or is_causal)
        if logits_soft_cap is not None and broken not in ("cap after the mask", "cap not read"):
            logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)

        offset = 0 if broken == "offset not read" else query_offset
        if broken == "causal at the bottom right" and length < keys and not np.any(query_offset):
            offset = keys - length
        t = np.arange(length)[:, None] + offset
        s = np.arange(keys)[None, :]
        seen = np.ones((batch, heads, length, keys), bool)
        if is_causal and not (broken == "causal dropped beside a mask" and mask is not None):
            edge = {"causal one too wide": 1, "causal without itself": -1}.get(broken, 0)
            seen &= s <= t + edge
            if broken == "causal without itself":
                seen[:, :, 0, 0] = True
            if broken == "causal without blocks" and keys > 128:
                seen[..., 128:, :64] = False
        if local_window_size is not None:
            left, right = local_window_size
            if broken == "window without its end":
                left = max(left - 1, 0)
            seen &= (s >= t - left) & (s <= t + right)
            if broken == "window without blocks" and keys > 128:
                seen[..., 128:, :] &= s > 127
        if key_value_seq_lengths is not None and broken != "padding ignored":
            counts = np.asarray(key_value_seq_lengths)[:, None, None, None]
            seen &= s < counts + (1 if broken == "one token of padding" else 0)
        after = None
        if mask is not None and broken != "mask not read":
            asked = np.asarray(mask)
            if broken == "mask of one head refused" and asked.shape[1] == 1:
                raise ValueError("the mask must have all heads")
            if broken == "mask of one query misread" and asked.shape[2] == 1:
                asked = np.roll(asked, 1, axis=-1)
            asked = ~asked if broken == "mask inverted" else asked
            if broken == "mask meets key heads" and groups > 1 and asked.shape[1] == 1:
                asked = np.repeat(np.swapaxes(asked, 0, 1), groups, axis=1)
            if broken == "mask after the softmax":
                after = asked
            else:
                seen &= asked
        low = {"masked logits of -10": -10.0}.get(broken, -np.inf)
        logits = np.where(seen, logits, low)
        if logits_soft_cap is not None and broken == "cap after the mask":
            logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)

        weights = softmax(logits, sinks)
        if after is not None:
            weights = weights * after
        active = dropout_rate > 0 and (broken == "dropout in evaluation" or not deterministic)
        if active and broken != "dropout not honoured":
            kept = np.random.default_rng(0).random(weights.shape) >= (
                1 - dropout_rate if broken == "rate of keeping" else dropout_rate
            )
            weights = weights * kept / (1 if broken == "dropout without 1/(1-rate)" else 1 - dropout_rate)
        if broken != "hidden NaN":
            hidden = (weights == 0).all(axis=2)  # [B, N, S]
            v = np.where(np.moveaxis(hidden, 1, 2)[..., None], 0, v)
        output = np.einsum("bnts,bsnv->btnv", weights, v)
        if query_seq_lengths is not None:
            counted = np.arange(length)[None, :] < np.asarray(query_seq_lengths)[:, None]
            if broken == "rows that count are halved":
                output = np.where(counted[..., None, None], output / 2, 0)
            elif broken != "rows past the end kept":
                output = np.where(counted[..., None, None], output, 0)
        return output.astype(np.asarray(query).dtype)

    def added(logits, bias, factor, *, beside):
        if broken == "bias not read" or (broken == "bias lost beside another" and beside):
            return logits
        if broken == "bias of one item refused" and bias.shape[0] == 1:
            raise ValueError("the bias must have all items")
        if broken == "bias of one head misread" and bias.shape[1] == 1:
            bias = 2 * bias
        if broken == "bias clipped":
            bias = np.maximum(bias, -4.0)
        if broken == "bias scaled":
            bias = factor * bias
        if broken == "bias subtracted":
            bias = -bias
        if broken == "bias transposed":
            bias = np.swapaxes(bias, -1, -2)
        return logits + bias

    def softmax(logits, sinks):
        top = logits.max(axis=-1, keepdims=True)
        empty = np.isneginf(top)
        if broken == "empty rows are means":
            logits, top = np.where(empty, 0.0, logits), np.where(empty, 0.0, top)
            empty = np.zeros_like(empty)
        with np.errstate(invalid="ignore"):
            weights = np.exp(logits - np.where(empty, 0.0, top))
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None and broken != "sinks not read":
            total = total + np.exp(np.asarray(sinks, np.float64)[:, None, None] - np.where(empty, 0.0, top))
        filler = np.nan if broken == "empty rows NaN" else 0.0
        weights = np.where(empty, filler, weights / np.where(total == 0, 1, total))
        if broken == "empty rows spoil all" and empty.any():
            weights = np.full_like(weights, np.nan)
        return weights

    return function


# Of each mistake: the check that tells it, whether it is a fault or a difference, its link, and the words.
MISTAKES = {
    "causal one too wide": ("causal option", FAULT, "mask", "rows .* change when keys and values from 5 on do"),
    "causal without itself": ("causal option", FAULT, "mask", "off by .*, though nothing later leaks"),
    "causal refuses unequal lengths": ("causal option", DIFFERENCE, "mask", "With T = 3, S = 7 and is_causal=True"),
    "causal at the bottom right": ("causal option", DIFFERENCE, "mask", "aligned at the bottom right"),
    "causal without blocks": ("causal option", FAULT, "mask", "197 tokens"),
    "mask not read": ("mask option", FAULT, "mask", "does not change with the mask"),
    "mask inverted": ("mask option", FAULT, "mask", "the other way round"),
    "mask after the softmax": ("mask option", FAULT, "mask", r"With a mask \[B, N, T, S\] the output is off"),
    "mask of one head refused": ("mask option", DIFFERENCE, "mask", r"A mask of shape \(1, 1, 8, 8\) is refused"),
    "mask of one query misread": ("mask option", FAULT, "mask", r"With a mask of shape \(2, 1, 1, 8\)"),
    "mask meets key heads": ("mask option", FAULT, "mask", "2 items, 2 key heads"),
    "causal dropped beside a mask": ("mask option", FAULT, "mask", "With a mask and is_causal=True"),
    "empty rows NaN": ("rows that see nothing", FAULT, "softmax", "may see no key gives NaN"),
    "empty rows are means": ("rows that see nothing", DIFFERENCE, "mask", "the mean of all values"),
    "empty rows spoil all": ("rows that see nothing", FAULT, "softmax", "makes other rows not finite"),
    "masked logits of -10": ("causal option", FAULT, "mask", "change when keys and values from 5 on do"),
    "hidden NaN": ("hidden NaN", DIFFERENCE, "mask", "NaN in masked keys or values reaches the output"),
    "bias not read": ("bias option", FAULT, "bias", "does not change with the bias"),
    "bias scaled": ("bias option", FAULT, "bias", "scaled as q·k is"),
    "bias subtracted": ("bias option", FAULT, "bias", "The bias is subtracted"),
    "bias transposed": ("bias option", FAULT, "bias", "The bias is transposed"),
    "bias of one item refused": ("bias option", DIFFERENCE, "bias", r"A bias of shape \(1, 4, 8, 8\) is refused"),
    "bias of one head misread": ("bias option", FAULT, "bias", r"With a bias of shape \(2, 1, 8, 8\)"),
    "bias lost beside another": ("bias option", FAULT, "bias", "Beside mask the bias is not read"),
    "bias clipped": ("bias option", FAULT, "bias", "With −∞ in the bias"),
    "padding ignored": ("length options", FAULT, "mask", "Padding moves the output"),
    "one token of padding": ("length options", FAULT, "mask", "Padding moves the output"),
    "rows that count are halved": ("length options", FAULT, "mask", "Rows that count are off"),
    "rows past the end kept": ("length options", DIFFERENCE, "mask", "Rows past query_seq_lengths are not 0"),
    "window without its end": ("window option", FAULT, "mask", r"With local_window_size=\(1, 0\)"),
    "window without blocks": ("window option", FAULT, "mask", "With a window and 197 tokens"),
    "scale not read": ("scale option", FAULT, "scale", "does not change the output"),
    "scale on top": ("scale option", FAULT, "scale", "gives outputs that are off"),
    "cap not read": ("soft cap option", FAULT, "scale", "With a soft cap of 1.5"),
    "cap after the mask": ("soft cap option", FAULT, "mask", "With a soft cap and is_causal"),
    "sinks not read": ("sinks option", FAULT, "softmax", "With sinks the output is off"),
    "offset not read": ("offset option", FAULT, "cache", "queries 3 to 7, with query_offset=3"),
    "dropout not honoured": ("dropout option", FAULT, "dropout", "no weight is 0"),
    "dropout in evaluation": ("dropout option", FAULT, "dropout", "With deterministic=True dropout moves"),
    "rate of keeping": ("dropout option", FAULT, "dropout", "(6|7).% of the weights are dropped"),
    "dropout without 1/(1-rate)": ("dropout option", FAULT, "dropout", "that are kept are 1 times as large"),
}


def test_every_option_of_a_healthy_function_is_honoured():
    report = audit_attention(attention())
    assert report.findings == (), str(report)
    left = {outcome.check for outcome in report.outcomes if outcome.result != "passed"}
    assert not {check for check, *_ in MISTAKES.values()} & left, str(report)


@pytest.mark.parametrize("broken", MISTAKES)
def test_an_option_that_is_wrong_is_told(broken):
    check, kind, link, says = MISTAKES[broken]
    report = audit_attention(attention(broken), expect=Expectation())
    assert report.findings, broken
    told = report.findings[0]
    assert (told.check, told.kind, told.link) == (check, kind, link), str(report)
    assert bool(report.faults) == (kind == FAULT), str(report)
    assert re.search(says, told.evidence), str(report)

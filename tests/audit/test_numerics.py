"""What numbers do to a function of NumPy: large scores, few bits, long rows and odd shapes."""

import re

import ml_dtypes
import numpy as np
import pytest

from attn_jax.audit import audit_attention

FAULT, DIFFERENCE = "fault", "difference"
HALF = (ml_dtypes.bfloat16, np.float16)


def attention(broken=""):
    """Softmax attention that is right but for one thing."""

    def function(query, key, value):
        arrays = [np.asarray(x) for x in (query, key, value)]
        dtype, (_, length, _, width) = arrays[0].dtype, arrays[0].shape
        keys, value_width = arrays[1].shape[1], arrays[2].shape[3]
        refuse(dtype, length, keys, width == value_width)
        wide = np.float32 if broken == "float64 in float32" else np.float64
        q, k, v = (x.astype(wide) for x in arrays)
        if broken == "float64 in bfloat16" and dtype == np.float64:
            q, k, v = (x.astype(ml_dtypes.bfloat16).astype(np.float64) for x in (q, k, v))
        logits = np.einsum("btnh,bsnh->bnts", q, k) / width**0.5
        if broken == "scores clipped":
            logits = np.clip(logits, -20, 20)
        if broken == "logits of few bits" and dtype in HALF:
            logits = np.round(logits)
        if broken == "the last block is seen by none" and length == keys == 197:
            logits[..., 192:] = -1e9
        if broken == "a wide value is another" and value_width != width:
            v = np.roll(v, 1, axis=-1)
        top = logits.max(axis=-1, keepdims=True)
        if broken == "no maximum":
            top = np.zeros_like(top)
        if broken == "a maximum from 0":
            top = np.maximum(top, 0)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            weights = np.exp(logits - top)
            total = weights.sum(axis=-1, keepdims=True)
            if broken.endswith("sums in half precision") and dtype in HALF:
                total = np.cumsum(weights.astype(dtype), axis=-1, dtype=dtype)[..., -1:].astype(np.float64)
            if broken == "the denominator is not rescaled" and keys == 256:
                first = logits[..., :128].max(axis=-1, keepdims=True)
                total = np.exp(logits[..., :128] - first).sum(-1, keepdims=True)
                total = total + np.exp(logits[..., 128:] - top).sum(-1, keepdims=True)
            output = np.einsum("bnts,bsnv->btnv", weights / total, v)
        return output.astype(np.float32 if broken == "float32 of all" else dtype)

    def refuse(dtype, length, keys, same_width):
        if broken == "no half precision" and dtype in HALF:
            raise TypeError("float32, please")
        if broken == "no float64" and dtype == np.float64:
            raise TypeError("float32, please")
        if broken.startswith("as many keys as queries") and length != keys:
            raise ValueError("T and S must be equal")
        if broken == "values as wide as keys" and not same_width:
            raise ValueError("one width for all")

    return function


# Of each mistake: the check that tells it, whether it is a fault or a difference, its link, and the words.
MISTAKES = {
    "no maximum": ("large scores", FAULT, "softmax", "an output that is not finite"),
    "a maximum from 0": ("large scores", FAULT, "softmax", "an output that is not finite"),
    "scores clipped": ("large scores", FAULT, "softmax", "the output is off by"),
    "no half precision": ("few bits", DIFFERENCE, "numerics", "It takes no bfloat16"),
    "sums in half precision": ("few bits", FAULT, "numerics", "4,096 equal bfloat16 weights, and values 1, give 16"),
    "as many keys as queries, and sums in half precision": (
        "few bits",
        FAULT,
        "numerics",
        "4,096 equal bfloat16 weights",
    ),
    "logits of few bits": ("few bits", FAULT, "numerics", "bfloat16 outputs are off by"),
    "float32 of all": ("few bits", DIFFERENCE, "numerics", "bfloat16 inputs give float32 outputs"),
    "no float64": ("float64", DIFFERENCE, "numerics", "float64 arrays are refused"),
    "float64 in float32": ("float64", DIFFERENCE, "numerics", "computed in less"),
    "float64 in bfloat16": ("float64", FAULT, "numerics", "computed in less"),
    "as many keys as queries": ("other shapes", DIFFERENCE, "output", r"Refused: T = 3, S = 7 .*T = 130, S = 257"),
    "values as wide as keys": ("other shapes", DIFFERENCE, "output", "Refused: a value width of 5"),
    "a wide value is another": ("other shapes", FAULT, "values", "With a value width of 5"),
    "the last block is seen by none": ("other shapes", FAULT, "mask", "With T = S = 197 the output is off"),
    "the denominator is not rescaled": ("other shapes", FAULT, "softmax", "denominator and output are both rescaled"),
}


def test_a_healthy_function():
    assert audit_attention(attention()).findings == ()


@pytest.mark.parametrize("broken", MISTAKES)
def test_what_numbers_do_is_told(broken):
    check, kind, link, says = MISTAKES[broken]
    report = audit_attention(attention(broken))
    assert report.findings, broken
    told = report.findings[0]
    assert (told.check, told.kind, told.link) == (check, kind, link), str(report)
    assert re.search(says, f"{told.evidence} {told.advice}"), str(report)
    assert bool(report.faults) == (kind == FAULT), str(report)

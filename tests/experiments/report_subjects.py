"""Models that were looked at, with numbers that are drawn and texts that are hostile."""

import base64

import numpy as np

from attn_jax.diagnostics import head_clusters
from attn_jax.diagnostics.diagnosis import Diagnosis, Finding
from experiments.model_report.subjects import ALIKE, Look, Subject

HOSTILE = (
    "<script>alert(1)</script>", "\"quoted'", "back\\slash", "</script><img src=x onerror=alert(2)>", "\u202ertl", "😀",
    "\u2028", "\ud800", "<b>bold</b>", '<a href="javascript:alert(3)">x</a>', "$x^2$", "%{z}", "&lt;", "مرحبا",
    "{{ 7 * 7 }}", "<!--", "]]>", "\x00", " of", "\n", "",
)  # fmt: skip
NAME = "<i>a</i>/\u202e\"b'\ud800.gguf</script><script>alert(4)</script>"


def pattern(rng, layers, heads, length):
    """Causal weights, `[L, N, W, W + 2]`."""
    logits = 2 * rng.normal(size=(layers, heads, length, length))
    logits[..., 0] += rng.uniform(0, 5, size=(layers, heads, 1))
    p = np.where(np.tril(np.ones((length, length), bool)), np.exp(logits), 0)
    return np.concatenate([p / p.sum(-1, keepdims=True), np.zeros((layers, heads, length, 2))], axis=-1)


def finding(**changes):
    fields = {
        "signal": "max_logit", "link": "scale", "severity": "serious", "layers": (1, 2), "heads": ((2, 1), (1, 0)),
        "value": 1234.0, "limit": 1000.0, "origin": "a paper", "evidence": "two heads beyond it",
        "cause": "queries and keys grow", "check": "their norms", "mend": "a norm on both",
    }  # fmt: skip
    return Finding(**{**fields, **changes})


def subject(seed=0, *, layers=3, heads=2, width=8, length=40, tokens=HOSTILE, name=NAME, **changes):
    """A subject with such sizes; `changes` replace fields of it."""
    rng = np.random.default_rng(seed)
    shown = len(tokens)
    weights = pattern(rng, layers, heads, shown)
    look = Look(
        pattern=weights,
        choosing=np.ones((layers, heads, shown), bool),
        entropy=rng.uniform(0, 1, (layers, heads, length)),
        spectrum=np.sort(np.exp(rng.normal(size=(layers, heads, width))))[..., ::-1].astype(np.float32),
    )
    divergence = rng.uniform(0.01, 0.5, (layers * heads,) * 2)
    divergence = (divergence + divergence.T) / 2
    np.fill_diagonal(divergence, 0)
    of_heads = {
        measure: rng.uniform(0, 1, (layers, heads))
        for measure in ("normalized_entropy", "normalized_entropy_no_sink", "sink_mass", "max_weight")
    }
    of_heads |= {
        measure: rng.gamma(2, 10, (layers, heads))
        for measure in ("logit_sd", "max_logit", "distance_ratio", "score_rank", "query_norm")
    }
    of_heads["sink_mass"][1, 1] = np.nan
    of_heads["score_rank"][:] = np.nan
    measures = {**of_heads, "nearest_head": np.zeros((layers, heads)), "token_cosine": rng.uniform(0, 1, layers)}
    text = HOSTILE[0] + HOSTILE[4]
    findings = (
        finding(),
        finding(severity="notice", heads=tuple((i % layers, i % heads) for i in range(11)), evidence=text, cause=text),
        finding(severity="information", link="softmax", heads=(), layers=(0,), value=np.nan, mend=text, origin=text),
        finding(severity="information", link="mask", heads=(), layers=(), check=text),
    )
    fields = {
        "name": name,
        "text": HOSTILE[3],
        "tokens": tuple(tokens),
        "start": 0,
        "length": length,
        "diagnosis": Diagnosis(name, findings, measures, (("residual", text),)),
        "look": look,
        "positions": np.arange(length),
        "divergence": divergence,
        "clusters": head_clusters(np.sqrt(divergence), threshold=ALIKE),
    }
    return Subject(**{**fields, **changes})


def unpacked(found):
    """The numbers of a packed array, as the page reads them."""
    values = np.frombuffer(base64.b64decode(found["data"]), np.dtype(found["kind"]).newbyteorder("<"))
    values = values.reshape(found["shape"]).astype(np.float64)
    if found["kind"] == "float32":
        return values
    most = np.iinfo(found["kind"]).max
    return np.where(values == most, np.nan, values / (most - 1))

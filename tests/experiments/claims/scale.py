"""Known decisions of the rules on the scale of trained models."""

import math

from tests.experiments.claims.cases import WIDE

S6A_SHOWS = {
    f"{rule}_{what}": 0.1 for rule in ("none", "inverse", "inverse_base") for what in ("wide", "growth")
}  # fmt: skip
S6A_SHOWS_NOT = dict.fromkeys(S6A_SHOWS, 0.0)
WIDTHS = ("narrow", "wide")
S6B_EQUAL = {f"{rule}_{width}": 0.0 for rule in ("half", "temperature", "qk_norm") for width in WIDTHS}
S6C_EQUAL = {"folded_narrow": 0.0, "folded_wide": 0.0, "folded_same_rate": 0.0}
RECALL_EQUAL = {"half": 0.0, "temperature": 0.0, "qk_norm": -0.1}

CASES = {
    "S3-trained": [
        ("confirmed", {}),
        ("confirmed", {"alignment": 5.0, "logit_wide": 9.0}),  # told, not decided by
        ("refined", {"logit": 5.0}),
        ("refined", {"query": 3.0, "key": 0.1}),
        ("refuted", {"logit": 5.0, "query": 3.0, "key": 3.0}),
        ("inconclusive", {"logit": (1.5, 2.5)}),
        ("inconclusive", {"logit_start": 4.0}),
        ("inconclusive", {"logit": math.nan}),
    ],
    "S6a": [
        ("confirmed", S6A_SHOWS),
        ("refined", {**S6A_SHOWS, "inverse_wide": 0.01}),
        ("refined", {**S6A_SHOWS, "inverse_base_growth": -0.01}),
        ("refined", {**S6A_SHOWS, "inverse_wide": 0.01, "inverse_base_wide": WIDE}),
        ("refuted", S6A_SHOWS_NOT),
        ("refuted", dict.fromkeys(S6A_SHOWS, -0.1)),
        ("inconclusive", {**S6A_SHOWS, "none_wide": (0.01, 0.03)}),
        ("inconclusive", {**S6A_SHOWS_NOT, "none_wide": math.nan, "none_growth": math.nan}),
    ],
    "S6b": [
        ("confirmed", {**S6B_EQUAL, "half_wide": -0.015}),
        ("refined", {**S6B_EQUAL, "temperature_wide": 0.05}),
        ("refined", {**S6B_EQUAL, "qk_norm_wide": -0.05}),
        ("refined", {**S6B_EQUAL, "qk_norm_wide": -0.05, "half_wide": WIDE}),
        ("refuted", dict.fromkeys(S6B_EQUAL, 0.05)),
        ("inconclusive", {**S6B_EQUAL, "half_narrow": (0.01, 0.03)}),
        ("inconclusive", {**S6B_EQUAL, "qk_norm_wide": math.nan}),
        ("inconclusive", {**S6B_EQUAL, "uniform": 0.01}),
    ],
    "S6b-recall": [
        ("confirmed", RECALL_EQUAL),
        ("confirmed", {**RECALL_EQUAL, "none": -1.0, "inverse": WIDE}),
        ("refined", {**RECALL_EQUAL, "half": -0.5}),
        ("refuted", dict.fromkeys(RECALL_EQUAL, -0.5)),
        ("inconclusive", {**RECALL_EQUAL, "half": (-0.4, 0.2)}),
        ("inconclusive", {**RECALL_EQUAL, "sqrt": (0.4, 0.8)}),
        ("inconclusive", {**RECALL_EQUAL, "sqrt": math.nan}),
    ],
    "S6c": [
        ("confirmed", S6C_EQUAL),
        ("refined", {**S6C_EQUAL, "folded_same_rate": 0.1}),
        ("refuted", {**S6C_EQUAL, "folded_wide": 0.1}),
        ("refuted", {**S6C_EQUAL, "folded_narrow": -0.1, "folded_same_rate": WIDE}),
        ("inconclusive", {**S6C_EQUAL, "folded_same_rate": (0.0, 0.04)}),
        ("inconclusive", {**S6C_EQUAL, "folded_wide": math.nan}),
        ("inconclusive", {**S6C_EQUAL, "uniform": WIDE}),
    ],
    "S7-trained": [
        ("confirmed", {"model": 0.0, "half_inverse": -0.1}),
        ("refined", {"model": 0.0, "half_inverse": 0.1}),
        ("refuted", {"model": 0.1, "half_inverse": 0.1}),
        ("inconclusive", {"model": 0.0, "half_inverse": (0.01, 0.03)}),
        ("inconclusive", {"model": math.nan, "half_inverse": 0.1}),
        ("inconclusive", {"model": 0.0, "half_inverse": 0.0, "uniform": 0.0}),
    ],
}  # fmt: skip

"""Known decisions of the rules on scores and their scale."""

import math

from tests.experiments.claims.cases import WIDE

S2_HOLDS = {
    "sqrt_slope": 0.0, "inverse_slope": -1.0, "inverse_entropy_wide": 0.999, "inverse_entropy_narrow": 0.995,
    "correlated_ratio": 1.0,
}  # fmt: skip
S4_LIMIT = {"rise": 0.8, "scaled_rise": 0.01, "weight_wide": 0.95, "entropy_wide": 0.02}
S5_DEAD = {"logit_median_ratio": 0.0, "query_median_ratio": 0.01, "logit_mean_ratio": 0.02, "query_mean_ratio": 0.09}
S5_ALIVE = dict.fromkeys(S5_DEAD, 0.5)
S5B_DIAGONAL = {"diagonal_error": 1e-6, "off_share_sharp": 1e-3, "off_share_uniform": 1e-3, "diagonal_only_error": 1e-3}

CASES = {
    "S1": [
        ("confirmed", {}),
        ("confirmed", {"heavy_ratio": WIDE, "both_slope": 1.9}),  # what breaks the condition does not refute
        ("refuted", {"slope": 0.9}),
        ("refuted", {"slope": WIDE, "ratio": 1.2}),
        ("inconclusive", {"slope": (0.97, 1.03)}),
        ("inconclusive", {"slope": math.nan}),
    ],
    "S2": [
        ("confirmed", S2_HOLDS),
        ("refined", {**S2_HOLDS, "correlated_ratio": 20.0}),
        ("refined", {**S2_HOLDS, "inverse_entropy_narrow": 0.97}),
        ("refuted", {**S2_HOLDS, "sqrt_slope": 0.1}),
        ("refuted", {**S2_HOLDS, "inverse_entropy_wide": 0.9, "correlated_ratio": 20.0}),
        ("inconclusive", {**S2_HOLDS, "inverse_slope": (-1.1, -0.9), "correlated_ratio": 20.0}),
    ],
    "S3": [
        ("confirmed", {"without": 16.0}),
        ("refined", {"without": 16.0, "normal": 0.2}),
        ("refuted", {"without": 1.0}),
        ("refuted", {"without": 16.0, "lecun": 2.0, "xavier": 2.0, "normal": 0.2, "mup": 2.0}),
        ("inconclusive", {"without": 16.0, "normal": (0.5, 1.0)}),
        ("inconclusive", {"without": WIDE}),
    ],
    "S4": [
        ("confirmed", {**S4_LIMIT, "weight_common": 0.95}),
        ("refined", {**S4_LIMIT, "weight_common": 0.7}),
        ("refined", {**S4_LIMIT, "weight_common": 0.7, "onset_exponent": math.nan}),  # the sweep need not show it
        ("refuted", {**S4_LIMIT, "rise": -0.1}),
        ("refuted", {**S4_LIMIT, "scaled_rise": 0.5}),
        ("inconclusive", {**S4_LIMIT, "weight_common": (0.8, 0.95)}),
        ("inconclusive", {**S4_LIMIT, "weight_wide": (0.8, 0.95)}),
    ],
    "S5": [
        ("confirmed", S5_DEAD),
        ("refined", {**S5_DEAD, "query_mean_ratio": 20.0}),
        ("refined", {**S5_DEAD, "query_mean_ratio": 20.0, "query_median_ratio": (0.05, 0.2)}),
        ("refuted", S5_ALIVE),
        ("inconclusive", {**S5_DEAD, "logit_median_ratio": (0.05, 0.2)}),
        ("inconclusive", {**S5_ALIVE, "logit_median_ratio": (0.05, 0.2)}),
    ],
    "S5b": [
        ("confirmed", S5B_DIAGONAL),
        ("refined", {**S5B_DIAGONAL, "off_share_sharp": 0.4}),
        ("refined", {**S5B_DIAGONAL, "off_share_sharp": 0.4, "off_share_uniform": (0.005, 0.02)}),
        ("refuted", {**S5B_DIAGONAL, "diagonal_error": 0.1}),
        ("inconclusive", {**S5B_DIAGONAL, "diagonal_error": (0.0, 1e-3)}),
        ("inconclusive", {**S5B_DIAGONAL, "diagonal_only_error": (0.0, 0.02)}),
    ],
    "S7": [
        ("confirmed", {}),
        ("refined", {"half": 0.004}),
        ("refined", {"model": 0.125}),
        ("refuted", {"half": 0.004, "model": 0.125}),
        ("inconclusive", {"half": 0.004, "model": (0.4, 0.6)}),
        ("inconclusive", {"head": 3.0}),
    ],
}  # fmt: skip

"""Known decisions of the rules on attention as an explanation."""

import math

from experiments.claims.explanation import ACCOUNTS, ARMS

UNKNOWN = (math.nan, math.nan)

D3_SAID = {f"{name}_{arm}": 0.8 for name in ("layer", "head", "uniform") for arm in ARMS}
D3_NOT = {**D3_SAID, **{f"{name}_{arm}": 0.2 for name in ("layer", "head") for arm in ARMS}}
D3B_SAID = {f"{account}_{arm}": 0.3 for account in ACCOUNTS for arm in ARMS}
D3B_NOT = dict.fromkeys(D3B_SAID, 0.7)

CASES = {
    "D3": [
        ("confirmed", D3_SAID),
        ("confirmed", {**D3_SAID, "flattened_lookup": 0.0, "permuted_lookup": 0.0}),  # told, and decide nothing
        # Where uniform attention does as well, nothing is explained, whatever other weights do.
        ("confirmed", {**D3_SAID, "uniform_keyword": 0.05, "layer_keyword": 0.2}),
        ("refuted", {**D3_NOT, "uniform_keyword": -0.05, "layer_keyword": 0.9, "head_keyword": 0.9}),
        ("refuted", D3_NOT),
        ("refined", {**D3_SAID, "layer_lookup": 0.2, "head_lookup": 0.2}),
        ("refined", {**D3_NOT, "head_lookup": 0.8}),
        ("inconclusive", {**D3_SAID, **{f"uniform_{arm}": 0.05 for arm in ARMS}}),
        ("inconclusive", {**D3_SAID, "uniform_lookup": (0.0, 0.2)}),
        ("inconclusive", {**D3_SAID, "layer_deep_lookup": (0.4, 0.6)}),
        ("inconclusive", {**D3_SAID, "uniform_keyword": UNKNOWN}),
    ],
    "D3b": [
        ("confirmed", D3B_SAID),
        ("refuted", D3B_NOT),
        ("refined", {**D3B_SAID, "gradient_lookup": 0.6}),
        ("refined", {**D3B_NOT, "left_out_keyword": 0.4}),
        ("inconclusive", {**D3B_SAID, "integrated_lookup": (0.4, 0.6)}),
        ("inconclusive", {**D3B_SAID, "integrated_lookup": UNKNOWN}),
    ],
}  # fmt: skip

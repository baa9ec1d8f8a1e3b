"""Known decisions of the rules on positions."""

import math

UNKNOWN = (math.nan, math.nan)  # an arm that is missing, or whose best rate is at the edge of its grid

X1_FIRST = {"rotary_value": (0.0, 0.0), "rotary_query": 0.5, "sinusoidal_value": 0.5, "learned_value": 0.2}
X1_ONLY = {**X1_FIRST, "rotary_probe": 0.05}

X2_ALL = dict.fromkeys(("fixed_float32", "fixed_bfloat16", "table_float32", "table_bfloat16"), 0.001)

ARMS = ("alibi", "ntk", "rotary", "learned")
X3_SAID = {f"within_{arm}": 1.0 for arm in ARMS}
X3_SAID |= {f"harm_{arm}": x for arm, x in zip(ARMS, (0.0, -0.1, 0.5, 0.1), strict=True)}
X3_SAID |= {f"recall_{arm}": x for arm, x in zip(ARMS, (1.0, 0.9, 0.0, 0.1), strict=True)}
X3_NONE = {**X3_SAID, "harm_alibi": 0.1, "harm_ntk": 0.2, "recall_alibi": 0.0, "recall_ntk": 0.0}
X3_ALL = {**X3_SAID, "harm_rotary": 0.0, "harm_learned": 0.0, "recall_rotary": 1.0, "recall_learned": 1.0}

CASES = {
    "X1": [
        ("confirmed", X1_ONLY),
        ("confirmed", {**X1_ONLY, "none_probe": 0.9, "sinusoidal_probe": UNKNOWN}),  # told, and decide nothing
        ("refined", {**X1_ONLY, "rotary_probe": 0.2}),
        ("refuted", {**X1_ONLY, "rotary_value": 1e-3}),  # a bit that changes is a change
        ("refuted", {**X1_ONLY, "rotary_probe": UNKNOWN, "rotary_value": (1e-9, 2e-9)}),
        ("refuted", {**X1_ONLY, "learned_value": 0.0}),
        ("refuted", {**X1_ONLY, "sinusoidal_value": 0.0}),
        ("refuted", {**X1_ONLY, "rotary_query": 0.0}),
        ("inconclusive", {**X1_ONLY, "rotary_value": (0.0, 1e-9)}),
        ("inconclusive", {**X1_ONLY, "learned_value": (0.005, 0.02)}),
        ("inconclusive", {**X1_ONLY, "rotary_probe": (0.05, 0.2)}),
        ("inconclusive", {**X1_ONLY, "rotary_probe": UNKNOWN}),
    ],
    "X2": [
        ("confirmed", X2_ALL),
        ("refined", {**X2_ALL, "table_bfloat16": 1.0}),
        ("refined", {**X2_ALL, "fixed_bfloat16": 0.02, "table_float32": 0.02}),
        ("refuted", {**X2_ALL, "fixed_float32": 0.02}),
        ("inconclusive", {**X2_ALL, "fixed_float32": (0.0, 0.02)}),
        ("inconclusive", {**X2_ALL, "table_bfloat16": 1.0, "table_float32": (0.0, 0.02)}),
    ],
    "X3": [
        ("confirmed", X3_SAID),
        ("confirmed", {**X3_SAID, "harm_linear": UNKNOWN, "recall_none": 1.0}),  # told, and decide nothing
        ("refined", {**X3_SAID, "harm_ntk": 0.03}),
        ("refined", {**X3_SAID, "recall_alibi": 0.0}),
        ("refined", {**X3_SAID, "recall_rotary": 1.0}),
        ("refined", {**X3_NONE, "harm_alibi": 0.0}),
        ("refined", {**X3_ALL, "harm_learned": 0.1}),
        ("refuted", X3_NONE),
        ("refuted", X3_ALL),
        ("inconclusive", {**X3_SAID, "harm_ntk": (0.01, 0.03)}),
        ("inconclusive", {**X3_SAID, "recall_rotary": (0.4, 0.6)}),
        ("inconclusive", {**X3_SAID, "within_ntk": 0.0}),  # what was not learned within L says nothing of further back
        ("inconclusive", {**X3_SAID, "harm_learned": UNKNOWN}),
        ("inconclusive", {**X3_SAID, "recall_learned": UNKNOWN}),
    ],
}  # fmt: skip

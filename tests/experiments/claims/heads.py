"""Known decisions of the rules on what a head costs and can express."""

H1_SAME = {"parameter_spread": 1.0, "product_spread": 1.0, "operation_ratio": 1.0}

H2_BOUNDED = {"score_excess": 0.0, "weight_excess_least": -1.0, "weight_excess_most": 0.0}

H3A_NONE = {f"left_{name}": 0.5 for name in ("permutation", "k_hot", "sharp", "flat")}
H3A_NONE |= {"by_hand_permutation": 0.5, "by_hand_k_hot": 0.5}
H3A_ALL = dict.fromkeys(H3A_NONE, 0.01)
H7_PART = {"seen_share": 0.125, "query_excess": 0.0}

CASES = {
    "H1": [
        ("confirmed", H1_SAME),
        ("refined", {**H1_SAME, "operation_ratio": 1.02}),
        ("refuted", {**H1_SAME, "parameter_spread": 2.0}),
        ("refuted", {**H1_SAME, "product_spread": 1.5, "operation_ratio": 1.5}),
        ("inconclusive", {**H1_SAME, "operation_ratio": (1.0, 1.05)}),
    ],
    "H2": [
        ("confirmed", H2_BOUNDED),
        ("refined", {**H2_BOUNDED, "weight_excess_most": 30.0}),
        ("refuted", {**H2_BOUNDED, "weight_excess_most": 90.0, "weight_excess_least": 30.0}),
        ("refuted", {**H2_BOUNDED, "score_excess": 2.0}),
        ("inconclusive", {**H2_BOUNDED, "weight_excess_most": (0.0, 1.0)}),
    ],
    "H3a": [
        ("confirmed", H3A_NONE),
        ("refuted", H3A_ALL),
        ("refined", {**H3A_NONE, "left_permutation": 0.01}),
        ("refined", {**H3A_NONE, "by_hand_k_hot": 0.01}),  # by gradient or by hand
        ("refined", {**H3A_ALL, "left_flat": 0.5}),
        ("refuted", {**H3A_ALL, "left_k_hot": (0.01, 0.5)}),  # by hand it can, whatever the fit does
        ("inconclusive", {**H3A_NONE, "left_sharp": (0.04, 0.06)}),
        ("inconclusive", {**H3A_NONE, "by_hand_permutation": (0.04, 0.06)}),
    ],
    "H7": [
        ("confirmed", H7_PART),
        ("refined", {**H7_PART, "seen_share": 1.0}),
        ("refuted", {"seen_share": 1.0, "query_excess": 100.0}),
        ("refuted", {**H7_PART, "seen_share": 0.75}),
        ("inconclusive", {**H7_PART, "seen_share": (0.4, 0.6)}),
        ("inconclusive", {"seen_share": 1.0, "query_excess": (0.0, 2.0)}),
    ],
}  # fmt: skip

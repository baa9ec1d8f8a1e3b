"""Known decisions of the rules on heads."""

H2_BOUNDED = {"score_excess": 0.0, "weight_excess_least": -1.0, "weight_excess_most": 0.0}

CASES = {
    "H2": [
        ("confirmed", H2_BOUNDED),
        ("refined", {**H2_BOUNDED, "weight_excess_most": 30.0}),
        ("refuted", {**H2_BOUNDED, "weight_excess_most": 90.0, "weight_excess_least": 30.0}),
        ("refuted", {**H2_BOUNDED, "score_excess": 2.0}),
        ("inconclusive", {**H2_BOUNDED, "weight_excess_most": (0.0, 1.0)}),
    ],
}  # fmt: skip

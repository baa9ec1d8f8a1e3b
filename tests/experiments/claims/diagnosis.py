"""Known decisions of the rules on what measurements tell."""

D1_FALLS = {"spearman": -0.9, "spearman_no_sink": -0.8, "spearman_random": 0.1}
D6_PARKED = {"excess": 0.4, "sink_heads": 0.5, "excess_other_token": 0.4}

CASES = {
    "D1": [
        ("confirmed", D1_FALLS),
        ("refined", {**D1_FALLS, "spearman": 0.2}),
        ("refined", {**D1_FALLS, "spearman_no_sink": 0.2}),
        ("refuted", {**D1_FALLS, "spearman": 0.2, "spearman_no_sink": -0.3}),
        ("inconclusive", {**D1_FALLS, "spearman": (-0.7, -0.3)}),
        ("inconclusive", {**D1_FALLS, "spearman_random": -0.9}),  # the control shows the same
    ],
    "D6": [
        ("confirmed", D6_PARKED),
        ("refined", {**D6_PARKED, "sink_heads": 0.05}),
        ("refined", {**D6_PARKED, "excess_other_token": 0.01}),
        ("refuted", {**D6_PARKED, "excess": 0.01}),
        ("inconclusive", {**D6_PARKED, "excess": (0.05, 0.2)}),
    ],
}  # fmt: skip

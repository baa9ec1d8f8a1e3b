"""Known decisions of the rules on cost."""

C1_HOLDS = {"excess_least": -0.05, "excess_most": 0.05, "layer_exponent": 2.0}
C1B_HOLDS = {"scores_n": 2.0, "scores_d": 1.0}
C2_HOLDS = {
    "error_ratio": 1.0, "memory_forward": 1.0, "memory_training": 1.0, "bytes_forward": 0.1, "bytes_training": 0.1,
    "flops_forward": 1.1, "flops_training": 1.2, "flops_causal": 1.1,
}  # fmt: skip

C3_MIXED = {"alone_least": 1.4, "alone_most": 14.0, "served_least": 0.02, "served_most": 0.2}

CASES = {
    "C1": [
        ("confirmed", C1_HOLDS),
        ("refined", {**C1_HOLDS, "layer_exponent": 1.2}),
        ("refined", {**C1_HOLDS, "excess_least": -0.6}),
        ("refuted", {**C1_HOLDS, "excess_least": -0.9, "excess_most": -0.8}),
        ("refuted", {**C1_HOLDS, "excess_least": 0.3, "excess_most": 0.8, "layer_exponent": 1.0}),
        ("inconclusive", {**C1_HOLDS, "excess_most": (0.1, 0.3)}),
        ("inconclusive", {**C1_HOLDS, "layer_exponent": (1.7, 1.9)}),
    ],
    "C1b": [
        ("confirmed", C1B_HOLDS),
        ("refuted", {**C1B_HOLDS, "scores_d": 0.02}),
        ("refuted", {**C1B_HOLDS, "scores_d": (0.0, 0.2)}),
        ("refuted", {**C1B_HOLDS, "scores_n": 1.0}),
        ("inconclusive", {**C1B_HOLDS, "scores_d": (0.4, 0.8)}),
        ("inconclusive", {**C1B_HOLDS, "scores_n": 1.7}),
    ],
    "C2": [
        ("confirmed", C2_HOLDS),
        ("confirmed", {**C2_HOLDS, "memory_forward": 0.1}),  # less than O(n) is within O(n)
        ("refined", {**C2_HOLDS, "flops_forward": (1.0, 1.0)}),  # exactly as many is not more
        ("refined", {**C2_HOLDS, "flops_forward": 0.5, "flops_training": 0.6, "flops_causal": 0.3}),
        ("refuted", {**C2_HOLDS, "error_ratio": 3.0}),
        ("refuted", {**C2_HOLDS, "memory_training": 2.0}),
        ("refuted", {**C2_HOLDS, "bytes_training": (1.0, 1.0)}),
        ("inconclusive", {**C2_HOLDS, "error_ratio": (1.5, 2.5)}),
        ("inconclusive", {**C2_HOLDS, "memory_forward": (0.8, 1.3)}),
        ("inconclusive", {**C2_HOLDS, "flops_training": (0.9, 1.1)}),
    ],
    "C3": [
        ("refined", C3_MIXED),
        ("refined", {**C3_MIXED, "alone_least": 0.5}),
        ("confirmed", {**C3_MIXED, "alone_least": 0.5, "alone_most": 0.9}),
        ("refuted", {**C3_MIXED, "served_least": 1.2, "served_most": 3.0}),
        ("inconclusive", {**C3_MIXED, "served_most": (0.8, 1.2)}),
        ("refined", {**C3_MIXED, "crossing_timed": (0.1, 9.0), "mqa": (0.5, 2.0)}),  # times decide nothing
    ],
}  # fmt: skip

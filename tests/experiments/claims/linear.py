"""Known decisions of the rule on the numerics of linear attention."""

SAFE = {
    "kept": 2e-3, "bfloat16_normalised": 5e-3, "bfloat16_unnormalised": 5e-3, "float16_normalised": 1e-3,
    "float16_unnormalised": 1e-3,
}  # fmt: skip
STALLS = {**SAFE, "bfloat16_normalised": 15.0}

CASES = {
    "L4": [
        ("refined", STALLS),
        ("refined", {**STALLS, "bfloat16_unnormalised": (5e-3, 0.02)}),
        ("refined", {**SAFE, "kept": (1e-4, 9e-3), "float16_unnormalised": (0.011, 1.0)}),
        ("confirmed", {**STALLS, "kept": 0.02}),
        ("confirmed", {**SAFE, "kept": 0.02}),
        ("refuted", SAFE),
        ("inconclusive", {**STALLS, "kept": (5e-3, 0.02)}),
        ("inconclusive", {**SAFE, "float16_normalised": (5e-3, 0.02)}),
    ],
}

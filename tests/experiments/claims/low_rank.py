"""Known decisions of the rule on low rank."""

HOLDS = {"share": 0.95, "rank_error": 0.05, "error": 0.05}
NOT_FOUND = {**HOLDS, "error": 0.4}

CASES = {
    "L2": [
        ("confirmed", HOLDS),
        ("confirmed", {**HOLDS, "share_random": 0.99, "uniform": 0.01}),  # told, and decide nothing
        ("refined", NOT_FOUND),
        ("refined", {**HOLDS, "share": 0.8}),
        ("refined", {**HOLDS, "rank_error": 0.2}),
        ("refuted", {**NOT_FOUND, "share": 0.8}),
        ("refuted", {**NOT_FOUND, "rank_error": 0.2}),
        ("inconclusive", {**HOLDS, "error": (0.05, 0.15)}),
        ("inconclusive", {**NOT_FOUND, "share": (0.85, 0.95)}),
        ("inconclusive", {**NOT_FOUND, "rank_error": (0.05, 0.15)}),
    ],
}

"""Known decisions of the rules on trained heads."""

import math

EDGE = (math.nan, math.nan)  # an arm whose best rate is at the edge of its grid
H3B_NARROW = {"trade": -0.1, "alone": 0.01}
H4_DIVIDED = {"least_difference": 0.8, "most_difference": 0.9, "division": 0.1}
H6_FALLS = {f"{mixing}_{setting}": 0.1 for mixing in ("identity", "blocks") for setting in ("mlp", "alone")}

CASES = {
    "H3b": [
        ("confirmed", {"trade": 0.1, "alone": 0.05}),
        ("refined", {"trade": -0.1, "alone": 0.05}),
        ("refined", {"trade": 0.1, "alone": 0.0}),
        ("refuted", H3B_NARROW),
        ("refuted", {"trade": (-0.01, 0.019), "alone": (-0.3, -0.1)}),
        ("inconclusive", {**H3B_NARROW, "alone": (0.0, 0.04)}),
        ("inconclusive", {**H3B_NARROW, "trade": EDGE}),
    ],
    "H4": [
        ("confirmed", H4_DIVIDED),
        ("refined", {**H4_DIVIDED, "division": 0.0}),
        ("refined", {**H4_DIVIDED, "least_difference": 0.3}),
        ("refined", {**H4_DIVIDED, "least_difference": 0.3, "division": -0.1}),
        ("refuted", {**H4_DIVIDED, "least_difference": 0.2, "most_difference": 0.3}),
        ("inconclusive", {**H4_DIVIDED, "division": (0.0, 0.1)}),
        ("inconclusive", {**H4_DIVIDED, "least_difference": (0.4, 0.6)}),
        ("inconclusive", {**H4_DIVIDED, "most_difference": EDGE}),
    ],
    "H6": [
        ("confirmed", H6_FALLS),
        ("confirmed", {**H6_FALLS, "orthogonal_mlp": -0.1}),  # told, and decides nothing
        ("refined", {**H6_FALLS, "blocks_mlp": 0.0}),
        ("refined", {**dict.fromkeys(H6_FALLS, 0.0), "identity_alone": 0.1}),
        ("refuted", dict.fromkeys(H6_FALLS, 0.0)),
        ("inconclusive", {**H6_FALLS, "identity_mlp": (0.0, 0.1)}),
        ("inconclusive", {**H6_FALLS, "blocks_alone": EDGE}),
    ],
}  # fmt: skip

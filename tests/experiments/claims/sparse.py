"""Known decisions of the rule on sparse attention."""

import math

UNKNOWN = (math.nan, math.nan)

L3_SAID = {
    "kept": 0.8, "found_hashing": 0.7, "found_clustering": 0.6,
    "short_none": 0.5, "short_straight_through": 0.3, "short_auxiliary": 0.4, "short_soft": 0.02,
}  # fmt: skip
L3_NONE = {**L3_SAID, "kept": 0.4, "found_hashing": 0.3, "short_none": 0.0}

CASES = {
    "L3": [
        ("confirmed", L3_SAID),
        ("confirmed", {**L3_SAID, "short_auxiliary": 0.0, "kept_random": 0.9}),  # told, and decide nothing
        ("refined", {**L3_SAID, "found_clustering": 0.4}),
        ("refined", {**L3_SAID, "short_straight_through": 0.0}),
        ("refined", {**L3_SAID, "short_soft": 0.2}),
        ("refined", {**L3_NONE, "kept": 0.6}),
        ("refuted", L3_NONE),
        ("inconclusive", {**L3_SAID, "kept": (0.4, 0.6)}),
        ("inconclusive", {**L3_SAID, "found_hashing": (0.4, 0.6)}),
        ("inconclusive", {**L3_SAID, "short_none": (0.0, 0.2)}),
        ("inconclusive", {**L3_SAID, "short_soft": UNKNOWN}),
    ],
}  # fmt: skip

"""Known decisions of the rules on what a mixer finds easy."""

import math

UNKNOWN = (math.nan, math.nan)  # an arm that is missing, or whose best rate is at the edge of its grid

STRUCTURE = {"kept_attention": 0.5, "kept_gru": 1e-4, "beyond_convolution": (0.0, 0.0), "reach_convolution": 0.3}
NEAR = {f"near_{arm}": 1.0 for arm in ("attention", "gru", "convolution")}
FAR = {"far_attention": 1.0, "far_gru": 0.0, "far_convolution": 0.0}
HELD = {"held_attention": 1.0, "held_gru": 0.0, "held_convolution": 0.0}
C4_SAID = {**STRUCTURE, **NEAR, **FAR, **HELD}

BEHIND = {"little_convolution": 0.1, "little_gru": 0.05}
C5_SAID = {**BEHIND, "shrinks_convolution": 0.05, "shrinks_gru": 0.05}

CASES = {
    "C4": [
        ("confirmed", C4_SAID),
        ("confirmed", {**C4_SAID, "held_attention": 0.0}),  # told, and decides nothing
        ("refined", {**C4_SAID, "held_gru": 1.0}),
        ("refined", {**C4_SAID, "far_gru": 1.0}),
        ("refined", {**C4_SAID, "far_gru": 1.0, "held_gru": 1.0}),
        ("refuted", {**C4_SAID, "kept_attention": 0.05}),
        ("refuted", {**C4_SAID, "kept_gru": 0.02}),
        ("refuted", {**C4_SAID, "beyond_convolution": (1e-9, 2e-9)}),
        ("refuted", {**C4_SAID, "reach_convolution": (0.0, 0.0)}),
        ("refuted", {**C4_SAID, "kept_gru": 0.02, "near_gru": UNKNOWN}),  # paths need no training
        ("refuted", {**C4_SAID, "far_attention": 0.0}),
        ("refuted", {**C4_SAID, "far_convolution": 1.0}),
        ("refuted", {**C4_SAID, "held_convolution": 1.0}),
        ("inconclusive", {**C4_SAID, "kept_attention": (0.05, 0.2)}),
        ("inconclusive", {**C4_SAID, "near_gru": 0.0}),  # what copies nothing says nothing of distance
        ("inconclusive", {**C4_SAID, "near_gru": 0.0, "far_attention": 0.0}),
        ("inconclusive", {**C4_SAID, "far_gru": (0.4, 0.6)}),
        ("inconclusive", {**C4_SAID, "held_gru": UNKNOWN}),
        ("inconclusive", {**C4_SAID, "far_attention": UNKNOWN}),
        ("inconclusive", {**C4_SAID, "far_convolution": (0.4, 0.6)}),
    ],
    "C5": [
        ("confirmed", C5_SAID),
        ("refined", {**C5_SAID, "little_gru": 0.01}),
        ("refined", {**C5_SAID, "little_convolution": -0.1}),
        ("refined", {**C5_SAID, "shrinks_gru": -0.01}),
        ("refuted", {**C5_SAID, "little_gru": 0.01, "little_convolution": -0.1}),
        ("inconclusive", {**C5_SAID, "little_gru": (0.01, 0.03)}),
        ("inconclusive", {**C5_SAID, "little_convolution": UNKNOWN}),
        ("inconclusive", {**C5_SAID, "shrinks_convolution": (-0.01, 0.03)}),
    ],
    "C5b": [
        ("confirmed", BEHIND),
        ("confirmed", {**BEHIND, "much_gru": -1.0}),  # told, and decides nothing
        ("refined", {**BEHIND, "little_gru": 0.01}),
        ("refined", {**BEHIND, "little_convolution": 0.01}),
        ("refuted", {"little_gru": 0.01, "little_convolution": 0.0}),
        ("inconclusive", {**BEHIND, "little_gru": (0.01, 0.03)}),
        ("inconclusive", {**BEHIND, "little_gru": UNKNOWN}),
    ],
}

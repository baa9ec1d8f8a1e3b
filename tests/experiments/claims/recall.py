"""Known decisions of the rules on associative recall."""

import math

UNKNOWN = (math.nan, math.nan)

L1A = {f"ratio_{width}": 10.0 for width in (16, 32, 64)}

L1B = {"softmax": (0.8, 1.0), "linear": (0.0, 0.2), "window": (0.0, 0.2)}
L1B |= dict.fromkeys(("random_features", "retention", "state_space"), (0.0, 0.3))

L1C = {"softmax": (0.8, 1.0), "linear": (0.0, 0.2), "linear_softmax": (0.7, 1.0)}

CASES = {
    "L1a": [
        ("confirmed", L1A),
        ("confirmed", {**L1A, "held_identity": 1e6, "bounded": UNKNOWN}),  # told, and decide nothing
        ("refined", {**L1A, "ratio_16": 1.5}),
        ("refined", dict.fromkeys(L1A, 1.5)),
        ("refuted", dict.fromkeys(L1A, 0.5)),
        ("inconclusive", {**L1A, "ratio_64": (1.0, 3.0)}),
        ("inconclusive", {**L1A, "ratio_32": UNKNOWN}),
    ],
    "L1b": [
        ("confirmed", L1B),
        ("confirmed", {**L1B, "window": (0.8, 1.0)}),
        ("refined", {**L1B, "state_space": (0.8, 1.0)}),
        ("refined", {**L1B, "retention": (0.6, 1.0), "random_features": UNKNOWN}),
        ("refuted", {**L1B, "linear": (0.8, 1.0)}),
        ("inconclusive", {**L1B, "linear": (0.3, 0.6)}),
        ("inconclusive", {**L1B, "softmax": (0.0, 0.2)}),  # a task that nothing solves says nothing
        ("inconclusive", {**L1B, "softmax": UNKNOWN}),
    ],
    "L1c": [
        ("confirmed", L1C),
        ("refuted", {**L1C, "linear": (0.8, 1.0)}),
        ("refuted", {**L1C, "linear_softmax": (0.0, 0.3)}),
        ("inconclusive", {**L1C, "linear_softmax": (0.4, 0.8)}),
        ("inconclusive", {**L1C, "softmax": (0.0, 0.2)}),
        ("inconclusive", dict.fromkeys(L1C, UNKNOWN)),
    ],
}

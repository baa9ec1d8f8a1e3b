"""Known decisions of the rules on the removal of heads."""

import math

from tests.experiments.claims.diagnosis import checkpoints

NAN = math.nan

FOUND = {
    "gain": 0.1, "cost": 0.01, "gain_random": 0.0, "gain_shuffled": 0.1, "removed": 27.0,
    "redundant": 0.1, "redundant_random": 0.9, "redundant_shuffled": 0.1,
}  # fmt: skip
NOT_FOUND = {**FOUND, "gain": 0.01, "cost": 0.1}
IDLE = {
    "sharp": -0.1, "diffuse": -0.1, "sharp_no_sink": -0.1, "diffuse_no_sink": -0.1, "sharp_random": 0.0,
    "diffuse_random": 0.0, "spearman": -0.3, "spearman_no_sink": -0.3, "agreement": 0.5,
}  # fmt: skip
BUSY = {**IDLE, "sharp": 0.1, "diffuse": 0.0, "sharp_no_sink": 0.1, "diffuse_no_sink": -0.01}

CASES = {
    "H5": [
        ("confirmed", checkpoints(FOUND, FOUND, FOUND)),
        ("confirmed", checkpoints(FOUND)),
        ("confirmed", checkpoints({**FOUND, "redundant": 0.0, "gain_shuffled": -0.1})),  # told, and decide nothing
        ("refined", checkpoints(FOUND, NOT_FOUND)),
        ("refined", checkpoints({**FOUND, "cost": 0.1})),
        ("refined", checkpoints({**FOUND, "gain": 0.01})),
        ("refuted", checkpoints(NOT_FOUND, {**NOT_FOUND, "gain": -0.1})),
        ("inconclusive", checkpoints(FOUND, {**FOUND, "gain": (-0.1, 0.1)})),
        ("inconclusive", checkpoints(FOUND, {**FOUND, "cost": (0.0, 0.1)})),
        ("inconclusive", checkpoints({**FOUND, "gain_random": 0.1})),  # the control shows the same
        ("inconclusive", checkpoints(dict.fromkeys(FOUND, NAN))),
    ],
    "D2a": [
        ("confirmed", checkpoints(IDLE, {**IDLE, "agreement": NAN})),  # of an encoder there is no gradient
        ("refined", checkpoints(IDLE, BUSY)),
        ("refined", checkpoints({**IDLE, "sharp_no_sink": 0.1})),
        ("refined", checkpoints({**BUSY, "diffuse": -0.1})),
        ("refuted", checkpoints(BUSY, BUSY, BUSY)),
        ("inconclusive", checkpoints(IDLE, {**IDLE, "diffuse_no_sink": (-0.1, 0.1)})),
        ("inconclusive", checkpoints({**IDLE, "diffuse_random": -0.1})),
        ("inconclusive", checkpoints({**IDLE, "sharp_random": -0.1})),
    ],
}  # fmt: skip

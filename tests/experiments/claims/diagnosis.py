"""Known decisions of the rules on what measurements tell."""

from experiments.claims.diagnosis import ROLE_LINES

NAN = float("nan")


def checkpoints(*each):
    """Evidence of up to three checkpoints, of which the last may be absent."""
    fields = each[0]
    whole = [*each, *[dict.fromkeys(fields, NAN)] * (3 - len(each))]
    return {f"{field}_{i + 1}": value for i, one in enumerate(whole) for field, value in one.items()}


FALLS = {"spearman": -0.9, "spearman_no_sink": -0.8, "spearman_random": 0.1}
FLAT = {**FALLS, "spearman": 0.2, "spearman_no_sink": -0.3}
PARKS = {"excess": 0.4, "sink_mass": 0.4, "sink_heads": 0.5, "excess_other_token": 0.4, "window_cost": 1.0}
NOWHERE = {**PARKS, "excess": 0.01}
H8_ALL = dict.fromkeys(ROLE_LINES, 0.9) | {f"{role}_random": 0.01 for role in ROLE_LINES}

CASES = {
    "D1": [
        ("confirmed", checkpoints(FALLS, FALLS, FALLS)),
        ("confirmed", checkpoints(FALLS)),
        ("refined", checkpoints(FALLS, FALLS, FLAT)),
        ("refined", checkpoints({**FALLS, "spearman": 0.2}, FLAT)),
        ("refined", checkpoints({**FALLS, "spearman_no_sink": 0.2})),
        ("refuted", checkpoints(FLAT, FLAT)),
        ("inconclusive", checkpoints(FALLS, {**FALLS, "spearman": (-0.7, -0.3)})),
        ("inconclusive", checkpoints(FALLS, {**FALLS, "spearman_random": -0.9})),  # the control shows the same
        ("inconclusive", checkpoints(dict.fromkeys(FALLS, NAN))),
    ],
    "D6": [
        ("confirmed", checkpoints(PARKS, {**PARKS, "window_cost": NAN})),  # an encoder has no loss
        ("refined", checkpoints(PARKS, NOWHERE)),
        ("refined", checkpoints({**PARKS, "sink_heads": 0.05})),
        ("refined", checkpoints({**PARKS, "excess_other_token": 0.01}, NOWHERE)),
        ("refuted", checkpoints(NOWHERE, NOWHERE, NOWHERE)),
        ("inconclusive", checkpoints(PARKS, {**PARKS, "excess": (0.05, 0.2)})),
    ],
    "H8": [
        ("confirmed", H8_ALL),
        ("confirmed", {**H8_ALL, "induction": 0.0}),  # which the statement does not name
        ("refined", {**H8_ALL, "coreference": 0.05}),
        ("refined", {**H8_ALL, "local_random": 0.6}),  # no training needed
        ("refuted", {**H8_ALL, "local": 0.4, "previous_token": 0.2, "syntax": 0.05, "coreference": 0.05}),
        ("inconclusive", {**H8_ALL, "syntax": (0.05, 0.2)}),
        ("inconclusive", {**H8_ALL, "syntax_random": (0.05, 0.2)}),
    ],
}  # fmt: skip

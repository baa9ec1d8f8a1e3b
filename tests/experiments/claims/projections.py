"""Known decisions of the rules on projections."""

import math

P1_HOLDS = {"largest_wide": 1.0, "weight_wide": 0.9, "largest_narrow": 1.0, "weight_narrow": 0.8,
            "largest_spread": 0.99, "weight_spread": 0.8}  # fmt: skip
P2_COLLAPSED = {"wide": 0.9, "narrow": 0.7, "trained": 0.8, "separate": 0.1, "masked_cost": 0.0}
P3_MUTE = {"cycle_tied": 1e-6, "swap_none": 1e-6, "cycle_separate": 1.0, "solved_tied": 0.0, "solved_separate": 1.0,
           "ring_rotary": 0.0}  # fmt: skip
P4_APART = {"value_swap_weights": 0.0, "key_swap_weights": 0.9, "rich_change": 0.0, "hard_rich_weight": 0.05,
            "hard_rich_read": 0.8, "easy_poor_weight": 0.9, "easy_poor_read": 0.2, "determined_head": 0.25}  # fmt: skip
P5_FIXED = {"softmax_error": 1e-6, "sink_sum": 1.0, "sigmoid_sum": 1.0, "dropout_spread": 1e-3}
P6_LIMITED = {"cost": 0.0, "key_none": 0.0, "value_rest": 0.0, "query_none": 0.01, "key_rotary": 0.01}
P7_COSTS = {"all_cost": 0.1, "query_key_cost": 0.05, "key_value_cost": 0.05}
WEAK = (0.4, 0.6)

CASES = {
    "P1": [
        ("confirmed", P1_HOLDS),
        ("refined", {**P1_HOLDS, "weight_narrow": 0.1}),
        ("refined", {**P1_HOLDS, "largest_spread": 0.6}),
        ("refined", {**P1_HOLDS, "weight_narrow": 0.1, "largest_spread": 0.6}),
        ("refuted", {**P1_HOLDS, "weight_wide": 0.1}),
        ("refuted", {**P1_HOLDS, "largest_wide": 0.9, "weight_narrow": 0.1}),
        ("inconclusive", {**P1_HOLDS, "weight_wide": WEAK}),
        ("inconclusive", {**P1_HOLDS, "weight_narrow": 0.1, "largest_spread": (0.9, 0.97)}),
    ],
    "P2": [
        ("confirmed", P2_COLLAPSED),
        ("confirmed", {**P2_COLLAPSED, "masked_cost": 0.1}),  # told beside the verdict
        ("refined", {**P2_COLLAPSED, "trained": 0.2}),
        ("refined", {**P2_COLLAPSED, "narrow": 0.2, "masked_cost": (0.0, 0.1)}),
        ("refuted", {**P2_COLLAPSED, "wide": 0.2, "narrow": 0.1, "trained": 0.2}),
        ("inconclusive", {**P2_COLLAPSED, "trained": WEAK}),
        ("inconclusive", {**P2_COLLAPSED, "trained": math.nan}),
        ("inconclusive", {**P2_COLLAPSED, "separate": 0.8}),  # the control shows the same
    ],
    "P3": [
        ("confirmed", P3_MUTE),
        ("refined", {**P3_MUTE, "ring_rotary": 1.0}),
        ("refined", {**P3_MUTE, "ring_rotary": 1.0, "accuracy_signed": math.nan}),  # told beside the verdict
        ("refuted", {**P3_MUTE, "cycle_tied": 0.5}),
        ("inconclusive", {**P3_MUTE, "cycle_separate": 0.01}),  # the test finds nothing where there is something
        ("inconclusive", {**P3_MUTE, "solved_separate": 0.1}),  # nor is it one if nothing learns the task
        ("refuted", {**P3_MUTE, "solved_tied": 0.9, "ring_rotary": 1.0}),
        ("inconclusive", {**P3_MUTE, "solved_tied": WEAK}),
        ("inconclusive", {**P3_MUTE, "solved_tied": math.nan, "ring_rotary": 1.0}),
        ("inconclusive", {**P3_MUTE, "ring_rotary": (0.05, 0.2)}),
    ],
    "P4": [
        ("confirmed", P4_APART),
        ("refined", {**P4_APART, "determined_head": 0.9}),
        ("refuted", {**P4_APART, "value_swap_weights": 0.3}),
        ("refuted", {**P4_APART, "hard_rich_read": 0.3}),
        ("inconclusive", {**P4_APART, "hard_rich_read": WEAK}),
        ("inconclusive", {**P4_APART, "determined_head": WEAK}),
    ],
    "P5": [
        ("confirmed", P5_FIXED),
        ("refined", {**P5_FIXED, "sink_sum": 0.2}),
        ("refined", {**P5_FIXED, "sigmoid_sum": 1.6}),
        ("refined", {**P5_FIXED, "dropout_spread": 0.2}),
        ("refuted", {**P5_FIXED, "softmax_error": 0.1}),
        ("inconclusive", {**P5_FIXED, "sink_sum": (0.9, 1.1)}),
    ],
    "P6": [
        ("confirmed", P6_LIMITED),
        ("refined", {**P6_LIMITED, "query_none": 0.6}),
        ("refined", {**P6_LIMITED, "key_rotary": 0.6, "value_rest": 0.1}),
        ("refuted", {**P6_LIMITED, "cost": -0.1, "query_none": 0.6}),
        ("inconclusive", {**P6_LIMITED, "cost": (-0.01, 0.03)}),
        ("inconclusive", {**P6_LIMITED, "cost": math.nan}),
        ("inconclusive", {**P6_LIMITED, "query_none": (0.05, 0.2)}),
    ],
    "P7": [
        ("confirmed", P7_COSTS),
        ("confirmed", {**P7_COSTS, "key_value_cost": (0.01, 0.03)}),  # not shown to be free
        ("refined", {**P7_COSTS, "key_value_cost": 0.0}),
        ("refined", {**P7_COSTS, "key_value_cost": 0.0, "query_key_cost": -0.1}),
        ("refuted", {**P7_COSTS, "all_cost": 0.0}),
        ("refuted", {**P7_COSTS, "all_cost": -0.1}),
        ("inconclusive", {**P7_COSTS, "all_cost": (0.01, 0.03)}),
        ("inconclusive", {**P7_COSTS, "all_cost": math.nan}),
    ],
}  # fmt: skip

"""What the measurements of `projections` say: the verdicts."""

from typing import Any

import numpy as np
import pandas as pd

from experiments import claims, estimates
from experiments.estimates import Estimate
from experiments.projections.config import (
    DROPOUT,
    LENGTH,
    MODEL_WIDTH,
    NUM_HEADS,
    POSITIONS,
    RELATION,
    SPREADS,
    ProjectionsConfig,
)
from experiments.projections.measured import begun, by_width, condition, cost, simulated, solved, trained
from experiments.projections.trained import free_parameters, language_arm, text_task
from experiments.verdicts import Outcome

TIED = "W_Q = W_K"


def judge(config: ProjectionsConfig, measurements: pd.DataFrame) -> list[Outcome]:
    return [*_diagonal(config, measurements), *_roles(config, measurements), *_trained(config, measurements)]


def _diagonal(config: ProjectionsConfig, measurements: pd.DataFrame) -> list[Outcome]:
    """P1 and P2: who attends to itself."""
    longest = config.lengths[-1]

    def at(arm: str, measure: str, width: int) -> Estimate:
        return estimates.mean(by_width(measurements, arm, measure, longest)[:, width])

    one_norm, spread = f"spread {SPREADS[0]}", f"spread {SPREADS[-1]}"
    swept = {
        "widths": ", ".join(map(str, config.widths)),
        "lengths": ", ".join(map(str, config.lengths)),
        "seeds": config.seeds,
    }
    first = claims.judge(
        "P1",
        {
            "weight_wide": at(one_norm, "weight", -1),
            "largest_wide": at(one_norm, "largest", -1),
            "weight_narrow": at(one_norm, "weight", 0),
            "largest_narrow": at(one_norm, "largest", 0),
            "weight_spread": at(spread, "weight", -1),
            "largest_spread": at(spread, "largest", -1),
            "condition": estimates.mean(condition(config, measurements, one_norm)),
            "condition_unscaled": estimates.mean(condition(config, measurements, "unscaled")),
        },
        rows=config.rows,
        **swept,
    )
    second = claims.judge(
        "P2",
        {
            "trained": estimates.mean(trained(config, measurements, "language", "qk", "diagonal")),
            "begun": estimates.mean(begun(config, measurements, "qk", "diagonal")),
            "separate": estimates.mean(trained(config, measurements, "language", "separate", "diagonal")),
            "wide": at(TIED, "weight", -1),
            "narrow": at(TIED, "weight", 0),
            "condition": estimates.mean(condition(config, measurements, TIED)),
            "masked_cost": cost(config, measurements, "qk_masked"),
            "tied_cost": cost(config, measurements, "qk"),
        },
        model_width=config.widths[-1],
        **swept,
        **_scope(config),
    )
    return [first, second]


def _roles(config: ProjectionsConfig, measurements: pd.DataFrame) -> list[Outcome]:
    """P3, P4 and P5: what the three can and cannot say."""

    def tied(measure: str, kind: str) -> Estimate:
        return estimates.mean(simulated(measurements, "symmetry", measure, arm="tied", positions=kind))

    def cycles(arm: str) -> np.ndarray:
        return np.stack([simulated(measurements, "symmetry", "cycle", arm=arm, positions=kind) for kind in POSITIONS])

    third = claims.judge(
        "P3",
        {
            "cycle_tied": estimates.mean(cycles("tied").max(axis=0)),
            "cycle_separate": estimates.mean(cycles("separate").min(axis=0)),
            **{f"swap_{kind}": tied("swap", kind) for kind in POSITIONS},
            **{f"ring_{kind}": tied("ring", kind) for kind in POSITIONS[1:]},
            "weight_asymmetry": tied("asymmetry", "none"),
            "solved_separate": solved(config, measurements, "separate"),
            "solved_tied": solved(config, measurements, "qk"),
            "solved_rotary": solved(config, measurements, "qk_rotary"),
            "accuracy_tied": estimates.mean(trained(config, measurements, "relation", "qk", "accuracy")),
            "accuracy_signed": estimates.mean(trained(config, measurements, "relation", "qk_signed", "accuracy")),
        },
        cycles=RELATION.num_cycles,
        shown=RELATION.num_shown,
        payloads=RELATION.num_payloads,
        relation_steps=config.relation_steps,
        relation_runs=config.relation_runs,
        **_layer(config),
        **_scope(config),
    )

    def planted(measure: str, part: str = "planted") -> Estimate:
        return estimates.mean(simulated(measurements, part, measure))

    shared = [simulated(measurements, "planted", f"{name}, weight, one vector") for name in ("hard, rich", "hard")]
    hard = [simulated(measurements, "planted", f"{name}, weight") for name in ("hard, rich", "hard")]
    fourth = claims.judge(
        "P4",
        {
            "hard_rich_read": planted("hard, rich, read"),
            "hard_rich_weight": planted("hard, rich, weight"),
            "easy_poor_read": planted("easy, poor, read"),
            "easy_poor_weight": planted("easy, poor, weight"),
            "rich_change": estimates.mean(np.abs(hard[0] - hard[1])),
            "shared_change": estimates.difference(*shared),
            "value_swap_weights": planted("value swap, weights"),
            "key_swap_weights": planted("key swap, weights"),
            "same_output": planted("either swap, output"),
            "determined_head": planted("one head", "determined"),
            "determined_all": planted("all heads", "determined"),
        },
        **_layer(config),
    )

    def row(arm: str, measure: str) -> np.ndarray:
        return simulated(measurements, "budget", measure, arm=arm)

    fifth = claims.judge(
        "P5",
        {
            "softmax_error": estimates.mean(np.maximum(*(row(arm, "softmax error") for arm in ("match", "none")))),
            "sink_sum": estimates.mean(row("none", "beside a sink")),
            "sink_match": estimates.mean(1 - row("match", "beside a sink")),
            "sink_identity": estimates.mean(row("none", "sink error")),
            "sigmoid_sum": estimates.mean(row("none", "sigmoid")),
            "sigmoid_match": estimates.mean(row("match", "sigmoid")),
            "dropout_spread": estimates.mean(row("none", "dropout spread")),
            "twin_softmax": estimates.mean(row("match", "twin, softmax")),
            "twin_sigmoid": estimates.mean(row("match", "twin, sigmoid")),
            "keys_match": estimates.mean(row("match", "softmax, keys")),
            "keys_none": estimates.mean(row("none", "softmax, keys")),
        },
        rows=config.rows,
        dropout=DROPOUT,
        **_layer(config),
    )
    return [third, fourth, fifth]


def _trained(config: ProjectionsConfig, measurements: pd.DataFrame) -> list[Outcome]:
    """P6 and P7: what it costs to do without."""

    def change(name: str, kind: str) -> Estimate:
        return estimates.mean(simulated(measurements, "biases", "change", arm=name, positions=kind))

    sixth = claims.judge(
        "P6",
        {
            "cost": cost(config, measurements, "biases"),
            **{f"{name}_{kind}": change(name, kind) for name in ("key", "query") for kind in ("none", "rotary")},
            "value_none": change("value", "none"),
            "value_rest": change("value, beyond b_V W_O", "none"),
        },
        **_layer(config),
        **_scope(config),
    )
    separate = language_arm("separate", config.layers, text_task().vocabulary_size)
    seventh = claims.judge(
        "P7",
        {
            "all_cost": cost(config, measurements, "qkv"),
            "query_key_cost": cost(config, measurements, "qk"),
            "key_value_cost": cost(config, measurements, "kv"),
        },
        parameters=free_parameters(separate),
        **_scope(config),
    )
    return [sixth, seventh]


def _layer(config: ProjectionsConfig) -> dict[str, Any]:
    return {
        "model_width": config.stream_width,
        "head_width": config.head_width,
        "tokens": config.tokens,
        "seeds": config.seeds,
    }


def _scope(config: ProjectionsConfig) -> dict[str, Any]:
    return {
        "layers": config.layers,
        "width": MODEL_WIDTH,
        "heads": NUM_HEADS,
        "text": "pydoc_data.topics",
        "length": LENGTH,
        "steps": config.steps,
        "batch": config.batch,
        "runs": config.runs,
        "rates": len(config.rates),
    }

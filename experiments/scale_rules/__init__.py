"""Which scale should logits have, once a model is trained?

Claims: S3-trained, S6a, S6b, S6b-recall, S6c, S7-trained.
Command: python -m experiments.scale_rules --preset=quick --out=results/scale_rules
Time: smoke about 15 s, quick 140 s, full 23 min on two cores.

A small language model of characters under each rule, at every head width and at a learning rate of the rule's own: no
scale, 1/√d_k, half of it, 1/d_k (also made to agree with 1/√d_k at the narrowest head, as muP does), 1/√D, 1/(2 d_k),
the scale folded into the initial W_Q, a learned temperature, QK-norm; and uniform attention, to know what routing is
worth. Heads, D and the value width stay, so that d_k is all that grows. Recall, too, is trained with --recall (`full`).
"""

import functools

from attn_jax.training.tasks import LanguageModel, Task, language_model, read_text
from experiments import harness
from experiments.arms import train_arm
from experiments.artifacts import Row
from experiments.harness import Experiment, Result, Unit
from experiments.scale_rules import results
from experiments.scale_rules.config import RECALL, RECALLED, ScaleRulesConfig
from experiments.scale_rules.model import make_arm
from experiments.texts import digest


def units(config: ScaleRulesConfig) -> list[Unit]:
    @functools.cache
    def text() -> LanguageModel:  # made when the first unit needs it
        return language_model(read_text(), length=config.length)[0]

    found = [
        Unit(f"text_d{width}_{rule}", lambda rule=rule, width=width: _train(config, "text", text(), rule, width))
        for width in config.widths
        for rule in config.arms(width)
    ]
    if config.recall:
        width = config.recall_dim
        found += [
            Unit(f"recall_{rule}", lambda rule=rule: _train(config, "recall", RECALL, rule, width))
            for rule in RECALLED
            if rule in config.rules
        ]
    return found


def _train(config: ScaleRulesConfig, part: str, task: Task, rule: str, head_dim: int) -> list[Row]:
    """One arm at every rate: what evaluation measured."""
    budget = config.budget if part == "text" else config.recall_budget
    rows = train_arm(make_arm(config, rule, head_dim, task.vocabulary_size), task, budget)
    return [{"part": part, "head_dim": head_dim, **row} for row in rows]


EXPERIMENT = Experiment(
    name="scale_rules",
    question="Which scale should logits have, once a model is trained?",
    config=ScaleRulesConfig,
    presets={
        "smoke": {
            "rules": ("inverse_sqrt", "folded"),
            "head_dims": (4,),
            "num_heads": 2,
            "length": 8,
            "rates": (1e-2,),
            "steps": 4,
            "seeds": 2,
            "batch_size": 2,
            "evaluation_batches": 1,
        },
        "quick": {},
        "full": {"head_dims": (8, 64), "steps": 200, "seeds": 24, "evaluations": 4, "recall": True},
    },
    units=units,
    judge=results.judge,
    figure=results.figure,
    alt=results.ALT,
    tables=results.tables,
    inputs=lambda config: {"text": digest(read_text())},
    documentation=__doc__ or "",
)


def run(config: ScaleRulesConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)

"""What the measurements of `positions` say: the verdicts and tables."""

import numpy as np
import pandas as pd

from attn_jax.training.tasks import Lookup
from experiments import claims, estimates
from experiments.arms import Best
from experiments.claims.positions import EVALUATED, EXTENDS, PROBED, SAME, STOPS
from experiments.positions.config import SCORE_ARMS, PositionsConfig
from experiments.positions.measured import Measured, kind_of
from experiments.progress import Table, cells
from experiments.texts import DEFAULT_NAME
from experiments.verdicts import Outcome


def judge(config: PositionsConfig, measurements: pd.DataFrame) -> list[Outcome]:
    found = Measured(config, measurements)
    return [_x1(found), _x2(found), _x3(found)]


def _x1(found: Measured) -> Outcome:
    config, last = found.config, found.config.layers - 1
    probes = {f"{kind}_probe": found.probe(kind, last) for kind in PROBED}
    shifts = {
        "rotary_value": found.shift("rotary", "value", 0, "largest"),
        "rotary_query": found.shift("rotary", "query", 0),
        "rotary_deep": found.shift("rotary", "value", 1),
        **{f"{kind}_value": found.shift(kind, "value", 0) for kind in ("sinusoidal", "learned")},
    }
    probes |= {f"{kind}_squares": found.probe(kind, last, measure="squares") for kind in ("rotary", "none")}
    told = {"none_untrained": found.probe("none", last, "before"), "rotary_first": found.probe("rotary", 0)}
    return claims.judge(
        "X1",
        {name: estimates.mean(x) for name, x in (probes | told | shifts).items()},
        probed=config.probed,
        shifted=config.seeds,
        shift=config.length,
        **_scope(config),
    )


def _x2(found: Measured) -> Outcome:
    config = found.config
    errors = {arm: found.scores(arm) for arm in SCORE_ARMS}
    evidence = {arm: estimates.mean(x[:, -1]) for arm, x in errors.items()}
    rounded = errors["fixed_bfloat16"]
    evidence["growth_bfloat16"] = estimates.ratio(rounded[:, -1], rounded[:, 0])
    evidence["reach_bfloat16"] = estimates.mean(reach(config, errors["table_bfloat16"]))
    return claims.judge(
        "X2",
        evidence,
        head_width=config.score_width,
        positions=_list(config.score_positions),
        distances=_list(config.distances),
        seeds=config.simulations,
        pairs=config.pairs,
    )


def reach(config: PositionsConfig, errors: np.ndarray) -> np.ndarray:
    """`[seeds]` of `[seeds, positions]`: the position before the first whose error is 1% or more; 0 if there is none.

    The last position if none has so large an error.
    """
    wrong = np.concatenate([errors >= SAME, np.ones((len(errors), 1), bool)], axis=1)
    return np.array((0, *config.score_positions))[np.argmax(wrong, axis=1)]


def _x3(found: Measured) -> Outcome:
    config, task = found.config, Lookup()
    evidence = {f"harm_{arm}": found.harm(arm) for arm in EVALUATED}
    evidence |= {f"near_{arm}": found.harm(arm, up_to=2) for arm in EXTENDS | STOPS}
    evidence |= {f"recall_{arm}": found.recalls(arm) for arm in EVALUATED}
    evidence |= {f"within_{arm}": found.solves(arm) for arm in EXTENDS | STOPS}
    return claims.judge(
        "X3",
        evidence,
        extension=config.extension,
        sequences=config.sequences,
        lookup_pairs=task.num_pairs,
        lookup_keys=task.num_keys,
        lookup_steps=config.lookup_steps,
        lookup_seeds=config.lookup_seeds,
        **_scope(config),
    )


def _scope(config: PositionsConfig) -> dict[str, object]:
    return {
        "text": DEFAULT_NAME,
        "layers": config.layers,
        "width": config.model_width,
        "heads": config.num_heads,
        "head_width": config.head_width,
        "steps": config.steps,
        "batch": config.batch_size,
        "length": config.length,
        "seeds": config.seeds,
        "rates": len(config.rates),
    }


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)


def tables(config: PositionsConfig, measurements: pd.DataFrame) -> list[Table]:
    found = Measured(config, measurements)
    scores = [(at, *(f"{found.scores(arm)[:, i].mean():.1e}" for arm in SCORE_ARMS)) for i, at in _numbered(config)]
    rows = []
    for arm, what in EVALUATED.items():
        if not found.read(arm):
            continue
        best = found.best(kind := kind_of(arm))
        accuracy = [f"{found.accuracy(a, m).mean():.2f}" for a, m in ((kind, "within"), (arm, "beyond"))]
        probe = f"{found.probe(kind, config.layers - 1).mean():.2f}" if arm == kind else ""
        rows.append((what, _rate(best), f"{best.values.mean():.3f}", str(found.harm(arm)), *accuracy, probe))
    names = ("positions", "best rate", "loss within L", f"above the last L, to {config.extension} L")
    names += ("recall within L", "further back", "position told by values")
    return [
        Table("Error of a score / its standard deviation", ("key at", *SCORE_ARMS.values()), cells(scores)),
        Table(f"Trained at L = {config.length}", names, cells(rows)),
    ]


def _numbered(config: PositionsConfig) -> list[tuple[int, int]]:
    return list(enumerate(config.score_positions))


def _rate(best: Best) -> str:
    return f"{best.rate:.3g}" + ("" if best.inside else " (edge)")

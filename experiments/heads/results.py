"""What the measurements of `heads` say: the verdicts."""

from collections.abc import Sequence

import jax
import numpy as np
import pandas as pd

from experiments import claims, estimates
from experiments.benchmarks import timing
from experiments.claims.heads import PATTERNS
from experiments.claims.trained_heads import MARGIN, MIXINGS, SETTINGS
from experiments.estimates import Estimate
from experiments.heads.config import HeadsConfig, is_common
from experiments.heads.measured import COUNTED, Measured
from experiments.texts import DEFAULT_NAME
from experiments.verdicts import Outcome


def judge(config: HeadsConfig, measurements: pd.DataFrame) -> list[Outcome]:
    found = Measured(config, measurements)
    return [_h1(found), _h3a(found), _h3b(found), _h4(found), _h6(found), _h7(found)]


def _h1(found: Measured) -> Outcome:
    config = found.config
    counts = {name: found.cost(name) for name in COUNTED}
    spread = {name: estimates.counted(x.max() / x.min()) for name, x in counts.items()}
    growth = {name: estimates.counted(x[-1] / x[0]) for name, x in counts.items()}
    seconds = found.seconds()
    return claims.judge(
        "H1",
        {
            "operation_ratio": growth["operations"],
            "parameter_spread": spread["parameters"],
            "product_spread": spread["products"],
            "memory_ratio": growth["memory"],
            "time_ratio": timing.ratio(seconds[:, -1], seconds[:, 0]),
        },
        width=config.cost_width,
        heads=_list(config.cost_heads),
        length=config.cost_length,
        rounds=config.rounds,
        device=jax.default_backend().upper(),
    )


def _h3a(found: Measured) -> Outcome:
    config, length = found.config, max(found.config.fit_lengths)
    narrow = sorted(config.fit_dims).index(length // 8)
    evidence = {}
    for name in PATTERNS:
        evidence[f"left_{name}"] = estimates.mean(found.fit("left", name, length)[:, narrow])
        evidence[f"width_{name}"] = estimates.mean(found.narrowest_fit(name, length))
    for name in ("permutation", "k_hot"):
        evidence[f"by_hand_{name}"] = estimates.mean(found.fit("by_hand", name, length))
    evidence["range_permutation"] = estimates.mean(found.fit("by_hand_range", "permutation", length))
    return claims.judge(
        "H3a",
        evidence,
        length=length,
        narrow=length // 8,
        widths=_list(config.fit_dims),
        k=config.hot,
        steps=config.fit_steps,
        seeds=config.simulations,
    )


def _h7(found: Measured) -> Outcome:
    config = found.config
    width = config.seen_width // config.seen_heads
    evidence = {name: estimates.mean(found.seen(name)) for name in ("seen_share", "sliced_share", "query_rank")}
    return claims.judge(
        "H7",
        {
            **evidence,
            "query_excess": estimates.mean(found.seen("query_rank") - width),
            "joint_rank": estimates.mean(found.seen("joint_rank")),
            "model_width": estimates.counted(config.seen_width),
        },
        width=config.seen_width,
        heads=config.seen_heads,
        head_width=width,
        length=config.seen_length,
        seeds=config.simulations,
    )


def _h3b(found: Measured) -> Outcome:
    config, evidence = found.config, {}
    for name, arms in (("trade", config.split_widths), ("alone", config.alone_widths)):
        losses = dict(zip(arms, found.losses(list(arms.values())), strict=True))
        narrow, common = (
            best_by_others([loss for width, loss in losses.items() if is_common(width) is which], config.seeds)
            for which in (False, True)
        )
        evidence[name] = estimates.difference(narrow, common)
        means = {width: float(loss.mean()) for width, loss in losses.items()}
        line = min((mean for width, mean in means.items() if is_common(width)), default=np.nan) + MARGIN
        known = not np.isnan([line, *means.values()]).any()
        evidence[f"best_{name}"] = estimates.counted(min(means, key=means.__getitem__) if known else np.nan)
        least = min(width for width, mean in means.items() if mean <= line) if known else np.nan
        evidence[f"least_{name}"] = estimates.counted(least)
    arms = ", ".join(f"({heads}, {width})" for heads, width in config.arms)
    return claims.judge("H3b", evidence, arms=arms, rates=len(config.rates), **_scope(config))


def best_by_others(values: Sequence[np.ndarray], seeds: int) -> np.ndarray:
    """`[arms][seeds]` to `[seeds]`: of each seed the arm that is best on all others, so that no seed chooses itself.

    NaN if an arm is not known, or there is none.
    """
    by_arm = np.reshape(values, (-1, seeds))
    if not len(by_arm) or np.isnan(by_arm).any():
        return np.full(seeds, np.nan)
    others = by_arm.sum(axis=1, keepdims=True) - by_arm
    return np.take_along_axis(by_arm, np.argmin(others, axis=0)[None], axis=0)[0]


def _h4(found: Measured) -> Outcome:
    config = found.config
    heads = config.compared

    def over_heads(when: str, pair: str) -> np.ndarray:
        """`[seeds, numbers of heads]`."""
        return np.stack([found.difference(h, when, pair) for h in heads], axis=1)

    def divergence(when: str) -> Estimate:
        values = [found.pattern(h, when, "within", "divergence").mean(axis=1) for h in heads]
        return estimates.mean(np.mean(values, axis=0))

    within = over_heads("after", "within")
    return claims.judge(
        "H4",
        {
            "least_difference": estimates.mean(within.min(axis=1)),
            "most_difference": estimates.mean(within.max(axis=1)),
            "division": estimates.mean((within - over_heads("after", "between")).mean(axis=1)),
            "untrained": estimates.mean(over_heads("before", "within").mean(axis=1)),
            "slope": estimates.slope(np.log2(heads), within) if len(heads) > 1 else estimates.mean(within * np.nan),
            "divergence": divergence("after"),
            "divergence_untrained": divergence("before"),
        },
        heads=_list(heads),
        sequences=config.sequences,
        **_scope(config),
    )


def _h6(found: Measured) -> Outcome:
    config = found.config
    evidence = {f"{m}_{s}": estimates.mean(found.without(m, s)) for s in SETTINGS for m in MIXINGS}
    heads, width = config.base
    return claims.judge("H6", evidence, heads=heads, head_width=width, rates=len(config.rates), **_scope(config))


def _scope(config: HeadsConfig) -> dict[str, object]:
    return {
        "text": DEFAULT_NAME,
        "width": config.model_width,
        "steps": config.steps,
        "batch": config.batch_size,
        "length": config.length,
        "seeds": config.seeds,
    }


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))

"""What the measurements of `scale_rules` say: verdicts, tables and the figure."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import claims, estimates, figures
from experiments.arms import Best, best_of
from experiments.claims.scale import MARGIN, UNIT
from experiments.estimates import Estimate
from experiments.progress import Table, cells
from experiments.scale_rules.config import LAYERS, OTHERS, RECALL, RECALLED, ScaleRulesConfig
from experiments.texts import DEFAULT_NAME
from experiments.verdicts import Outcome

ALT = (
    "Six panels. Loss above that of 1/√d_k against the head width, one line a rule, with the margin of 0.02 nats. "
    "Loss against the learning rate at the narrowest and at the widest head. Loss above that of 1/√d_k against the "
    "factor as a multiple of 1/√d_k. The largest logit over training at the widest head. The variance of q, k and the "
    "logits over training under 1/√d_k."
)
LABELS = {
    "inverse_sqrt": "1/√d_k",
    "half_inverse_sqrt": "1/(2√d_k)",
    "none": "none",
    "inverse": "1/d_k",
    "inverse_base": "1/d_k from the narrowest",
    "inverse_sqrt_model": "1/√D",
    "half_inverse": "1/(2 d_k)",
    "uniform": "uniform",
    "folded": "folded into W_Q",
    "temperature": "learned temperature",
    "qk_norm": "QK-norm",
}
DRAWN = ("inverse_sqrt", "none", "inverse", "half_inverse_sqrt", "folded", "temperature", "qk_norm")
VARIANCES = {"query_square": "q, a component", "key_square": "k, a component", "logit_variance": "scaled logits"}
SOLVED = 0.9  # right answers


@dataclasses.dataclass(frozen=True)
class Measured:
    """The arms of one task, by rule and head width."""

    config: ScaleRulesConfig
    rows: pd.DataFrame

    def arm(self, rule: str, head_dim: int) -> pd.DataFrame:
        """All rows of a rule."""
        return self.rows.query("arm == @self.config.arm_of(@rule, @head_dim) and head_dim == @head_dim")

    def best(self, rule: str, head_dim: int, measure: str = "loss") -> Best:
        """The rule at its best rate, at the end."""
        return best_of(self.arm(rule, head_dim), self.config.arm_of(rule, head_dim), measure=measure)

    def final(self, rule: str, head_dim: int, measure: str = "loss") -> np.ndarray:
        """`[seeds]`, at the best rate; NaN if there is none inside the grid."""
        best = self.best(rule, head_dim, measure)
        return best.values if best.inside else np.full(self.config.seeds, np.nan)

    def above(self, rule: str, head_dim: int) -> np.ndarray:
        """`[seeds]`: loss minus that under 1/√d_k, each at its own best rate."""
        return self.final(rule, head_dim) - self.final("inverse_sqrt", head_dim)

    def at_rate(self, rule: str, head_dim: int, rate: float, measure: str = "loss") -> np.ndarray:
        """`[evaluations, seeds]`; NaN if the rule was not trained at that rate."""
        rows = self.arm(rule, head_dim).query("measure == @measure")
        found = rows[np.isclose(rows["rate"], rate)].pivot(index="step", columns="seed", values="value")
        return np.asarray(found) if found.size else np.full((self.config.evaluations + 1, self.config.seeds), np.nan)

    def over_training(self, rule: str, head_dim: int, measure: str) -> np.ndarray:
        """`[evaluations, seeds]`, at the best rate."""
        return self.at_rate(rule, head_dim, self.best(rule, head_dim).rate, measure)

    def by_rate(self, rule: str, head_dim: int) -> dict[float, np.ndarray]:
        """The losses at the end, `[seeds]`, of every rate; NaN where a run diverged."""
        final = self.arm(rule, head_dim).query("measure == 'loss' and step == step.max()")
        return {rate: final["value"].to_numpy()[final["rate"] == rate] for rate in sorted(set(final["rate"]))}


def judge(config: ScaleRulesConfig, measurements: pd.DataFrame) -> list[Outcome]:
    text, recall = (Measured(config, measurements.query("part == @part")) for part in ("text", "recall"))
    narrow, wide = config.widths[0], config.widths[-1]
    scope = {
        "layers": LAYERS,
        "model_width": config.model_width,
        "heads": config.num_heads,
        "length": config.length,
        "text": DEFAULT_NAME,
        "steps": config.steps,
        "batch": config.batch_size,
        "seeds": config.seeds,
        "narrow": narrow,
        "wide": wide,
        "widths": ", ".join(map(str, config.widths)),
    }

    def above(rule: str, head_dim: int) -> Estimate:
        return estimates.mean(text.above(rule, head_dim))

    def growth(rule: str) -> Estimate:
        return estimates.difference(text.above(rule, wide), text.above(rule, narrow) if narrow < wide else unknown)

    def rate(rule: str, head_dim: int, over: str, over_dim: int) -> Estimate:
        return estimates.counted(text.best(rule, head_dim).rate / text.best(over, over_dim).rate)

    unknown = np.full(config.seeds, np.nan)
    alternatives = {"half": "half_inverse_sqrt", "temperature": "temperature", "qk_norm": "qk_norm"}
    departing = ("none", "inverse", "inverse_base")
    uniform = {"uniform": above("uniform", narrow)}
    by_width = {"wide": wide, "narrow": narrow}
    same_rate = text.at_rate("folded", wide, text.best("inverse_sqrt", wide).rate)[-1]
    return [
        claims.judge("S3-trained", _variances(config, text), **scope),
        claims.judge(
            "S6a",
            {
                **{f"{rule}_wide": above(rule, wide) for rule in departing},
                **{f"{rule}_growth": growth(rule) for rule in departing},
                **{f"{rule}_rate": rate(rule, wide, "inverse_sqrt", wide) for rule in ("none", "inverse")},
                "sqrt_rate": rate("inverse_sqrt", wide, "inverse_sqrt", narrow),
            },
            **scope,
        ),
        claims.judge(
            "S6b",
            {
                f"{name}_{where}": above(rule, head_dim)
                for name, rule in alternatives.items()
                for where, head_dim in by_width.items()
            }
            | uniform,
            **scope,
        ),
        claims.judge(
            "S6b-recall",
            _shares(config, recall),
            pairs=RECALL.num_pairs,
            keys=RECALL.num_keys,
            recall_length=RECALL.length,
            recall_dim=config.recall_dim,
            recall_steps=config.recall_steps,
            recall_batch=config.recall_budget.batch_size,
            recall_seeds=config.recall_seeds,
            **scope,
        ),
        claims.judge(
            "S6c",
            {
                **{f"folded_{where}": above("folded", head_dim) for where, head_dim in by_width.items()},
                "folded_same_rate": estimates.difference(same_rate, text.final("inverse_sqrt", wide)),
                "folded_rate": rate("folded", wide, "inverse_sqrt", wide),
                "none_wide": above("none", wide),
                "inverse_base_wide": above("inverse_base", wide),
                **uniform,
            },
            **scope,
        ),
        claims.judge(
            "S7-trained",
            {
                "model": above("inverse_sqrt_model", narrow),
                "half_inverse": above("half_inverse", narrow),
                **uniform,
            },
            **scope,
        ),
    ]


def _variances(config: ScaleRulesConfig, text: Measured) -> dict[str, Estimate]:
    """Under 1/√d_k; what was measured of q holds the factor, too."""
    narrow, wide = config.widths[0], config.widths[-1]
    final = functools.partial(text.final, "inverse_sqrt")
    return {
        "logit": estimates.mean(final(narrow, "logit_variance")),
        "logit_start": estimates.mean(text.over_training("inverse_sqrt", narrow, "logit_variance")[0]),
        "query": estimates.mean(final(narrow, "query_square") * narrow),
        "key": estimates.mean(final(narrow, "key_square")),
        "alignment": estimates.mean(final(narrow, "alignment")),
        "logit_wide": estimates.mean(final(wide, "logit_variance")),
        "alignment_wide": estimates.mean(final(wide, "alignment")),
    }


def _shares(config: ScaleRulesConfig, recall: Measured) -> dict[str, Estimate]:
    """Of seeds that solve recall; no seeds if it was not trained."""
    names = {"half": "half_inverse_sqrt", **{rule: rule for rule in ("none", "inverse", *OTHERS)}}
    unknown = Estimate(np.nan, np.nan, np.nan, config.recall_seeds if config.recall else 0)
    if not config.recall:
        return {"sqrt": unknown, **dict.fromkeys(names, unknown)}
    right = {rule: recall.final(rule, config.recall_dim, "accuracy") for rule in RECALLED}
    solved = {rule: None if np.isnan(x).any() else x > SOLVED for rule, x in right.items()}
    base = solved["inverse_sqrt"]
    found = {"sqrt": unknown if base is None else estimates.share(base)}
    for name, rule in names.items():
        other = solved[rule]
        found[name] = unknown if base is None or other is None else estimates.share_difference(other, base)
    return found


def tables(config: ScaleRulesConfig, measurements: pd.DataFrame) -> list[Table]:
    text, recall = (Measured(config, measurements.query("part == @part")) for part in ("text", "recall"))
    numbers = ("best rate", "loss", "above 1/√d_k", "largest logit", "Var(logit)", "entropy", "diverged")
    found = []
    for width in config.widths:
        rows = []
        for arm, rules in config.arms(width).items():
            logits = text.over_training(arm, width, "max_logit").mean(axis=1)
            rows.append(
                (
                    " = ".join(LABELS[rule] for rule in rules),
                    float(config.fold(arm, width) * config.factor(arm, width) * width**0.5),
                    _spell_rate(text.best(arm, width)),
                    f"{text.best(arm, width).values.mean():.3f}",
                    str(estimates.mean(text.above(arm, width))),
                    " … ".join(f"{x:.3g}" for x in (logits[0], logits.max(), logits[-1])),
                    *(float(text.best(arm, width, name).values.mean()) for name in ("logit_variance", "entropy")),
                    f"{np.mean(np.isnan(list(text.by_rate(arm, width).values()))):.0%}",
                )
            )
        title = f"Language model at the best rate, d_k = {width}; largest logit: first … highest … last evaluation"
        found.append(Table(title, ("rule", "× 1/√d_k", *numbers), cells(rows)))
    if config.recall:
        rows = []
        for rule in (rule for rule in RECALLED if rule in config.rules):
            best = recall.best(rule, config.recall_dim, "accuracy")
            share = estimates.share(best.values > SOLVED)
            rows.append((LABELS[rule], _spell_rate(best), str(share), float(best.values.mean())))
        names = ("rule", "best rate", "share of seeds that solve it", "right answers")
        found.append(Table(f"Recall, d_k = {config.recall_dim}", names, cells(rows)))
    return found


def _spell_rate(best: Best) -> str:
    return f"{best.rate:.3g}" + ("" if best.inside else " (edge)")


def figure(config: ScaleRulesConfig, measurements: pd.DataFrame) -> Figure:
    text = Measured(config, measurements.query("part == 'text'"))
    narrow, wide, steps = config.widths[0], config.widths[-1], sorted(set(text.rows["step"]))
    rules = [rule for rule in DRAWN if rule in config.rules]
    drawn, axes = figures.panels(2, 3)
    growing, at_narrow, at_wide, multiples, logits, variances = axes.flat
    for index, rule in enumerate(rules):
        if rule != "inverse_sqrt":
            _differences(growing, index, [text.above(rule, width) for width in config.widths], config.widths, rule)
        for one, width in ((at_narrow, narrow), (at_wide, wide)):
            found = text.by_rate(rule, width)
            figures.curve(one, index, list(found), [losses.mean() for losses in found.values()], LABELS[rule])
        largest = text.over_training(rule, wide, "max_logit").mean(axis=1)
        figures.curve(logits, index, steps, largest, LABELS[rule])
    for index, width in enumerate(config.widths):
        fixed = [rule for rule in config.arms(width) if rule not in (*OTHERS, "uniform")]
        points = sorted((config.factor(rule, width) * width**0.5, text.above(rule, width).mean()) for rule in fixed)
        x, y = zip(*points, strict=True)
        figures.curve(multiples, index, x, y, f"d_k = {width}")
    for index, (measure, label) in enumerate(VARIANCES.items()):
        factor = narrow if measure == "query_square" else 1.0  # what was seen of q holds 1/√d_k
        values = text.over_training("inverse_sqrt", narrow, measure).mean(axis=1) * factor
        figures.curve(variances, index, steps, values, label)

    for one in (growing, multiples):
        one.axhspan(-MARGIN, MARGIN, color="#dddddd", label=f"± {MARGIN} nats")
        one.set(ylabel="loss above that of 1/√d_k, nats")
        one.set_yscale("symlog", linthresh=MARGIN)
    figures.powers(growing, config.widths)
    growing.set(title="Each rule at its best rate, 95%", xlabel="head width d_k")
    for one, width in ((at_narrow, narrow), (at_wide, wide)):
        one.set(title=f"Loss against the rate, d_k = {width}", xlabel="learning rate", ylabel="loss held out, nats")
        figures.powers(one, sorted({rate for rule in rules for rate in text.by_rate(rule, width)}))
    multiples.set(title="A rule as a multiple of 1/√d_k", xlabel="factor · √d_k")
    multiples.set_xscale("log", base=2)
    logits.set(title=f"Largest |logit|, best rate, d_k = {wide}", xlabel="step", ylabel="largest |logit|", yscale="log")
    variances.axhspan(*UNIT, color="#dddddd", label="unit: 0.5 to 2")
    variances.set(title=f"Variance under 1/√d_k, d_k = {narrow}", xlabel="step", ylabel="variance", yscale="log")
    for one in (multiples, variances):
        one.legend(fontsize=8)
    drawn.legend(*logits.get_legend_handles_labels(), loc="outside lower center", ncols=len(rules), fontsize=9)
    return drawn


def _differences(axes: Axes, index: int, by_width: Sequence[np.ndarray], widths: Sequence[int], rule: str) -> None:
    """One rule's mean and interval at every width, a little beside those of the others."""
    found = [estimates.mean(values) for values in by_width]
    errors = [[e.value - e.low for e in found], [e.high - e.value for e in found]]
    x = [width * 2 ** (0.05 * (index - 3)) for width in widths]
    colour, marker = figures.COLOURS[index % len(figures.COLOURS)], figures.MARKERS[index % len(figures.MARKERS)]
    look = {"color": colour, "marker": marker, "markersize": 4, "capsize": 2}
    axes.errorbar(x, [e.value for e in found], yerr=errors, label=LABELS[rule], **look)

"""From what was measured to what is told: signals that go beyond their limits, and come back.

A finding is about one signal in one layer. It appears, and becomes more severe, at once. It becomes less severe, or is
over, when the signal has been back by a fifth of its limit for ten measurements in a row, so that one that hovers at
its limit is told of once. Everything follows from the rows of the log: a resumed run reads them again.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from attn_jax import checks
from attn_jax.diagnostics.diagnosis.limits import Limits
from attn_jax.diagnostics.diagnosis.signals import NOTICE, SEVERITIES, SIGNALS, Array, Sight, Signal, largest, mean

SLACK, PATIENCE = 0.8, 10  # how far back, and for how many measurements
WARM, HORIZON = 10, 100  # a running mean is one after so many measurements, and then forgets over so many


@dataclasses.dataclass(frozen=True)
class Finding:
    """A signal in a layer that appeared, changed its severity, or is over.

    Attributes:
        step: of the measurement.
        run: which of many; None if there is one.
        layer: in which.
        heads: those beyond the limit; none where the signal is of the layer.
        signal: the name of a `Signal`.
        severity: "information", "notice", "serious", or None: it is over.
        before: the severity that it had.
        value: of the worst head.
        limit: that it is compared with.

    >>> from attn_jax.training.monitor import find
    >>> rows = [{"step": 1, "kind": "attention", "max_logit": [[9.0, 9.0], [132.0, 9.0]]}]  # of heads, of layers
    >>> (finding,) = find(rows)
    >>> finding.signal, finding.severity, finding.layer, finding.heads, finding.value, finding.limit
    ('max_logit', 'notice', 1, (0,), 132.0, 100.0)
    """

    step: int
    run: int | None
    layer: int
    heads: tuple[int, ...]
    signal: str
    severity: str | None
    before: str | None
    value: float
    limit: float

    @property
    def row(self) -> dict[str, Any]:
        """As a row of the log."""
        return {"step": self.step, "kind": "finding", **dataclasses.asdict(self), "value": float(f"{self.value:.6g}")}


class Watch:
    """Follows the measurements of one training, a row at a time.

    Args:
        limits: what is told of.
        rows: of a log, to begin behind; others than measurements are passed over.

    >>> from attn_jax.training.monitor import Limits, Watch
    >>> watch = Watch(Limits(max_logit=50.0))
    >>> largest = 9.0, 60.0, 60.0  # of the one head of the one layer, in three measurements
    >>> rows = [{"step": step, "kind": "attention", "max_logit": [[value]]} for step, value in enumerate(largest)]
    >>> [[finding.signal for finding in watch.look(row)] for row in rows]  # what lasts is told of once
    [[], ['max_logit'], []]
    """

    def __init__(self, limits: Limits, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._limits, self._relaxed = limits, limits.relaxed(SLACK)
        self._levels: dict[str, Array] = {}  # `[runs, L]`, of each signal
        self._calm: dict[str, Array] = {}  # measurements since it was last beyond
        self._means: dict[str, Array] = {}
        self._counts: dict[str, Array] = {}
        for row in rows:
            if row["kind"] == "attention":
                self.look(row)

    def look(self, row: Mapping[str, Any]) -> list[Finding]:
        """What changes with the next measurement."""
        sight = self.sight(row)
        findings = [
            finding
            for signal in SIGNALS
            if signal.limit(self._limits) is not None and all(name in sight for name in signal.needs)
            for finding in self._follow(signal, sight, row["step"])
        ]
        self._average(sight)
        return findings

    def sight(self, row: Mapping[str, Any]) -> Sight:
        """The row as arrays, beside the means of the rows before."""
        sight = Sight(row)
        for name in ("normalized_entropy", "max_logit"):
            if name in sight:
                shape = sight[name].shape[:-1]
                means = self._means.setdefault(name, np.zeros(shape))
                count = self._counts.setdefault(name, np.zeros(shape, int))
                sight.means[name] = np.where(count >= WARM, means, np.nan)
        return sight

    def _follow(self, signal: Signal, sight: Sight, step: int) -> list[Finding]:
        values = signal.values(sight, self._limits)
        levels, beyond = signal.judge(sight, self._limits)
        relaxed, nearly = signal.judge(sight, self._relaxed)
        standing = self._levels.setdefault(signal.name, np.zeros_like(levels))
        calm = self._calm.setdefault(signal.name, np.zeros_like(levels))

        levels = np.maximum(levels, np.minimum(standing, relaxed))
        known = np.isfinite(sight[signal.needs[0]]).reshape(*levels.shape, -1).any(axis=-1)
        levels = np.where(known, levels, standing)
        calm = np.where(levels < standing, calm + known, 0)
        levels = np.where((levels < standing) & (calm < PATIENCE), standing, levels)
        self._levels[signal.name], self._calm[signal.name] = levels, np.where(levels < standing, 0, calm)

        findings = []
        for run, layer in np.argwhere(levels != standing).tolist():
            at = (run, layer)
            heads = beyond[at] if beyond[at].any() else nearly[at]
            limit = signal.limit(self._limits, levels[at])
            assert limit is not None
            findings.append(
                Finding(
                    step=step,
                    run=run if sight.many else None,
                    layer=layer,
                    heads=tuple(np.flatnonzero(heads).tolist()) if heads.size > 1 else (),
                    signal=signal.name,
                    severity=SEVERITIES[levels[at]],
                    before=SEVERITIES[standing[at]],
                    value=_worst(values[at], above=signal.above),
                    limit=limit,
                )
            )
        return findings

    def _average(self, sight: Sight) -> None:
        """The means wait while the entropy has fallen: it is compared with what it was before."""
        summaries = {"normalized_entropy": mean, "max_logit": largest}
        fallen = self._levels.get("entropy_ratio", np.zeros(1, int)) > 0
        for name in sight.means:
            now = summaries[name](sight[name])
            counts = np.isfinite(now) & ~fallen
            self._counts[name] = self._counts[name] + counts
            weight = np.where(counts, 1 / np.clip(self._counts[name], 1, HORIZON), 0)
            self._means[name] = self._means[name] + weight * (np.where(counts, now, 0) - self._means[name])


def find(rows: Iterable[Mapping[str, Any]], limits: Limits | None = None) -> list[Finding]:
    """Everything that changed in the course of a log.

    Args:
        rows: of the log, of which the measurements count.
        limits: what is told of; None: `Limits()`.

    >>> from attn_jax.training.monitor import find
    >>> rows = [{"step": step, "kind": "attention", "max_logit": [[9.0 if step else 132.0]]} for step in range(12)]
    >>> [(finding.step, finding.severity) for finding in find(rows)]  # over after ten measurements below the limit
    [(0, 'notice'), (10, None)]
    """
    watch = Watch(Limits() if limits is None else limits)
    return [finding for row in rows if row["kind"] == "attention" for finding in watch.look(row)]


def calibrate(rows: Iterable[Mapping[str, Any]], *, margin: float = 2.0, limits: Limits | None = None) -> Limits:
    """The limits by which a run that is known to be healthy passes, with a margin.

    Each limit that a signal has moves to `margin` times the worst of the run (half of it, for those below which a
    signal must not fall; half of the way to 1, for shares); the second limit of the logits moves by the same factor.
    What was not measured, and what never applied, keeps its limit, and None stays None.

    Args:
        rows: of the log, of which the measurements count.
        margin: above 1.
        limits: to start from; None: `Limits()`.

    Raises:
        ValueError: if the log has no measurements, or the margin is not above 1.

    >>> from attn_jax.training import calibrate
    >>> rows = [{"step": 1, "kind": "attention", "max_logit": [[9.0, 9.0], [60.0, 9.0]]}]  # of heads, of layers
    >>> calibrate(rows, margin=1.5).max_logit
    90.0
    """
    limits = Limits() if limits is None else limits
    margin = checks.finite_number("margin", margin)
    if margin <= 1:
        raise ValueError(f"margin must be above 1, got {margin:g}")
    watch, worst = Watch(limits), {}
    measured = [row for row in rows if row["kind"] == "attention"]
    if not measured:
        raise ValueError("rows must hold measurements, of kind 'attention': were they made with a monitor?")
    for row in measured:
        sight = watch.sight(row)
        for signal in SIGNALS:
            if signal.limit(limits) is not None and all(name in sight for name in signal.needs):
                value = _worst(signal.values(sight, limits), above=signal.above)
                worst.setdefault(signal, []).append(value)
        watch.look(row)
    for signal, values in worst.items():
        value = _worst(np.array(values), above=signal.above)
        if np.isfinite(value) and (value > 0 or not signal.above):
            limits = limits.widened(signal.name, value, margin)
    return limits


def explain(findings: Sequence[Finding]) -> list[str]:
    """A line for each signal that changed, of the layers in which it did together; mere information is not told.

    Args:
        findings: of `find`, or of `Watch.look`.

    Returns:
        Lines like `step 120, notice: largest logit 132, limit 100 (layer 3, heads 0, 2). projections: …`.

    >>> from attn_jax.training.monitor import explain, find
    >>> rows = [{"step": 1, "kind": "attention", "max_logit": [[9.0, 9.0], [132.0, 9.0]]}]  # of heads, of layers
    >>> print(explain(find(rows))[0].split(". ")[0])  # and then the link, and what to look at
    step 1, notice: largest logit 132, limit 100 (layer 1, head 0)
    """
    groups: dict[tuple, list[Finding]] = {}
    for finding in findings:
        if max(map(SEVERITIES.index, (finding.severity, finding.before))) >= NOTICE:
            groups.setdefault((finding.step, finding.run, finding.signal, finding.severity), []).append(finding)
    return [_line(group) for group in groups.values()]


def _line(group: Sequence[Finding]) -> str:
    """`step 120, notice: largest logit 132, limit 100 (layer 3, heads 0, 2; also layers 4, 5). projections: …`"""
    (signal,) = (signal for signal in SIGNALS if signal.name == group[0].signal)
    worst = max(group, key=lambda x: -np.inf if np.isnan(x.value) else x.value if signal.above else -x.value)
    others = [x.layer for x in group if x is not worst]
    where = "" if worst.run is None else f"run {worst.run}, "
    where += _count("layer", [worst.layer]) + (f", {_count('head', worst.heads)}" if worst.heads else "")
    where += f"; also {_count('layer', others)}" if others else ""
    value = "" if np.isnan(worst.value) else f" {worst.value:.3g}, limit {worst.limit:g}"
    text = f"step {worst.step}, {worst.severity or 'over'}: {signal.says}{value} ({where})"
    return text + (f". {signal.link}: {signal.mend}" if worst.severity else "")


def _count(word: str, numbers: Sequence[int]) -> str:
    """`heads 1, 3`."""
    return f"{word}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _worst(values: Array, *, above: bool) -> float:
    """The value that is farthest out, NaN where none is known."""
    known = values[np.isfinite(values)]
    return float("nan") if not known.size else float(known.max() if above else known.min())

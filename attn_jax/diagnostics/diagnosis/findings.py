"""What a diagnosis says: of each thing that is not as it should be the link, the numbers, the cause and the mend."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

LINKS = (
    "positions", "projections", "heads", "scale", "mask", "softmax", "values", "output", "bias", "batch", "cache",
    "dropout", "gradients", "numerics",
)  # fmt: skip
SEVERITIES = ("information", "notice", "serious")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it should be, or that a reader of the model should know.

    Attributes:
        signal: the name of what was measured.
        link: of `LINKS`, the one that it points to.
        severity: of `SEVERITIES`. Only "serious" is an alarm.
        layers: those that are beyond the limit; none where it is about the model.
        heads: pairs of layer and head, the worst first; none where it is about layers.
        value: of the worst.
        limit: that it is compared with.
        origin: where the limit comes from.
        evidence: what was seen, in numbers.
        cause: what is likely behind it.
        check: what to look at next.
        mend: what to do.

    >>> import numpy as np
    >>> from attn_jax.diagnostics import Captures, diagnose
    >>> rng = np.random.default_rng(0)
    >>> arrays = {f"layers.0.{name}": rng.standard_normal((16, 2, 32)) for name in ("query", "key", "value")}
    >>> arrays["layers.0.query"] *= 1000  # logits in the thousands
    >>> finding = diagnose(Captures.of(arrays)).alarms[-1]
    >>> finding.signal, finding.limit, finding.value > finding.limit
    ('max_logit', 1000.0, True)
    >>> print(finding.mend)
    QK-norm, clipping, spectral reparametrisation, a lower rate.
    """

    signal: str
    link: str
    severity: str
    layers: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    value: float = math.nan
    limit: float = math.nan
    origin: str
    evidence: str
    cause: str
    check: str
    mend: str

    def __post_init__(self) -> None:
        for name, choices in (("link", LINKS), ("severity", SEVERITIES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    @property
    def excess(self) -> float:
        """How many times beyond its limit the value is, upwards or downwards; infinite where either is 0."""
        if not (math.isfinite(self.value) and math.isfinite(self.limit)):
            return math.inf
        value, limit = abs(self.value), abs(self.limit)
        return math.inf if 0 in (value, limit) else max(value / limit, limit / value)

    def __str__(self) -> str:
        return f"{self.severity}: {self.link}. {self.evidence} {self.cause} Next: {self.check} Mend: {self.mend}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The findings on a model, and what they were made from.

    Attributes:
        subject: what was diagnosed.
        findings: serious ones first, within a severity those farthest beyond their limit.
        measures: by name, of heads `[L, N]` or of layers `[L]`; NaN is not known.
        skipped: what could not be looked at, and why.

    >>> import numpy as np
    >>> from attn_jax.diagnostics import Captures, diagnose
    >>> rng = np.random.default_rng(0)
    >>> arrays = {f"layers.0.{name}": rng.standard_normal((16, 2, 32)) for name in ("query", "key", "value")}
    >>> arrays["layers.0.query"] *= 1000  # logits in the thousands
    >>> diagnosis = diagnose(Captures.of(arrays))
    >>> diagnosis.ok, [finding.signal for finding in diagnosis.alarms]
    (False, ['sharp_entropy', 'max_logit'])
    """

    subject: str
    findings: tuple[Finding, ...]
    measures: Mapping[str, np.ndarray]
    skipped: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        ranked = sorted(self.findings, key=lambda finding: (-SEVERITIES.index(finding.severity), -finding.excess))
        object.__setattr__(self, "findings", tuple(ranked))

    @property
    def ok(self) -> bool:
        """Whether there is no alarm."""
        return not self.alarms

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """The findings that are serious."""
        return tuple(finding for finding in self.findings if finding.severity == "serious")

    def as_dict(self) -> dict[str, Any]:
        """For JSON: None where a number is not finite."""
        return {
            "subject": self.subject,
            "ok": self.ok,
            "findings": [_plain(dataclasses.asdict(finding)) for finding in self.findings],
            "skipped": [list(one) for one in self.skipped],
            "measures": {name: _plain(np.asarray(values).tolist()) for name, values in self.measures.items()},
        }

    def __str__(self) -> str:
        counts = [f"{sum(x.severity == level for x in self.findings)} {level}" for level in reversed(SEVERITIES)]
        lines = [f"{self.subject}: {', '.join(counts)}", *(f"  {finding}" for finding in self.findings)]
        skipped = "; ".join(f"{signal} ({why})" for signal, why in self.skipped)
        return "\n".join(lines + ([f"  not looked at: {skipped}"] if skipped else []))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""What an audit says: whether each check passed, and of what is wrong the link, the numbers and what to try."""

import dataclasses
from typing import Any, Literal

from attn_jax.diagnostics.diagnosis.findings import LINKS

Kind = Literal["fault", "difference"]
Result = Literal["passed", "failed", "not applicable"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is not as expected.

    Attributes:
        kind: "fault", or "difference" where conventions legitimately differ.
        link: of `LINKS`, the one that is broken.
        check: the name of the check that found it.
        evidence: what was seen, in numbers.
        advice: the next thing to try.

    >>> from attn_jax import audit
    >>> def mean_value(query, key, value):  # reads neither query nor key
    ...     return value.mean(axis=1, keepdims=True).repeat(query.shape[1], axis=1)
    >>> finding = audit.audit_attention(mean_value).findings[0]
    >>> finding.kind, finding.link, finding.evidence
    ('fault', 'projections', 'The output does not change with the query.')
    """

    kind: Kind
    link: str
    check: str
    evidence: str
    advice: str

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise ValueError(f"link must be one of {', '.join(LINKS)}, got {self.link!r}")

    def __str__(self) -> str:
        return f"{self.kind}: {self.link} ({self.check}). {self.evidence} {self.advice}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a check went; `note` says why one was not applicable.

    >>> from attn_jax import audit
    >>> def mean_value(query, key, value):  # reads neither query nor key
    ...     return value.mean(axis=1, keepdims=True).repeat(query.shape[1], axis=1)
    >>> outcomes = {outcome.check: outcome for outcome in audit.audit_attention(mean_value).outcomes}
    >>> outcomes["runs"].result, outcomes["inputs are read"].result, outcomes["under jit"].note
    ('passed', 'failed', 'inputs are read failed')
    """

    check: str
    result: Result
    note: str = ""


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    Attributes:
        target: what was audited.
        outcomes: one a check, in the order in which they ran.
        findings: faults first, those that explain others before these.
        unmapped: parameters of the function that stand for none of our options, and so kept their defaults.

    >>> from attn_jax import audit
    >>> def mean_value(query, key, value):  # reads neither query nor key
    ...     return value.mean(axis=1, keepdims=True).repeat(query.shape[1], axis=1)
    >>> report = audit.audit_attention(mean_value)
    >>> report.ok, [finding.check for finding in report.faults], len(report.differences)
    (False, ['inputs are read'], 0)
    """

    target: str
    outcomes: tuple[Outcome, ...]
    findings: tuple[Finding, ...]
    unmapped: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no fault; differences are none."""
        return not self.faults

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are faults."""
        return tuple(finding for finding in self.findings if finding.kind == "fault")

    @property
    def differences(self) -> tuple[Finding, ...]:
        """The findings that are differences."""
        return tuple(finding for finding in self.findings if finding.kind == "difference")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        passed = sum(x.result == "passed" for x in self.outcomes)
        unrun: dict[str, list[str]] = {}  # by reason
        for outcome in self.outcomes:
            if outcome.result == "not applicable":
                unrun.setdefault(outcome.note, []).append(outcome.check)
        lines = [
            f"{self.target}: {_count(len(self.faults), 'fault')}, {_count(len(self.differences), 'difference')}; "
            f"{passed} of {len(self.outcomes)} checks passed, {sum(map(len, unrun.values()))} not run"
        ]
        lines += [f"  {finding}" for finding in self.findings]
        if self.unmapped:
            lines.append(
                f"  not audited, {', '.join(self.unmapped)}: left at the default; one that is an option of jax.nn by "
                "another name is said by arguments="
            )
        single = [f"{checks[0]} ({reason})" for reason, checks in unrun.items() if len(checks) == 1]
        lines += [f"  not run, {reason}: {', '.join(checks)}" for reason, checks in unrun.items() if len(checks) > 1]
        return "\n".join(lines + ([f"  not run: {'; '.join(single)}"] if single else []))


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"

"""The battery: all checks in their order, what each stands on, and the report that comes of it."""

from collections.abc import Callable, Mapping
from typing import Any

from attn_jax.audit import numerics, options, structure, weights
from attn_jax.audit.context import Audit, Expectation, NotApplicable, Registered
from attn_jax.audit.report import AuditReport, Finding, Outcome
from attn_jax.audit.subject import Refused, Subject, WrongOutput

BATTERY: tuple[Registered, ...] = (*structure.CHECKS, *weights.CHECKS, *options.CHECKS, *numerics.CHECKS)
_UNSEEN = Expectation()


def audit_attention(
    fn: Callable[..., Any], *, expect: Expectation = _UNSEEN, arguments: Mapping[str, Any] | None = None
) -> AuditReport:
    """Audits an attention function: which link of the chain is broken, if any.

    The function is called on small arrays, as `fn(query, key, value, **options)`, and judged by what its outputs
    depend on and by what attention must satisfy; its source is not read.

    Args:
        fn: takes query `[B, T, N, H]`, key `[B, S, K, H]` and value `[B, S, K, V]`, JAX or NumPy arrays, and returns
            the output `[B, T, N, V]`, perhaps the first of several.
        expect: what its author meant, where that is not standard attention: softmax(q·k / √H) v, without mask.
        arguments: our options by its own names, `{"mask": "attn_mask"}`, or with a conversion of the value,
            `{"mask": ("key_padding_mask", numpy.logical_not)}`; None leaves one alone. The others are read off its
            signature.

    Returns:
        An `AuditReport`: `.ok`, `.findings`, `.outcomes`; `print` shows it.

    Raises:
        ValueError, TypeError: on arguments of the audit itself.

    >>> from attn_jax import audit, dot_product_attention
    >>> def unscaled(query, key, value):
    ...     return dot_product_attention(query, key, value, scale=1.0)
    >>> [finding.link for finding in audit.audit_attention(unscaled).faults]
    ['scale']
    """
    if not isinstance(expect, Expectation):
        raise TypeError(f"expect must be an Expectation, got {type(expect).__name__}")
    return run(Audit(Subject(fn, arguments), expect, expect.factor), BATTERY)


def assert_attention_ok(
    fn: Callable[..., Any], *, expect: Expectation = _UNSEEN, arguments: Mapping[str, Any] | None = None
) -> None:
    """For test suites: raises if `audit_attention` finds a fault.

    Args:
        fn, expect, arguments: as for `audit_attention`.

    Raises:
        AssertionError: on a fault; its message is the report.
        ValueError, TypeError: on arguments of the audit itself.

    >>> from attn_jax import audit
    >>> def mean_value(query, key, value):  # reads neither query nor key
    ...     return value.mean(axis=1, keepdims=True).repeat(query.shape[1], axis=1)
    >>> try:
    ...     audit.assert_attention_ok(mean_value)
    ... except AssertionError as error:
    ...     print(str(error).partition(";")[0])
    mean_value: 1 fault, no differences
    """
    report = audit_attention(fn, expect=expect, arguments=arguments)
    if not report.ok:
        raise AssertionError(str(report))


def run(audit: Audit, battery: tuple[Registered, ...]) -> AuditReport:
    """Runs the checks; one that another fault explains is not run."""
    outcomes: list[Outcome] = []
    findings: list[Finding] = []
    broken: dict[str, str] = {}  # by what failed
    for one in battery:
        cause = next((broken[name] for name in one.after if name in broken), None)
        if cause is not None:
            broken[one.name] = cause
            outcomes.append(Outcome(one.name, "not applicable", f"{cause} failed"))
            continue
        if one.needs_answers and not audit.explained:
            outcomes.append(Outcome(one.name, "not applicable", "its weights are not explained"))
            continue
        try:
            found = list(one.run(audit, one))
        except NotApplicable as error:
            outcomes.append(Outcome(one.name, "not applicable", str(error)))
            continue
        except (Refused, WrongOutput) as error:
            found = [one.fault(f"In this check {error}.", "Call it so by hand.")]
        findings += found
        faulty = any(finding.kind == "fault" for finding in found)
        if faulty and not (one is weights.scale and audit.explained):  # answers then have the scale that was found
            broken[one.name] = one.name
        outcomes.append(Outcome(one.name, "failed" if found else "passed"))
    ordered = sorted(findings, key=lambda finding: finding.kind == "difference")
    return AuditReport(audit.subject.name, tuple(outcomes), tuple(ordered), audit.subject.unmapped)

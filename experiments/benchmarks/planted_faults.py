"""How often do the audit and the diagnosis name the broken link, and do they cry wolf?

Command: python -m experiments.benchmarks.planted_faults
         python -m experiments.benchmarks.planted_faults --subjects=models --only=heads
Time: functions 2 min, models 12 min on two cores.

Attention functions with one planted fault each, those written with the audit and those written after it, and healthy
functions: ours, `jax.nn`, textbook forms. A fault counts as named if the first fault of the report is at its link. What
the held-out ones gave when they were first measured stands beside what they give now: since then the audit has been
changed for some of them, so that only new ones can be held out again.

Models with one planted fault each, in an attention function, parameters, a block, a call, or in captured arrays, and
healthy models: fresh and trained small ones, stock Flax, captures, and the checkpoints that are installed. A fault
counts as named if the first finding that is more than information is at its link; an alarm is a serious finding.
"""

import dataclasses
from collections.abc import Mapping

from absl import app, flags

from attn_jax.audit import audit_attention
from attn_jax.diagnostics import Diagnosis, diagnose
from experiments.benchmarks.planted.functions import FAULTS, HEALTHY, Planted
from experiments.benchmarks.planted.held_out import FIRST_MEASURED, HELD_OUT
from experiments.benchmarks.planted.models import FAULTS as MODELS
from experiments.benchmarks.planted.models import HEALTHY as HEALTHY_MODELS
from experiments.benchmarks.planted.models import PlantedModel, checkpoints
from experiments.command_line import say
from experiments.progress import Table, show

_SUBJECTS = flags.DEFINE_multi_enum("subjects", ["functions", "models"], ["functions", "models"], "what is measured")
_ONLY = flags.DEFINE_string("only", "", "a part of the names of those that are measured; all by default")


@dataclasses.dataclass(frozen=True)
class Score:
    """How a set of planted faults fares.

    Attributes:
        named: those whose link came first.
        told: by name, the links of the others' faults.
    """

    named: tuple[str, ...]
    told: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        total = len(self.named) + len(self.told)
        return f"{len(self.named)} of {total}, {len(self.named) / max(total, 1):.0%}"


def measure(planted: Mapping[str, Planted]) -> Score:
    """Audits every function of a set."""
    links = {}
    for name, one in planted.items():
        report = audit_attention(one.function, expect=one.expect)
        links[name] = tuple(finding.link for finding in report.faults)
    named = tuple(name for name, found in links.items() if found[:1] == (planted[name].link,))
    return Score(named, {name: found for name, found in links.items() if name not in named})


def measure_models(planted: Mapping[str, PlantedModel]) -> Score:
    """Diagnoses every model of a set, one after another."""
    told, named = {}, []
    for name, one in planted.items():
        links = tuple(found.link for found in look(one).findings if found.severity != "information")
        if links and links[0] in one.links:
            named.append(name)
        else:
            told[name] = links
    return Score(tuple(named), told)


def look(one: PlantedModel) -> Diagnosis:
    """The diagnosis of a planted model."""
    return diagnose(one.build(), one.token_ids, one.lengths, **one.options)


def main(argv: list[str]) -> None:
    del argv
    if "functions" in _SUBJECTS.value:
        _functions()
    if "models" in _SUBJECTS.value:
        _models()


def _models() -> None:
    """Of models."""
    planted = {name: one for name, one in MODELS.items() if _ONLY.value in name}
    score = measure_models(planted)
    show(
        Table("Faults of models named at their link", ("models", "now"), (("written with the diagnosis", str(score)),))
    )
    if score.told:
        missed = score.told.items()
        rows = tuple((name, ", ".join(planted[name].links), ", ".join(links) or "none") for name, links in missed)
        show(Table("Missed", ("model", "link", "links told"), rows))
    healthy = {name: one for name, one in {**HEALTHY_MODELS, **checkpoints()}.items() if _ONLY.value in name}
    alarms = [(name, alarm.link, alarm.evidence) for name, one in healthy.items() for alarm in look(one).alarms]
    say(f"alarms on {len(healthy)} healthy models: {len(alarms)}")
    if alarms:
        show(Table("False alarms", ("model", "link", "evidence"), tuple(alarms)))


def _functions() -> None:
    """Of attention functions."""
    sets = {"written with the audit": FAULTS, "held out": HELD_OUT}
    rows, missed = [], []
    for what, planted in sets.items():
        score = measure({name: one for name, one in planted.items() if _ONLY.value in name})
        first = FIRST_MEASURED if what == "held out" else "–"
        rows.append((what, str(score), first))
        missed += [(what, name, planted[name].link, ", ".join(found) or "none") for name, found in score.told.items()]
    alarms = []
    healthy = {name: one for name, one in HEALTHY.items() if _ONLY.value in name}
    for name, (function, expect) in healthy.items():
        alarms += [
            (name, finding.link, finding.evidence) for finding in audit_attention(function, expect=expect).faults
        ]
    show(Table("Faults named at their link", ("functions", "now", "when first measured"), tuple(rows)))
    if missed:
        show(Table("Missed", ("functions", "fault", "link", "links told"), tuple(missed)))
    say(f"faults told of {len(healthy)} healthy functions: {len(alarms)}")
    if alarms:
        show(Table("False alarms", ("function", "link", "evidence"), tuple(alarms)))


if __name__ == "__main__":
    app.run(main)

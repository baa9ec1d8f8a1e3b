"""How often do the audit and the diagnosis name the broken link, and do they cry wolf?

Command: python -m experiments.benchmarks.planted_faults
         python -m experiments.benchmarks.planted_faults --subjects=models --only=heads
Time: functions 3 min, models 15 min on two cores.

Attention functions with one planted fault each, those written with the audit, those written after it, and those of
somebody who had not seen the checks; and healthy functions: ours, `jax.nn`, textbook forms, unusual ones. A fault
counts as named if the first fault of the report is at its link. What the held-out and the unseen ones gave when they
were first measured stands beside what they give now: since then the checks have been changed for some of them, so that
only new ones can be held out again.

Models with one planted fault each, in an attention function, parameters, a block, a call, or in captured arrays, and
healthy models: fresh and trained small ones, stock Flax, captures, and the checkpoints that are installed. A fault
counts as named if the first finding that is more than information is at its link; an alarm is a serious finding.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from absl import app, flags

from attn_jax.audit import audit_attention
from attn_jax.diagnostics import Diagnosis, diagnose
from experiments.benchmarks.planted.functions import FAULTS, HEALTHY, Planted
from experiments.benchmarks.planted.held_out import FIRST_MEASURED, HELD_OUT
from experiments.benchmarks.planted.models import FAULTS as MODELS
from experiments.benchmarks.planted.models import HEALTHY as HEALTHY_MODELS
from experiments.benchmarks.planted.models import PlantedModel, checkpoints
from experiments.benchmarks.planted.unseen import FIRST_MEASURED as UNSEEN_FIRST
from experiments.benchmarks.planted.unseen import UNSEEN, UNSEEN_HEALTHY
from experiments.benchmarks.planted.unseen_models import FIRST_MEASURED as UNSEEN_MODELS_FIRST
from experiments.benchmarks.planted.unseen_models import UNSEEN_HEALTHY_MODELS, UNSEEN_MODELS
from experiments.command_line import say
from experiments.progress import Table, show

P = TypeVar("P")

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
    sets = {"written with the diagnosis": MODELS, "unseen": UNSEEN_MODELS}
    scores = {what: measure_models(_asked(planted)) for what, planted in sets.items()}
    told = {name: one.links for planted in sets.values() for name, one in planted.items()}
    _show("models", scores, {"unseen": UNSEEN_MODELS_FIRST}, {name: ", ".join(links) for name, links in told.items()})
    healthy = _asked({**HEALTHY_MODELS, **UNSEEN_HEALTHY_MODELS, **checkpoints()})
    alarms = [(name, alarm.link, alarm.evidence) for name, one in healthy.items() for alarm in look(one).alarms]
    _show_alarms(f"alarms on {len(healthy)} healthy models", alarms)


def _functions() -> None:
    """Of attention functions."""
    sets = {"written with the audit": FAULTS, "held out": HELD_OUT, "unseen": UNSEEN}
    scores = {what: measure(_asked(planted)) for what, planted in sets.items()}
    first = {"held out": FIRST_MEASURED, "unseen": UNSEEN_FIRST}
    _show("functions", scores, first, {name: one.link for planted in sets.values() for name, one in planted.items()})
    healthy = _asked({**HEALTHY, **UNSEEN_HEALTHY})
    alarms = [
        (name, fault.link, fault.evidence)
        for name, (function, expect) in healthy.items()
        for fault in audit_attention(function, expect=expect).faults
    ]
    _show_alarms(f"faults told of {len(healthy)} healthy functions", alarms)


def _asked(planted: Mapping[str, P]) -> dict[str, P]:
    """Those that are measured."""
    return {name: one for name, one in planted.items() if _ONLY.value in name}


def _show(subjects: str, scores: Mapping[str, Score], first: Mapping[str, str], links: Mapping[str, str]) -> None:
    rows = tuple((what, str(score), first.get(what, "–")) for what, score in scores.items())
    show(Table("Faults named at their link", (subjects, "now", "when first measured"), rows))
    missed = tuple(
        (what, name, links[name], ", ".join(found) or "none")
        for what, score in scores.items()
        for name, found in score.told.items()
    )
    if missed:
        show(Table("Missed", (subjects, "fault", "link", "links told"), missed))


def _show_alarms(what: str, alarms: Sequence[tuple[str, str, str]]) -> None:
    say(f"{what}: {len(alarms)}")
    if alarms:
        show(Table("False alarms", ("subject", "link", "evidence"), tuple(alarms)))


if __name__ == "__main__":
    app.run(main)

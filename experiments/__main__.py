"""Lists the experiments: `python -m experiments`."""

import sys
from collections.abc import Sequence

from experiments import command_line, registry
from experiments.command_line import CommandError
from experiments.progress import Table, show


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; its status."""
    return command_line.run(_main, argv)


def _main(argv: Sequence[str]) -> int:
    for argument in argv[1:]:
        if argument not in ("-h", "--help"):
            raise CommandError(f"unexpected argument {argument!r}; one experiment: python -m experiments.NAME --help")
    rows = tuple((e.name, e.question, e.claims, e.time) for e in registry.entries())
    show(Table("Experiments: python -m experiments.NAME --help", ("name", "question", "claims", "time"), rows))
    command_line.say("All of them, and the report: python -m experiments.reproduce --preset=quick")
    command_line.say("One model, with a choice for every link: python -m experiments.train --preset=smoke")
    command_line.say("The heads of a model, to look around: python -m experiments.model_report --model=smollm2")
    command_line.say("What a checkpoint is made of: python -m experiments.inspect_checkpoint --path=smollm2")
    command_line.say("How fast, and against whom: python -m experiments.benchmarks.attention --preset=quick")
    command_line.say("A whole step of training: python -m experiments.benchmarks.training --preset=quick")
    command_line.say("One device and many: python -m experiments.benchmarks.parallel --preset=quick")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Lists the experiments: `python -m experiments`."""

from experiments import registry
from experiments.progress import Table, show


def main() -> None:
    rows = tuple((e.name, e.question, e.claims, e.time) for e in registry.entries())
    show(Table("Experiments: python -m experiments.NAME --help", ("name", "question", "claims", "time"), rows))
    print("All of them, and the report: python -m experiments.reproduce --preset=quick")


if __name__ == "__main__":
    main()

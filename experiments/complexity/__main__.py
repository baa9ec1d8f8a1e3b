"""The command `python -m experiments.complexity`."""

from experiments import harness
from experiments.complexity import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

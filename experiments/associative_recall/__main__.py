"""The command `python -m experiments.associative_recall`."""

from experiments import harness
from experiments.associative_recall import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

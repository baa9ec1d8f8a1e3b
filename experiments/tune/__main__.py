"""The command `python -m experiments.tune`."""

from experiments import harness
from experiments.tune import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

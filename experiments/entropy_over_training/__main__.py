"""The command `python -m experiments.entropy_over_training`."""

from experiments import harness
from experiments.entropy_over_training import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

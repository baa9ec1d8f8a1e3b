"""The command `python -m experiments.entropy_and_importance`."""

from experiments import harness
from experiments.entropy_and_importance import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

"""The command `python -m experiments.linear_stability`."""

from experiments import harness
from experiments.linear_stability import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

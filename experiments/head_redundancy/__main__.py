"""The command `python -m experiments.head_redundancy`."""

from experiments import harness
from experiments.head_redundancy import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

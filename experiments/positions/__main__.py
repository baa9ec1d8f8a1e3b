"""The command `python -m experiments.positions`."""

from experiments import harness
from experiments.positions import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

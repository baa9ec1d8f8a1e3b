"""The command `python -m experiments.heads`."""

from experiments import harness
from experiments.heads import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

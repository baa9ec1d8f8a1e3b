"""The command `python -m experiments.low_rank`."""

from experiments import harness
from experiments.low_rank import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

"""The command `python -m experiments.sparse_patterns`."""

from experiments import harness
from experiments.sparse_patterns import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

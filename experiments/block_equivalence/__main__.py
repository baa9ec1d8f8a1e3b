"""The command `python -m experiments.block_equivalence`."""

from experiments import harness
from experiments.block_equivalence import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

"""The command `python -m experiments.rank_collapse`."""

from experiments import harness
from experiments.rank_collapse import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

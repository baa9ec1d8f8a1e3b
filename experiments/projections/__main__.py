"""The command `python -m experiments.projections`."""

from experiments import harness
from experiments.projections import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

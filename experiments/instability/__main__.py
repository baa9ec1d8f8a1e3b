"""The command `python -m experiments.instability`."""

from experiments import harness
from experiments.instability import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

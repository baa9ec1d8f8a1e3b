"""The command `python -m experiments.inductive_bias`."""

from experiments import harness
from experiments.inductive_bias import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

"""The command `python -m experiments.scale_rules`."""

from experiments import harness
from experiments.scale_rules import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

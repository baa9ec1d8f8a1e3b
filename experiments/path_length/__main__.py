"""The command `python -m experiments.path_length`."""

from experiments import harness
from experiments.path_length import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

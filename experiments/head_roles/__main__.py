"""The command `python -m experiments.head_roles`."""

from experiments import harness
from experiments.head_roles import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

"""The command `python -m experiments.diagnose`."""

from experiments import harness
from experiments.diagnose import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

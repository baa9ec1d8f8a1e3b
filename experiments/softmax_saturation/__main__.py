"""The command `python -m experiments.softmax_saturation`."""

from experiments import harness
from experiments.softmax_saturation import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

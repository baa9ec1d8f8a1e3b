"""The command `python -m experiments.attention_explanation`."""

from experiments import harness
from experiments.attention_explanation import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

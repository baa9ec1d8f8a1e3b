"""The command `python -m experiments.kv_cache`."""

from experiments import harness
from experiments.kv_cache import EXPERIMENT

if __name__ == "__main__":
    harness.main(EXPERIMENT)

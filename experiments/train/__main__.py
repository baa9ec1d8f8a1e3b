"""The command `python -m experiments.train`."""

from experiments.train import main

if __name__ == "__main__":
    main()

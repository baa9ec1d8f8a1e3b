"""The command `python -m experiments.model_report`."""

from experiments.model_report import main

if __name__ == "__main__":
    main()

"""Experiments: one script, one question about attention, a verdict by a rule written before measuring.

`python -m experiments` lists them; `python -m experiments.reproduce --preset=quick` runs them and builds the report.
"""

import os

# Batched factorisations already run in XLA's threads; BLAS threads on top made them 25 times slower on two cores.
# Before NumPy or JAX load their BLAS.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

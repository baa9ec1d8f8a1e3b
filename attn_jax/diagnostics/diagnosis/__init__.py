"""Diagnosis: from the statistics, weights and calls of a model to findings, each with a link, numbers and a mend.

findings      what is said
words         cause, next check and mend of each signal
limits        the lines between ordinary and not, and their file
rows          measures of some rows, which a training step can afford
measures      measures of every layer, an `observe` function
signals       what is held against limits, in training and here
rules         from measures to findings
mistakes      what a wrong attention function would give
explanation   which of them gave this output
blocks        a transformer block by block, against its parameters
weights       what parameters show
behaviour     what calls show
gradients     whether derivatives are derivatives
captures      arrays of other frameworks
diagnose      all of it
"""

from attn_jax.diagnostics.diagnosis.captures import Captures, read_captures
from attn_jax.diagnostics.diagnosis.diagnose import diagnose
from attn_jax.diagnostics.diagnosis.findings import Diagnosis, Finding
from attn_jax.diagnostics.diagnosis.limits import Limits, LimitsError
from attn_jax.diagnostics.diagnosis.measures import measure_layer

__all__ = ["Captures", "Diagnosis", "Finding", "Limits", "LimitsError", "diagnose", "measure_layer", "read_captures"]

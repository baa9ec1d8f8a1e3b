"""How the heads route while a model is trained: measured in the step, held against limits, told when it changes.

monitor     when, of which rows, and how a step does it
findings    what appears and goes, from one measurement to the next; limits from a healthy run

What is measured in a layer, the signals and their limits are those of `attn_jax.diagnostics.diagnosis`: a model that is
diagnosed and one that is trained are held against the same lines.
"""

from attn_jax.diagnostics.diagnosis.limits import Limits, LimitsError
from attn_jax.diagnostics.diagnosis.rows import ALL, DEFAULT
from attn_jax.training.monitor.findings import Finding, Watch, calibrate, explain, find
from attn_jax.training.monitor.monitor import AttentionMonitor

__all__ = [
    "ALL",
    "DEFAULT",
    "AttentionMonitor",
    "Finding",
    "Limits",
    "LimitsError",
    "Watch",
    "calibrate",
    "explain",
    "find",
]

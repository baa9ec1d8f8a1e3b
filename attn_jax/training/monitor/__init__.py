"""How the heads route while a model is trained: measured in the step, held against limits, told when it changes.

measures    what is measured in a layer
monitor     when, of which rows, and how a step does it
limits      the lines between ordinary and not, and their file
rules       the signals that are held against them
findings    what appears and goes, from one measurement to the next; limits from a healthy run
"""

from attn_jax.training.monitor.findings import Finding, Watch, calibrate, explain, find
from attn_jax.training.monitor.limits import Limits, LimitsError
from attn_jax.training.monitor.measures import ALL, DEFAULT
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

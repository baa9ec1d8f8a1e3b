"""Measurements of attention: arrays in, numbers out."""

from attn_jax.diagnostics.approximation import Approximation, Candidate, approximation_report
from attn_jax.diagnostics.attention_spectra import AttentionSpectrum, attention_spectrum
from attn_jax.diagnostics.costs import Work
from attn_jax.diagnostics.entropy import (
    entropy,
    entropy_from_logits,
    entropy_lower_bound,
    entropy_without,
    normalized_entropy,
    participation,
)
from attn_jax.diagnostics.heads import HeadSummary, summarize_heads
from attn_jax.diagnostics.jacobian import softmax_jacobian_norm, softmax_jacobian_trace
from attn_jax.diagnostics.patterns import (
    diagonal_mass,
    distance_ratio,
    mean_distance,
    previous_token_mass,
    sink_mass,
)
from attn_jax.diagnostics.ranks import effective_rank, numerical_rank, rank_one_residual, stable_rank
from attn_jax.diagnostics.scale import NamedScale, effective_scale, name_scale
from attn_jax.diagnostics.similarity import head_similarity
from attn_jax.diagnostics.spectra import Ranks, logit_ranks, logit_spectrum
from attn_jax.diagnostics.statistics import (
    ALL,
    DEFAULT,
    AttentionStatistics,
    attention_statistics,
    attention_with_statistics,
    sample_rows,
)
from attn_jax.diagnostics.symmetry import matrix_symmetry, score_asymmetry, weight_symmetry

__all__ = [
    "ALL",
    "DEFAULT",
    "Approximation",
    "AttentionSpectrum",
    "AttentionStatistics",
    "Candidate",
    "HeadSummary",
    "NamedScale",
    "Ranks",
    "Work",
    "approximation_report",
    "attention_spectrum",
    "attention_statistics",
    "attention_with_statistics",
    "diagonal_mass",
    "distance_ratio",
    "effective_rank",
    "effective_scale",
    "entropy",
    "entropy_from_logits",
    "entropy_lower_bound",
    "entropy_without",
    "head_similarity",
    "logit_ranks",
    "logit_spectrum",
    "matrix_symmetry",
    "mean_distance",
    "name_scale",
    "normalized_entropy",
    "numerical_rank",
    "participation",
    "previous_token_mass",
    "rank_one_residual",
    "sample_rows",
    "score_asymmetry",
    "sink_mass",
    "softmax_jacobian_norm",
    "softmax_jacobian_trace",
    "stable_rank",
    "summarize_heads",
    "weight_symmetry",
]

"""Measurements of attention: arrays in, numbers out."""

from attn_jax.diagnostics.adversarial import (
    Adversarial,
    adversarial_attention,
    permute_weights,
    permuted_attention,
    total_variation,
)
from attn_jax.diagnostics.approximation import Approximation, Candidate, approximation_report
from attn_jax.diagnostics.attention_spectra import AttentionSpectrum, attention_spectrum
from attn_jax.diagnostics.attribution import (
    Integrated,
    RankAgreement,
    gradient_attribution,
    integrated_gradients,
    rank_agreement,
)
from attn_jax.diagnostics.clusters import head_clusters
from attn_jax.diagnostics.costs import Work
from attn_jax.diagnostics.diagnosis import (
    Captures,
    Diagnosis,
    Limits,
    LimitsError,
    diagnose,
    measure_layer,
    read_captures,
)
from attn_jax.diagnostics.entropy import (
    entropy,
    entropy_from_logits,
    entropy_lower_bound,
    entropy_without,
    normalized_entropy,
    participation,
)
from attn_jax.diagnostics.heads import HeadSummary, summarize_heads
from attn_jax.diagnostics.importance import gate_gradients, head_importance
from attn_jax.diagnostics.jacobian import softmax_jacobian_norm, softmax_jacobian_trace
from attn_jax.diagnostics.patterns import (
    diagonal_mass,
    distance_ratio,
    mean_distance,
    previous_token_mass,
    sink_mass,
)
from attn_jax.diagnostics.probes import Probe, linear_probe
from attn_jax.diagnostics.ranks import effective_rank, numerical_rank, rank_one_residual, stable_rank
from attn_jax.diagnostics.rollout import attention_rollout, uniform_rollout
from attn_jax.diagnostics.scale import NamedScale, effective_scale, name_scale
from attn_jax.diagnostics.similarity import head_similarity, linear_cka
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
    "Adversarial",
    "Approximation",
    "AttentionSpectrum",
    "AttentionStatistics",
    "Candidate",
    "Captures",
    "Diagnosis",
    "HeadSummary",
    "Integrated",
    "Limits",
    "LimitsError",
    "NamedScale",
    "Probe",
    "RankAgreement",
    "Ranks",
    "Work",
    "adversarial_attention",
    "approximation_report",
    "attention_rollout",
    "attention_spectrum",
    "attention_statistics",
    "attention_with_statistics",
    "diagnose",
    "diagonal_mass",
    "distance_ratio",
    "effective_rank",
    "effective_scale",
    "entropy",
    "entropy_from_logits",
    "entropy_lower_bound",
    "entropy_without",
    "gate_gradients",
    "gradient_attribution",
    "head_clusters",
    "head_importance",
    "head_similarity",
    "integrated_gradients",
    "linear_cka",
    "linear_probe",
    "logit_ranks",
    "logit_spectrum",
    "matrix_symmetry",
    "mean_distance",
    "measure_layer",
    "name_scale",
    "normalized_entropy",
    "numerical_rank",
    "participation",
    "permute_weights",
    "permuted_attention",
    "previous_token_mass",
    "rank_agreement",
    "rank_one_residual",
    "read_captures",
    "sample_rows",
    "score_asymmetry",
    "sink_mass",
    "softmax_jacobian_norm",
    "softmax_jacobian_trace",
    "stable_rank",
    "summarize_heads",
    "total_variation",
    "uniform_rollout",
    "weight_symmetry",
]

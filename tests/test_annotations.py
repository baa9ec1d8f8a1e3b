"""The shapes in the signatures are true: public functions, called under a type checker that reads them."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
# In an interpreter of its own: the checker rewrites modules as they are imported, and would answer bad arguments before
# our own checks do.
SCRIPT = """
from jaxtyping import install_import_hook
# All but the loop and its squares, pytrees that JAX rebuilds with things in them that are no arrays.
exact = [f"attn_jax.exact.{name}" for name in ("arguments", "attention", "cache", "merge", "dense", "dropout", "online", "tiles", "kernels")]
linear = [f"attn_jax.linear.{name}" for name in ("attention", "retention", "state_space", "decays")]
others = (
    "audit", "biases", "checks", "diagnostics", "lowrank", "masks", "nn", "positions", "projections", "routed", "scaling",
    "training",
)
hook = install_import_hook([*exact, *linear, *(f"attn_jax.{name}" for name in others)], "beartype.beartype")

import jax, jax.numpy as jnp, numpy as np
import attn_jax
from attn_jax import biases, diagnostics, masks, positions, projections, scaling
from attn_jax.nn import MultiHeadAttention, Transformer, TransformerConfig, interventions
from flax import nnx

rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
called = []

def call(function, *arguments, **options):
    # Signatures are read while a function is traced: nothing needs to be compiled. Gives the shapes of what it returns.
    called.append(getattr(function, "__name__", "module"))
    traced = jax.make_jaxpr(lambda *arguments: function(*arguments, **options))(*arguments)
    return [found.shape for found in traced.out_avals]

for batch in ((), (2, 3)):
    query, key, value = normal(*batch, 5, 4, 8), normal(*batch, 7, 2, 8), normal(*batch, 7, 2, 3)
    lengths = jnp.full(batch, 4)
    options = {
        "bias": biases.Alibi(4) + normal(5, 7),
        "mask": masks.Causal() & masks.Segments(jnp.zeros((*batch, 5), int), jnp.zeros(7, int)) | masks.GlobalTokens(1),
        "key_value_seq_lengths": lengths, "query_positions": jnp.arange(5) + 2, "sinks": normal(4),
    }
    call(attn_jax.dot_product_attention, query, key, value, **options, return_residual=True)
    call(attn_jax.dot_product_attention, query, key, value, dropout_rate=0.1, dropout_rng=jax.random.key(0))
    call(attn_jax.attention_weights, query, key, **options)
    weights = jnp.abs(normal(*batch, 4, 5, 7))
    call(diagnostics.attention_statistics, query, key, **options, statistics=diagnostics.ALL)
    call(diagnostics.attention_with_statistics, query, key, value, **options, rows=jnp.array([1, 3]))
    call(diagnostics.summarize_heads, query, key, is_causal=True)
    for measure in (diagnostics.logit_spectrum, diagnostics.logit_ranks):
        call(measure, query, key)
    call(diagnostics.effective_scale, query, key, value, normal(*batch, 5, 4, 3))
    for measure in (
        diagnostics.entropy, diagnostics.entropy_from_logits, diagnostics.entropy_without, diagnostics.effective_rank,
        diagnostics.softmax_jacobian_norm, diagnostics.softmax_jacobian_trace, diagnostics.numerical_rank,
        diagnostics.stable_rank, diagnostics.sink_mass, diagnostics.mean_distance, diagnostics.rank_one_residual,
    ):
        call(measure, weights)
    for measure in (diagnostics.distance_ratio, diagnostics.head_similarity):
        call(measure, weights, jnp.ones((5, 7), bool))
    square = jnp.abs(normal(*batch, 2, 7, 7))
    for measure in (diagnostics.diagonal_mass, diagnostics.previous_token_mass, diagnostics.score_asymmetry):
        call(measure, square)
    call(diagnostics.normalized_entropy, weights, visible_keys=jnp.full((5,), 7))
    call(diagnostics.linear_cka, normal(*batch, 5, 4), normal(*batch, 5, 3))
    call(diagnostics.attention_rollout, jnp.stack([square, square]))
    call(diagnostics.uniform_rollout, jnp.ones((*batch, 5, 5), bool), num_layers=2)
    call(diagnostics.total_variation, weights, weights)
    call(lambda weights: diagnostics.permute_weights(jax.random.key(0), weights, jnp.ones((5, 7), bool)), weights)
    call(diagnostics.participation, normal(*batch, 5) ** 2)
    call(diagnostics.entropy_lower_bound, normal(*batch, 5) ** 2, jnp.full((5,), 7))

    x = normal(*batch, 5, 16)
    call(projections.split_heads, x, num_heads=4)
    call(projections.merge_heads, query)
    call(projections.project_qkv, x, normal(16, 4, 8), normal(16, 2, 8), normal(16, 2, 3), normal(4, 8))
    call(projections.project_qkv, x, normal(16, 4, 8), None, normal(16, 4, 3), context=normal(*batch, 7, 16))
    call(projections.project_qkv_fused, x, normal(16, 4 * 8 + 2 * 8 + 2 * 3), num_heads=4, head_width=8, num_kv_heads=2, value_width=3)
    call(projections.project_out, normal(*batch, 5, 4, 3), normal(4, 3, 16), normal(16))
    call(positions.apply_rotary, query, jnp.arange(5), interleaved=True)
    call(positions.apply_rotary, query, jnp.zeros((*batch, 5), int), scaling=positions.YaRN(2.0, 16))
    call(positions.sinusoidal, jnp.arange(5), width=16)
    call(positions.learned, normal(9, 16), jnp.zeros((*batch, 5), int))
    call(scaling.temperature, query, normal(4))
    call(scaling.rms_norm, query, normal(8))
    call(scaling.rms_norm, query, normal(32))
    call(scaling.l2_norm, query)
    call(scaling.soft_cap, weights, cap=3.0)

call(attn_jax.dot_product_attention, query, key, value, **options, implementation="blockwise", return_residual=True)
call(
    diagnostics.attention_with_statistics, query, key, value, **options,
    statistics=diagnostics.ALL, implementation="blockwise",
)
call(jax.grad(lambda *arrays: attn_jax.dot_product_attention(
    *arrays, **options, implementation="blockwise").sum(), (0, 1, 2)), query, key, value)
call(diagnostics.attention_spectrum, query, key, k=2)
weights = jax.nn.softmax(normal(2, 3, 4))
for measure in (diagnostics.gradient_attribution, diagnostics.integrated_gradients):
    measure(lambda weights: jnp.sum(weights**2), weights)
predict = lambda weights: jnp.mean(weights, axis=(0, 1))
diagnostics.adversarial_attention(predict, weights, jax.random.key(0), epsilon=0.1, steps=2, starts=2)
diagnostics.permuted_attention(predict, weights, jax.random.key(0), permutations=2)
diagnostics.rank_agreement(rng.normal(size=(3, 5)), rng.normal(size=(3, 5)), np.ones((3, 5), bool), permutations=2)
diagnostics.head_importance(lambda gates, x: x * gates.sum(), jnp.ones((2, 3)), jnp.ones(4))
diagnostics.head_clusters(np.ones((3, 3)) - np.eye(3), threshold=0.1)
diagnostics.linear_probe(rng.normal(size=(10, 3)), np.arange(10) % 2, groups=np.arange(10) // 2)
ablation = interventions.Ablation(jnp.ones(4), jnp.ones((4, 3)))
interventions.ablate_heads(ablation, query, key, value, is_causal=True)
interventions.flatten_weights(jnp.ones(4), query, key, value, is_causal=True)
interventions.output_means(query, key, value, is_causal=True)

query, key, value = (normal(2, 3, 8, 4, 8) for _ in range(3))
lengths = jnp.full((2, 3), 5)
call(attn_jax.linear_attention, query, key, value, is_causal=True, return_state=True, key_value_seq_lengths=lengths)
features = attn_jax.linear.draw_features(jax.random.key(0), 8, 16)
call(attn_jax.linear_attention, query, key[:, :, :, :2], value[:, :, :, :2], feature_map=features)
call(attn_jax.retention, query, key, value, lengths=lengths)
call(attn_jax.state_space, query, key, value, -normal(2, 3, 8, 4) ** 2, return_state=True)
rotations = attn_jax.routed.draw_rotations(jax.random.key(0), 4, 8, num_buckets=4, num_rounds=2)
call(attn_jax.lsh_attention, query, value, rotations, window=4, key_value_seq_lengths=lengths)
centroids = attn_jax.routed.draw_centroids(jax.random.key(0), 4, 2, 8)
for learn in ("none", "straight_through", "auxiliary"):
    call(attn_jax.routing_attention, query, key, value, centroids, learn=learn, window=4)
call(attn_jax.routed.update_centroids, centroids, query, key)
call(attn_jax.linformer_attention, query, key, value, attn_jax.lowrank.draw_projection(jax.random.key(0), 3, 8))
call(attn_jax.nystrom_attention, query, key, value, landmarks=3, key_value_seq_lengths=lengths)
candidates = {"nystrom": lambda query, key, value: attn_jax.nystrom_attention(query, key, value, landmarks=3)}
diagnostics.approximation_report(query, key, value, candidates, top_k=2)

words = ("linear", "retention", "state_space", "lsh", "routing", "convolution", "gru", "window")
config = TransformerConfig(vocabulary_size=11, num_layers=8, model_width=16, num_heads=2, mixer=words)
model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
token_ids, lengths = jnp.zeros((2, 5), int), jnp.array([3, 5])
assert call(lambda model: model(token_ids, lengths), model)[0] == (2, 5, 11)
assert call(lambda model: model.extend(token_ids[:, :1], model.empty_cache(2, 4)), model)[0] == (2, 1, 11)

config = TransformerConfig(vocabulary_size=11, num_layers=2, model_width=16, num_heads=4, num_kv_heads=2)
model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
assert call(lambda model: model(token_ids, lengths, return_statistics=True), model)[0] == (2, 5, 11)
layer = MultiHeadAttention(16, 4, num_kv_heads=2, qk_norm="rms", positions="relative", use_sinks=True, rngs=nnx.Rngs(0))
assert call(layer, normal(2, 5, 16), normal(2, 7, 16)) == [(2, 5, 16)]
print(len(called))
"""


def test_signatures_under_a_type_checker():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert int(ran.stdout) > 80

"""The smoke run against what is known of heads without running anything, and the parts it is made of."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from attn_jax.diagnostics import head_similarity
from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training import OptimizerConfig, init_states, take_run, token_loss
from attn_jax.training.state import key_for
from attn_jax.training.tasks import Copy
from experiments import heads
from experiments.claims.heads import PATTERNS
from experiments.heads import EXPERIMENT
from experiments.heads import simulated as heads_simulated
from experiments.heads import trained as heads_trained
from experiments.heads.config import HeadsConfig
from experiments.heads.measured import Measured
from experiments.heads.results import _h3b, best_by_others

CONFIG = EXPERIMENT.preset("smoke")


@pytest.fixture(scope="module")
def result():
    return heads.run(CONFIG)


@pytest.fixture(scope="module")
def measured(result):
    return Measured(CONFIG, result.measurements)


def outcome(result, claim):
    (found,) = [x for x in result.claims if x.claim.id == claim]
    return found


def test_what_needs_no_training_is_settled(result):
    assert [x.claim.id for x in result.claims] == ["H1", "H3a", "H3b", "H4", "H6", "H7"]
    settled = {claim: outcome(result, claim).verdict for claim in ("H1", "H3a", "H7")}
    assert settled == dict.fromkeys(settled, "refined")
    assert {outcome(result, claim).verdict for claim in ("H3b", "H4", "H6")} == {"inconclusive"}  # two seeds


def test_the_cost_of_a_layer_is_what_its_shapes_say(measured):
    width, length, (one, many) = CONFIG.cost_width, CONFIG.cost_length, CONFIG.cost_heads
    np.testing.assert_array_equal(measured.cost("parameters"), [4 * width**2] * 2)
    # projections and output, then q·k and p·v, two FLOPs a multiply-add
    np.testing.assert_array_equal(measured.cost("products"), [8 * length * width**2 + 4 * length**2 * width] * 2)
    operations, memory = measured.cost("operations"), measured.cost("memory")
    assert operations[1] - operations[0] >= 3 * (many - one) * length**2  # subtract, sum, divide
    assert memory[1] - memory[0] >= 4 * (many - one) * length**2 * 0.9
    assert measured.seconds().shape == (CONFIG.rounds, 2)


def test_a_head_depends_on_all_of_x_through_few_directions(result):
    found = {name: estimate.value for name, estimate in outcome(result, "H7").evidence.items()}
    assert found["seen_share"] == 1
    assert found["sliced_share"] == pytest.approx(1 / 4)
    assert (found["query_rank"], found["joint_rank"]) == (8, 24)


def test_sparse_patterns_are_cheap_and_dense_ones_are_not(measured):
    left = {name: measured.fit("left", name, 32).mean(axis=0) for name in PATTERNS}
    for values in left.values():
        assert values[0] > values[1]
    assert left["permutation"][1] < 0.05
    assert left["flat"][1] > 0.5
    for name in ("permutation", "k_hot"):
        assert (measured.fit("by_hand", name, 32) < 0.01).all()


def test_untrained_heads_are_as_different_as_chance(measured):
    assert measured.difference(4, "before", "within").mean() == pytest.approx(1, abs=0.2)
    assert measured.difference(4, "before", "between").mean() == pytest.approx(1, abs=0.2)


def test_all_that_was_asked_for_is_measured_and_drawn(result):
    rows = result.measurements
    assert set(rows["unit"]) == set(result.seconds) == {unit.name for unit in EXPERIMENT.units(CONFIG)}
    trained = rows.query("part == 'trained' and measure == 'loss'")
    assert set(trained["arm"]) == set(heads_trained.names(CONFIG))
    assert len(trained["arm"].unique()) == 1 + 7
    assert (rows.query("part == 'patterns'").groupby(["when", "measure"]).size() > 0).all()
    assert len(result.figure().axes) == 6
    assert [len(table.rows) for table in result.tables] == [2, 4, 1, 8, 2]


def test_products_are_counted_as_they_stand():
    def program(x, y):
        return jax.jit(lambda x: x @ y)(x).sum() + jnp.einsum("bij,bij->b", x[None], x[None])[0]

    x, y = jnp.ones((3, 5)), jnp.ones((5, 7))
    assert heads_simulated.product_flops(program, x, y) == 2 * 3 * 5 * 7 + 2 * 3 * 5
    with pytest.raises(ValueError, match="no loop or branch, whose products cannot be counted; got scan"):
        heads_simulated.product_flops(lambda x: jax.lax.map(lambda row: row @ y, x), x)


def test_patterns_are_what_their_names_say():
    drawn = dict(
        zip(PATTERNS, np.asarray(heads_simulated.draw_patterns(jax.random.key(0), length=24, hot=3)), strict=True)
    )
    for pattern in drawn.values():
        np.testing.assert_allclose(pattern.sum(axis=-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(np.sort(drawn["permutation"], axis=0)[-1], np.ones(24))
    np.testing.assert_array_equal((drawn["k_hot"] > 0).sum(axis=-1), [3] * 24)
    # E Σp² of a symmetric Dirichlet: (α + 1) / (nα + 1)
    for name, alpha in (("sharp", 0.1), ("flat", 1.0)):
        assert (drawn[name] ** 2).sum(axis=-1).mean() == pytest.approx((alpha + 1) / (24 * alpha + 1), rel=0.3)


@pytest.mark.parametrize(("length", "hot"), [(40, 1), (40, 3)])
def test_sparse_patterns_by_hand_take_two_dimensions_a_key(length, hot):
    members = np.argsort(np.random.default_rng(0).random((length, length)), axis=-1)[:, :hot]
    target = np.zeros((length, length))
    np.put_along_axis(target, members, 1 / hot, axis=-1)
    logits = heads_simulated.logits_by_hand(members)
    assert np.linalg.matrix_rank(logits) == 2 * hot
    assert heads_simulated.left_of(target, logits) < 0.01


def test_what_is_left_is_a_share_of_uniform_rows():
    target = np.random.default_rng(0).dirichlet(np.ones(9), 9)
    assert heads_simulated.left_of(target, np.zeros((9, 9))) == pytest.approx(1)
    assert heads_simulated.left_of(target, np.log(target) + 3) == pytest.approx(0, abs=1e-12)
    wide = heads_simulated.fit_patterns(
        jnp.asarray(target[None], jnp.float32), jax.random.key_data(jax.random.key(0)), width=9, steps=500
    )
    assert wide[0][0] < 0.01


def test_shuffled_rows_keep_their_entropy_and_their_keys():
    logits = np.random.default_rng(0).normal(size=(2, 3, 6, 6))
    weights = np.tril(np.exp(logits)).astype(np.float32)
    shuffled = np.asarray(heads_trained.shuffle(jax.random.key(0), jnp.asarray(weights)))
    np.testing.assert_array_equal(np.sort(shuffled, axis=-1), np.sort(weights, axis=-1))
    np.testing.assert_array_equal(shuffled > 0, weights > 0)
    assert (shuffled[..., -1, :] != weights[..., -1, :]).any(axis=-1).all()
    places = np.stack([heads_trained.shuffle(jax.random.key(i), jnp.asarray(weights[0, 0])) for i in range(300)])
    np.testing.assert_allclose(places.mean(axis=0)[3, :4], weights[0, 0, 3].sum() / 4, rtol=0.15)


def test_heads_are_compared_within_and_between_models():
    random = np.random.default_rng(0)
    first, second = (np.tril(np.exp(random.normal(size=(6, 6)))) for _ in range(2))
    one, other = (
        jnp.broadcast_to(
            jnp.asarray(p / p.sum(-1, keepdims=True), jnp.float32), (2, 1, 3, 4, 6, 6)
        )  # [R, L, B, N, T, S]
        for p in (first, second)
    )
    found = heads_trained._compare(one, other, jax.random.key(0))
    np.testing.assert_array_equal(found["within", "divergence"], np.zeros((2, 1)))
    both = jnp.stack([one[0, 0, 0, 0], other[0, 0, 0, 0]])
    expected = head_similarity(both, np.tri(6, dtype=bool))[0, 1]
    np.testing.assert_allclose(found["between", "divergence"], np.full((2, 1), expected), rtol=1e-5)
    assert (found["within", "shuffled"] > 0.05).all()
    rows = np.asarray(both)[:, 1:]
    entropy = -np.where(rows > 0, rows * np.log(np.maximum(rows, 1e-30)), 0).sum(-1) / np.log(np.arange(2, 7))
    np.testing.assert_allclose(found["within", "entropy"], np.full((2, 1), entropy.mean()), rtol=1e-5)


SIZES = TransformerConfig(vocabulary_size=5, num_layers=2, model_width=8, num_heads=2, mlp_width=8)
BATCH = Copy(num_symbols=5, distance=1, length=6).batch(jax.random.key(0), 0, 4)
MAKE = functools.partial(heads_trained.ArrangedTransformer, SIZES)


@pytest.fixture(scope="module")
def begun():
    return init_states(MAKE, OptimizerConfig(), learning_rates=[1.0], seeds=[0, 1])


@jax.jit
def losses(state):
    """Loss and gradient of one run."""

    def loss(params):
        return heads_trained.arranged_loss(nnx.merge(state.graphdef, params), BATCH, key=None)[0]

    return jax.value_and_grad(loss)(state.params)


def arranged(begun, mixing, setting):
    return losses(take_run(heads_trained.rearrange(begun, mixing, setting, seed=0), 0))


@jax.jit
def plain(model, output, share):
    """The loss of the same transformer with W_O put in, and the MLP or not."""
    down = model.layers.mlp.down_weight
    model.layers.attention.output_weight[...], down[...] = output, share * down[...]
    return token_loss(model, BATCH, key=None)[0]


@pytest.mark.parametrize("setting", ["mlp", "alone"])
def test_an_arranged_transformer_is_the_one_with_that_output(begun, setting):
    model = take_run(begun, 0).model
    own = model.layers.attention.output_weight[...]
    blocks = jnp.stack([own[:, 0].at[:, :, 4:].set(0), own[:, 1].at[:, :, :4].set(0)], axis=1)
    identity = jnp.broadcast_to(jnp.eye(8).reshape(2, 4, 8), own.shape)
    for mixing, output in (("trained", own), ("identity", identity), ("blocks", blocks)):
        model = Transformer(SIZES, rngs=nnx.Rngs(params=key_for(jax.random.key(0), "parameters")))
        expected = plain(model, output, float(setting == "mlp"))
        np.testing.assert_allclose(arranged(begun, mixing, setting)[0], expected, rtol=1e-5)


def test_only_what_may_learn_has_a_gradient(begun):
    for mixing, learns in (("trained", 64), ("identity", 0), ("blocks", 32), ("orthogonal", 0)):
        _, gradient = arranged(begun, mixing, "mlp")
        assert ((gradient["layers"]["attention"]["output_weight"] != 0).sum(axis=(1, 2, 3)) == learns).all()
        for name in ("output_learned", "output_fixed", "mlp_share"):
            assert not np.any(gradient[name])
    assert not np.any(arranged(begun, "trained", "alone")[1]["layers"]["mlp"]["down_weight"])


def test_every_run_and_layer_has_an_orthogonal_output_of_its_own(begun):
    drawn = np.asarray(heads_trained.rearrange(begun, "orthogonal", "mlp", seed=0).params["output_fixed"])
    matrices = drawn.reshape(4, 8, 8)
    np.testing.assert_allclose(matrices @ matrices.swapaxes(1, 2), np.broadcast_to(np.eye(8), (4, 8, 8)), atol=1e-5)
    for i, one in enumerate(matrices):
        assert all(np.abs(one - other).max() > 0.1 for other in matrices[:i])


def test_arms_that_differ_in_their_output_share_one_program(begun):
    shapes = [jax.tree.map(jnp.shape, begun.params)]
    for mixing in ("identity", "blocks"):
        other = heads_trained.rearrange(begun, mixing, "alone", seed=0)
        assert jax.tree.structure(other) == jax.tree.structure(begun)
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(other.params))
        shapes.append(jax.tree.map(jnp.shape, other.params))
    assert shapes[0] == shapes[1] == shapes[2]


def test_no_seed_chooses_its_own_arm():
    np.testing.assert_array_equal(best_by_others([np.array([1.0, 2.0, 3.0])], 3), [1, 2, 3])
    lucky, steady = np.array([0.0, 5.0, 5.0]), np.array([1.0, 1.0, 1.0])
    np.testing.assert_array_equal(best_by_others([lucky, steady], 3), [1, 1, 1])  # its luck is not its own choice
    assert np.isnan(best_by_others([np.full(3, math.nan), steady], 3)).all()
    assert np.isnan(best_by_others([], 3)).all()


GRID = HeadsConfig(splits=(1, 4, 16), grid_dims=(2, 32), rates=(0.1, 0.2, 0.4))


def widths_judged(losses, best=0.2):
    """The evidence of H3b, of mean losses by (h, d_k)."""
    rows = [
        {"part": "trained", "arm": f"h{h}_d{d}", "rate": rate, "seed": seed, "step": 100, "measure": "loss", "value": value}
        for (h, d), loss in losses.items()
        for rate in GRID.rates
        for seed, value in enumerate(loss + (rate != best) + 0.001 * np.arange(5))
    ]  # fmt: skip
    return _h3b(Measured(GRID, pd.DataFrame(rows)))


LOSSES = {(1, 32): 2.0, (4, 2): 2.1, (4, 8): 1.9, (4, 32): 1.85, (16, 2): 2.2}


def test_widths_are_compared_at_fixed_product_and_at_fixed_number():
    found = widths_judged(LOSSES)
    values = {name: estimate.value for name, estimate in found.evidence.items()}
    assert values["trade"] == pytest.approx(1.9 - 2.0)
    assert values["alone"] == pytest.approx(1.9 - 1.85)
    assert [values[name] for name in ("best_trade", "best_alone", "least_trade", "least_alone")] == [8, 32, 8, 32]
    assert found.verdict == "refined"
    assert widths_judged({**LOSSES, (4, 32): 1.89}).verdict == "refuted"
    assert widths_judged({**LOSSES, (1, 32): 1.8}).verdict == "confirmed"


def test_a_best_rate_at_the_edge_settles_nothing():
    found = widths_judged(LOSSES, best=0.4)
    assert found.verdict == "inconclusive"
    assert "edge" in found.because


def test_the_arms_form_a_grid():
    config = dataclasses.replace(CONFIG, splits=(1, 2, 4), grid_heads=(1, 4), grid_dims=(2, 32))
    assert config.arms == ((1, 2), (1, 32), (2, 16), (4, 2), (4, 8), (4, 32))
    assert list(config.split_widths) == [8, 16, 32]
    assert list(config.alone_widths) == [2, 8, 32]
    assert config.base == (4, 8)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"splits": (1, 5)}, "splits must divide the width, 32; got 5"),
        ({"cost_heads": (4,)}, "cost_heads must hold at least two"),
        ({"fit_dims": (2, 16)}, r"fit_lengths must hold n with n/8 among fit_dims, \(2, 16\)"),
        ({"hot": 8}, "at least 2·hot = 16; got 64"),
        ({"splits": (1, 2)}, "splits must hold num_heads = 4"),
        ({"grid_heads": (8,)}, "grid_heads must hold num_heads = 4"),
        ({"splits": (1, 4, 32)}, "head widths must be even"),
        ({"rates": (1.0, 0.1)}, "rates must ascend"),
    ],
)
def test_a_configuration_that_cannot_be_measured_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        HeadsConfig(**fields)

"""The optimizers: schedules by their formulas, steps recomputed in NumPy, and choices that do not go together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.training.optimizers import OptimizerConfig, decayed, directions, schedule


def factors(config, steps):
    return np.array([schedule(config, step) for step in range(steps)])


def test_a_constant_schedule_with_warm_up():
    config = OptimizerConfig(warmup_steps=3)
    np.testing.assert_allclose(factors(config, 6), [0.25, 0.5, 0.75, 1, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 2])
def test_cosine_and_linear_end_where_they_should(warmup):
    total, final = 10, 0.1
    settings = {"warmup_steps": warmup, "total_steps": total, "final_fraction": final}
    t = np.clip((np.arange(14) - warmup) / (total - warmup), 0, 1)
    rising = np.minimum(1, (np.arange(14) + 1) / (warmup + 1))
    cosine = final + (1 - final) * (1 + np.cos(np.pi * t)) / 2
    linear = 1 - (1 - final) * t
    for name, falling in {"cosine": cosine, "linear": linear}.items():
        expected = np.where(np.arange(14) < warmup, rising, falling)
        np.testing.assert_allclose(factors(OptimizerConfig(schedule=name, **settings), 14), expected, atol=1e-6)


def test_no_schedule_begins_at_zero():
    for name in ("cosine", "linear"):
        assert factors(OptimizerConfig(schedule=name, warmup_steps=5, total_steps=9), 1)[0] > 0
    assert factors(OptimizerConfig(warmup_steps=5), 1)[0] > 0


PARAMETERS = {"head_weight": jnp.array([3.0, -4.0]), "norm": {"scale": jnp.array([2.0])}}
GRADIENTS = [
    {"head_weight": jnp.array([1.0, 2.0]), "norm": {"scale": jnp.array([-2.0])}},
    {"head_weight": jnp.array([0.1, -0.2]), "norm": {"scale": jnp.array([0.2])}},
]


def directions_of(config):
    transformation = directions(config)
    state, found = transformation.init(PARAMETERS), []
    for gradient in GRADIENTS:
        direction, state = transformation.update(gradient, state, PARAMETERS)
        found.append(np.concatenate([direction["head_weight"], direction["norm"]["scale"]]))
    return found


def test_adamw_by_its_formula():
    config = OptimizerConfig(clip_norm=1.5, weight_decay=0.5, beta1=0.8, beta2=0.9, epsilon=1e-3)
    m = v = np.zeros(3)
    parameters, decay = np.array([3.0, -4.0, 2.0]), np.array([0.5, 0.5, 0.0])  # a norm's gain does not decay
    for t, (gradient, found) in enumerate(zip(GRADIENTS, directions_of(config), strict=True), 1):
        g = np.concatenate([gradient["head_weight"], gradient["norm"]["scale"]]).astype(np.float64)
        g *= min(1, 1.5 / np.linalg.norm(g))
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        expected = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3) + decay * parameters
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_sgd_with_momentum_and_without():
    g1, g2 = (np.concatenate([g["head_weight"], g["norm"]["scale"]]) for g in GRADIENTS)
    np.testing.assert_allclose(directions_of(OptimizerConfig(name="sgd", clip_norm=None, beta1=0.5))[1], g2 + g1 / 2)
    np.testing.assert_allclose(directions_of(OptimizerConfig(name="sgd", clip_norm=None, beta1=0.0))[1], g2)


def test_what_decays():
    names = ("embedding", "query_weight", "query_norm_weight", "query_bias", "scale", "sinks", "kernel", "table")
    names += ("log_rate", "skip", "random_features", "rotations")
    tree = {"layers": dict.fromkeys(names, jnp.zeros(()))}
    expected = {name: name in ("embedding", "query_weight", "kernel", "table") for name in names}
    assert decayed(tree) == {"layers": expected}


def test_the_schedule_can_be_traced():
    config = OptimizerConfig(schedule="cosine", warmup_steps=2, total_steps=7)
    steps = jnp.arange(9)
    np.testing.assert_allclose(jax.vmap(lambda step: schedule(config, step))(steps), factors(config, 9), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adam"}, "name must be one of 'adamw', 'sgd'; got 'adam'"),
        ({"schedule": "step"}, "schedule must be one of"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"beta1": 1.0}, "beta1 must lie in"),
        ({"epsilon": 0.0}, "epsilon must be positive"),
        (
            {"total_steps": 10},
            "total_steps has no effect with name='adamw' and schedule='constant', got total_steps=10",
        ),
        ({"final_fraction": 0.5}, "final_fraction has no effect"),
        ({"name": "sgd", "beta2": 0.9}, "beta2 has no effect with name='sgd'"),
        ({"name": "sgd", "epsilon": 1e-6}, "epsilon has no effect"),
        (
            {"schedule": "cosine", "total_steps": 5, "warmup_steps": 5},
            "warmup_steps must be below total_steps, got 5, 5",
        ),
        ({"schedule": "cosine", "total_steps": 5, "final_fraction": 1.5}, "final_fraction must be at most 1"),
    ],
)
def test_wrong_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


def test_a_schedule_that_ends_needs_its_end():
    with pytest.raises(TypeError, match="total_steps must be an integer, got NoneType"):
        OptimizerConfig(schedule="linear")

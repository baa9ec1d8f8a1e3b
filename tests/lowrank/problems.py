"""Problems that both forms are tested on, and what any attention function owes."""

import jax
import jax.numpy as jnp
import numpy as np


def arrays(batch=(2,), *, queries=11, keys=11, heads=4, key_heads=2, width=6, value_width=3, seed=0, sd=1.0):
    """query, key and value as NumPy float64."""
    rng = np.random.default_rng(seed)
    shapes = [(queries, heads, width), (keys, key_heads, width), (keys, key_heads, value_width)]
    return [rng.standard_normal((*batch, *shape)) * sd for shape in shapes]


def device(*xs, dtype=jnp.float32):
    return [jnp.asarray(x, dtype) for x in xs]


def check_gradients(attend, inputs, *, step=1e-5, tolerance=1e-6):
    """Directional derivatives against central differences; call it in float64."""
    rng = np.random.default_rng(1)
    cotangent = jnp.asarray(rng.standard_normal(attend(*inputs).shape))

    def loss(*xs):
        return jnp.sum(attend(*xs) * cotangent)

    loss = jax.jit(loss)
    gradients = jax.jit(jax.grad(loss, tuple(range(len(inputs)))))(*inputs)
    for i, gradient in enumerate(gradients):
        direction = jnp.asarray(rng.standard_normal(inputs[i].shape))
        ends = [loss(*(x + sign * step * direction if j == i else x for j, x in enumerate(inputs))) for sign in (1, -1)]
        slope = float(ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(jnp.sum(gradient * direction), slope, rtol=tolerance, atol=tolerance, err_msg=str(i))

"""Statistics, spectra and the monitor of arrays that lie on eight devices are those of one: no device's own mean."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from attn_jax import masks
from attn_jax.diagnostics import statistics
from attn_jax.diagnostics.spectra import logit_spectrum
from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.parallel import Layout, make_mesh
from attn_jax.training import AttentionMonitor, OptimizerConfig, evaluate, init_state, token_loss
from attn_jax.training.monitor import ALL
from attn_jax.training.objectives import SpreadLoss
from attn_jax.training.step import train_steps
from attn_jax.training.tasks import Copy

SPECS = {
    "data": ({"data": 8}, PartitionSpec("data")),
    "heads": ({"heads": 4, "data": 2}, PartitionSpec("data", None, "heads")),
    "sequence": ({"sequence": 8}, PartitionSpec(None, "sequence")),
    "all": ({"data": 2, "heads": 2, "sequence": 2}, PartitionSpec("data", "sequence", "heads")),
}


@pytest.fixture(scope="module")
def arrays():
    """Queries, keys and values of sequences of very different lengths, so that devices hold unlike shares of rows."""
    keys = jax.random.split(jax.random.key(3), 3)
    query, key, value = (jax.random.normal(k, (8, 16, 4, 8)) for k in keys)
    # One row has the largest logit of all, and one device has it.
    return query.at[5, 1, 2].multiply(9), key, value, jnp.array([16, 3, 1, 2, 9, 5, 1, 12])


def describe(query, key, value, lengths):
    lengths = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    seen = statistics.attention_statistics(query, key, mask=masks.Causal(), statistics=statistics.ALL, **lengths)
    monitor = AttentionMonitor(every=1, rows=None, measures=ALL)
    measured = monitor.observer(0)(query, key, value, mask=masks.Causal(), **lengths)
    return seen, logit_spectrum(query, key), measured


@functools.cache
def alone():
    return jax.jit(describe)


@pytest.mark.parametrize("name", ["all", *(pytest.param(name, marks=pytest.mark.slow) for name in list(SPECS)[:-1])])
def test_statistics_spectra_and_measures(arrays, name):
    sizes, spec = SPECS[name]
    mesh = make_mesh(**sizes)
    *qkv, lengths = arrays
    spread = [jax.device_put(x, NamedSharding(mesh, spec)) for x in qkv]
    found, expected = (
        alone()(*spread, jax.device_put(lengths, NamedSharding(mesh, PartitionSpec(*spec[:1])))),
        alone()(*arrays),
    )
    for path, leaf in jax.tree.leaves_with_path(expected):
        other = np.asarray(functools.reduce(_get, path, found))
        np.testing.assert_allclose(other, leaf, rtol=2e-5, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    # The oracle of the two that a mean or a maximum of devices would get wrong.
    measured = expected[2]
    query, key, _ = (np.asarray(x, np.float64) for x in qkv)
    logits = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(8)
    t = np.arange(16)
    seen = (t[:, None] >= t[None, :]) & (t[None, :] < np.asarray(lengths)[:, None, None])
    seen = (seen & (t[:, None] < np.asarray(lengths)[:, None, None]))[:, None]
    rows = np.broadcast_to(seen.sum(-1) > 1, logits.shape[:-1])
    logits = np.where(seen, logits, -np.inf)
    largest = np.where(rows, logits.max(-1), -np.inf).max(axis=(0, 2))
    exponentials = np.exp(logits)
    first = np.where(rows, exponentials[..., 0] / np.maximum(exponentials.sum(-1), 1e-300), 0)
    np.testing.assert_allclose(measured["max_logit"], largest, rtol=1e-5)
    np.testing.assert_allclose(measured["sink_mass"], first.sum(axis=(0, 2)) / rows.sum(axis=(0, 2)), rtol=1e-5)


def _get(tree, key):
    return getattr(tree, key.name) if hasattr(key, "name") else tree[key.key if hasattr(key, "key") else key.idx]


def test_a_monitored_run():
    """What the log of a run has of its attention, and its evaluation, is the same on a mesh."""
    config = TransformerConfig(vocabulary_size=5, num_layers=2, model_width=16, num_heads=2, mlp_width=16)
    task, monitor = Copy(num_symbols=5, distance=3, length=16), AttentionMonitor(every=1, rows=24)
    layout = Layout(make_mesh(data=2, heads=2, sequence=2), shard_parameters=True)
    begin = functools.partial(init_state, functools.partial(Transformer, config), OptimizerConfig(), learning_rate=1e-2)

    def run(state, loss, layout):
        state, metrics = train_steps(state, task, loss=loss, batch_size=4, count=3, monitor=monitor, layout=layout)
        return metrics, evaluate(state, task, loss=loss, batch_size=4, count=2, layout=layout)

    expected = run(begin(), token_loss, None)
    found = run(layout.place(begin()), SpreadLoss(token_loss, layout.mesh), layout)
    for path, leaf in jax.tree.leaves_with_path(expected):
        other = functools.reduce(_get, path, found)
        assert other.sharding.is_fully_replicated
        np.testing.assert_allclose(other, leaf, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))

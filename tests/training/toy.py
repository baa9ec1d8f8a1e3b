"""Runs that take a second: a table of bigrams, a tiny transformer, and a command that a test can kill.

`python -m tests.training.toy DIRECTORY [--kill_at=N]` trains, and prints the digest of what comes out. With `--kill_at`
the process kills itself at the N-th operation on a file of the checkpoints.
"""

import functools
import hashlib
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training.loop import LoopConfig, train
from attn_jax.training.optimizers import OptimizerConfig
from attn_jax.training.state import init_state
from attn_jax.training.tasks import Copy

TASK = Copy(num_symbols=5, distance=1, length=6)
OPTIMIZER = OptimizerConfig(schedule="cosine", warmup_steps=3, total_steps=40, weight_decay=0.1)
CONFIG = LoopConfig(
    steps=12, batch_size=3, steps_per_call=2, evaluate_every=4, evaluation_batches=2, checkpoint_every=4
)
TRANSFORMER = TransformerConfig(
    vocabulary_size=5, num_layers=2, model_width=8, num_heads=2, mlp_width=8, dropout_rate=0.1
)


class Bigrams(nnx.Module):
    """Logits of the next token by this one."""

    def __init__(self, *, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (5, 5)))

    def __call__(self, token_ids, *, deterministic, dropout_rng):
        logits = self.table[...][token_ids]
        if deterministic:
            return logits
        return jnp.where(jax.random.bernoulli(dropout_rng, 0.9, logits.shape), logits, 0.0)


make_bigrams = Bigrams
make_transformer = functools.partial(Transformer, TRANSFORMER)


def begin(make_model, optimizer=OPTIMIZER, *, learning_rate=0.03, seed=0):
    """A run before its first step."""
    return init_state(make_model, optimizer, learning_rate=learning_rate, seed=seed)


def bits(tree) -> str:
    """A digest of every bit of every array."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def main(directory: str, kill_at: int | None = None) -> None:
    operations = 0

    def count(event: str, arguments: tuple) -> None:
        nonlocal operations
        names = [os.fsdecode(a) for a in arguments if isinstance(a, (str, bytes, os.PathLike))]
        if event.startswith(("open", "os.", "shutil.")) and any("checkpoints" in name for name in names):
            operations += 1
            if operations == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    config = LoopConfig(steps=60, batch_size=3, steps_per_call=2, evaluate_every=6, checkpoint_every=2, keep=2)
    state = begin(make_transformer, seed=1)
    print("begun", flush=True)
    result = train(state, TASK, config=config, directory=directory)
    print(bits(result.state), operations, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument.removeprefix("--kill_at=")) for argument in sys.argv[2:]))

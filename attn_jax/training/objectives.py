"""What a step minimises: the model's answers to a batch, judged by the losses."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from attn_jax.exact.attention import dot_product_attention
from attn_jax.nn import Transformer
from attn_jax.nn.layers import stacks_of
from attn_jax.parallel.ring import ring_attention
from attn_jax.training import losses
from attn_jax.training.tasks import Batch
from attn_jax.typing import Array


def token_loss(
    model: nnx.Module,
    batch: Batch,
    *,
    key: jax.Array | None,
    observe: Callable[..., Any] | None = None,
    z_loss: float = 0.0,
) -> tuple[Array, dict[str, Any]]:
    """The mean cross-entropy of the answers that are asked for, and the share of them that are right.

    Args:
        model: called as `Transformer` is, with a head.
        batch: of a task.
        key: of dropout; None: evaluation.
        observe: what every layer of the model calls, as in `Transformer`.
        z_loss: as in `losses.cross_entropy`; `functools.partial(token_loss, z_loss=1e-4)`, made once.

    Returns:
        `(nats, {"accuracy": share})`, and as "observed" what the layers observed.

    Raises:
        ValueError, TypeError: as `losses.cross_entropy`.

    >>> import jax, jax.numpy as jnp
    >>> from attn_jax.training import tasks, token_loss
    >>> def model(token_ids, *, deterministic, dropout_rng):  # called as a Transformer is
    ...     return jnp.zeros((*token_ids.shape, 4))
    >>> batch = tasks.Copy(num_symbols=4, distance=1, length=4).batch(jax.random.key(0), step=0, size=2)
    >>> nats, measured = token_loss(model, batch, key=None)
    >>> round(float(nats), 4)  # ln 4: one of four symbols, without a clue
    1.3863
    """
    options = {} if observe is None else {"observe": observe}  # which not every model takes
    outputs = model(batch.inputs, deterministic=key is None, dropout_rng=key, **options)
    logits, observed = outputs if options else (outputs, None)
    mean, _ = losses.cross_entropy(logits, batch.targets, batch.weights, z_loss=z_loss)
    share, _ = losses.accuracy(logits, batch.targets, batch.weights)
    measured = {"accuracy": share}
    return mean, {**measured, "observed": observed} if options else measured


@dataclasses.dataclass(frozen=True)
class SpreadLoss:
    """The same loss of a `Transformer` whose tokens and heads are spread over a mesh: its attention goes round a ring.

    One that has another attention than `dot_product_attention`, or none, keeps it, and XLA cuts it as it can.

    Attributes:
        loss: of a model and a batch.
        mesh: of `make_mesh`.

    >>> import jax
    >>> from flax import nnx
    >>> from attn_jax.nn import Transformer, TransformerConfig
    >>> from attn_jax.parallel import make_mesh
    >>> from attn_jax.training import SpreadLoss
    >>> config = TransformerConfig(vocabulary_size=4, num_layers=1, model_width=8, num_heads=2)
    >>> model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    >>> def loss(model, batch, *, key):
    ...     return 0.0, {"attention": model.config.attention_fn}
    >>> _, found = SpreadLoss(loss, make_mesh(devices=jax.devices()[:1]))(model, None, key=None)
    >>> found["attention"].func.__name__, model.config.attention_fn.__name__
    ('ring_attention', 'dot_product_attention')
    """

    loss: Callable[..., tuple[Array, Mapping[str, Any]]]
    mesh: Mesh

    def __call__(
        self,
        model: nnx.Module,
        batch: Batch,
        *,
        key: jax.Array | None,
        observe: Callable[..., Any] | None = None,
    ) -> tuple[Array, Mapping[str, Any]]:
        """As `loss`."""
        if isinstance(model, Transformer):
            model = nnx.merge(*nnx.split(model))  # the caller's stays as it is
            if model.config.attention_fn is dot_product_attention:
                ring = functools.partial(
                    ring_attention, mesh=self.mesh, axis_name="sequence", batch_axis="data", head_axis="heads"
                )
                model.config = dataclasses.replace(model.config, attention_fn=ring)
            for block in stacks_of(model.layers):
                block.mlp.joins_tokens = False
        return self.loss(model, batch, key=key, **({} if observe is None else {"observe": observe}))

"""What a step minimises: the model's answers to a batch, judged by the losses."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

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
    """
    options = {} if observe is None else {"observe": observe}  # which not every model takes
    outputs = model(batch.inputs, deterministic=key is None, dropout_rng=key, **options)
    logits, observed = outputs if options else (outputs, None)
    mean, _ = losses.cross_entropy(logits, batch.targets, batch.weights, z_loss=z_loss)
    share, _ = losses.accuracy(logits, batch.targets, batch.weights)
    measured = {"accuracy": share}
    return mean, {**measured, "observed": observed} if options else measured

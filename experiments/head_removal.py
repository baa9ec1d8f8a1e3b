"""What it costs a checkpoint to lose some of its heads: the ground that experiments on heads share.

A head that is removed brings its mean over other documents (the fitted ones) in place of its output, to all tokens but
the first: models keep the first token as a sink, and a change there may break it, whatever the head is for (removed at
the first token as well, a tenth of the heads of SmolLM2 cost 3 nats in one document of six, and 0.1 without). A decoder
loses nats a token; an encoder has no loss, so its cost is 1 − the cosine between its embedding of a document (the mean
of the hidden states) and that of the whole model. Sets of heads are removed at once and compared with matched sets: as
many heads from the same layers.
"""

import dataclasses
import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import attn_jax
from attn_jax import models
from attn_jax.diagnostics import head_similarity, summarize_heads
from attn_jax.diagnostics.importance import gate_gradients
from attn_jax.diagnostics.similarity import linear_cka
from attn_jax.nn import Transformer
from attn_jax.nn.interventions import Ablation, ablate_heads, fetch, gate_heads, visible_pairs
from attn_jax.typing import Array, Bool, Float, Int
from experiments import artifacts, estimates, texts
from experiments.artifacts import Row
from experiments.checkpoints import at_random, load
from experiments.config import Config, option
from experiments.diagnose.config import INSTALLED, MOST_MODELS, DiagnoseConfig
from experiments.diagnose.measured import checkpoints
from experiments.estimates import Estimate
from experiments.harness import InputError

ARMS = ("model", "random_weights", "shuffled_tokens")
BATCH = 8  # documents a call
ABSENT = Estimate(np.nan, np.nan, np.nan, None)  # of a checkpoint fewer, or of what it does not have


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemovalConfig(Config):
    """Flags of every experiment that removes heads."""

    model: tuple[str, ...] = option(
        (INSTALLED,),
        f"at most {MOST_MODELS} checkpoints ({', '.join(models.CHECKPOINTS)}) or paths; {INSTALLED}: those there are",
    )
    text_file: str = option("", f"UTF-8 text to read; empty: {texts.DEFAULT_NAME}, which comes with Python")
    documents: int = option(6, "documents on which the cost is measured", least=1, most=256)
    fitted: int = option(4, "other documents, of which means and heads are measured", least=1, most=64)
    max_tokens: int = option(48, "tokens of each", least=8, most=1024)
    share: float = option(0.1, "share of the heads that are removed at once", least=0.001, most=0.5)
    draws: int = option(2, "draws of matched heads", least=1, most=100)

    def __post_init__(self) -> None:
        super().__post_init__()
        DiagnoseConfig(model=self.model)  # too many raise here


class Heads(NamedTuple):
    """Of the heads of every layer, on the fitted documents: means over documents.

    Attributes:
        mean: `[L, N, V]`, the mean output, over tokens too, without the first.
        normalized_entropy, normalized_entropy_no_sink, sink_mass: `[L, N]`, as in `HeadSummary`.
        divergence: `[L, N, N]`, Jensen–Shannon, of the patterns.
        cka: `[L, N, N]`, linear CKA of the outputs of all tokens, before the output projection.
    """

    mean: Array
    normalized_entropy: Array
    normalized_entropy_no_sink: Array
    sink_mass: Array
    divergence: Array
    cka: Array


def names(config: RemovalConfig) -> tuple[str, ...]:
    """The checkpoints that are measured."""
    return checkpoints(DiagnoseConfig(model=config.model))


def label(name: str) -> str:
    """Of a checkpoint, fit for a file name."""
    return f"{zlib.crc32(name.encode()):08x}" if "/" in name or "." in name else name


def inputs(config: RemovalConfig) -> Mapping[str, str]:
    """What is read, and its digests."""
    name, text = texts.read(config.text_file)
    for checkpoint in names(config):
        documents(config, checkpoint, "model")  # too short a text raises before anything is written
    sources = [load(checkpoint).source for checkpoint in names(config)]
    return {**{source.name: artifacts.file_digest(source) for source in sources}, name: texts.digest(text)}


@functools.lru_cache(maxsize=1)
def documents(config: RemovalConfig, name: str, arm: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids to fit and to judge, `[documents, T]`, both spread over the text."""
    _, text = texts.read(config.text_file)
    tokenizer = load(name).tokenizer
    assert tokenizer is not None  # `load` has seen to it
    length = min(config.max_tokens, load(name).config.max_length or config.max_tokens)
    found = texts.documents(text, tokenizer, count=config.fitted + config.documents, length=length, special=True)
    if len(found) < config.fitted + 1:
        raise InputError(f"the text has {len(found)} documents of {length} tokens, --fitted={config.fitted}")
    if arm == "shuffled_tokens":
        rng = np.random.default_rng(config.seed)
        found = np.stack([rng.permutation(token_ids) for token_ids in found])
    chosen = np.linspace(0, len(found) - 1, config.fitted).round().astype(int)
    return found[chosen], np.delete(found, chosen, axis=0)


def model_of(config: RemovalConfig, name: str, arm: str) -> Transformer:
    """The checkpoint, or its control."""
    model = load(name).model
    if arm != "random_weights":
        return model
    # As the checkpoint keeps its weights, so that both share compiled programs; what is drawn has no order to lose.
    leaves = zip(jax.tree.leaves(model), jax.tree.leaves(at_random(name, config.seed)), strict=True)
    return jax.tree.unflatten(jax.tree.structure(model), [drawn.reshape(kept.shape) for kept, drawn in leaves])


@functools.lru_cache(maxsize=1)
def heads_of(config: RemovalConfig, name: str, arm: str) -> Heads:
    """The heads of an arm, as they are on the fitted documents."""
    return jax.tree.map(np.asarray, _look(model_of(config, name, arm), documents(config, name, arm)[0]))


@jax.jit
def _look(model: Transformer, token_ids: Int[Array, "b t"]) -> Heads:
    return model(token_ids, observe=describe)[1]


def describe(query: Array, key: Array, value: Array, **options: Any) -> Heads:
    """One layer: what `Transformer`'s `observe` calls."""
    weights, visible = attn_jax.attention_weights(query, key, **options), visible_pairs(query, key, **options)
    output = fetch(weights, value).astype(jnp.float32)  # [B, T, N, V]
    summary = summarize_heads(query, key, **options)
    by_head = jnp.moveaxis(output, -2, 0).reshape(output.shape[-2], -1, output.shape[-1])
    return Heads(
        mean=output[:, 1:].mean(axis=(0, 1)),
        normalized_entropy=summary.normalized_entropy.mean(axis=0),
        normalized_entropy_no_sink=summary.normalized_entropy_no_sink.mean(axis=0),
        sink_mass=summary.sink_mass.mean(axis=0),
        divergence=head_similarity(weights, visible).mean(axis=0),
        cka=jax.vmap(lambda x: jax.vmap(lambda y: linear_cka(x, y))(by_head))(by_head),
    )


def costs(
    config: RemovalConfig, name: str, arm: str, removed: Sequence[Bool[np.ndarray, "l n"]], *, fitted: bool = False
) -> Float[np.ndarray, "sets documents"]:
    """The cost of removing each set of heads, of every judged document, or of every fitted one."""
    whole = _whole(config, name, arm, fitted)
    different = {one.tobytes(): one for one in removed}  # draws may agree
    found = {which: _outcome(config, name, arm, fitted, one) for which, one in different.items()}
    away = {which: 1 - np.sum(x * whole, axis=-1) if whole.ndim > 1 else x - whole for which, x in found.items()}
    return np.stack([away[one.tobytes()] for one in removed])


@functools.lru_cache(maxsize=2)
def _whole(config: RemovalConfig, name: str, arm: str, fitted: bool) -> np.ndarray:
    return _outcome(config, name, arm, fitted, np.zeros(heads_of(config, name, arm).sink_mass.shape, bool))


def _outcome(config: RemovalConfig, name: str, arm: str, fitted: bool, removed: Bool[np.ndarray, "l n"]) -> np.ndarray:
    """What comes out without some heads: the loss of each document, or its embedding."""
    model, token_ids = model_of(config, name, arm), documents(config, name, arm)[0 if fitted else 1]
    ablation = Ablation(jnp.asarray(1.0 - removed), jnp.asarray(heads_of(config, name, arm).mean))
    batches = [token_ids[start : start + BATCH] for start in range(0, len(token_ids), BATCH)]
    return np.concatenate([np.asarray(_run(model, batch, ablation), np.float64) for batch in batches])


@jax.jit
def _run(model: Transformer, token_ids: Int[Array, "b t"], ablation: Ablation) -> Float[Array, "b ..."]:
    found = model(token_ids, intervene=remove_heads, interventions=ablation)
    if model.config.head:
        return _loss(found, token_ids)
    pooled = found.astype(jnp.float32).mean(axis=-2)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def remove_heads(own: Ablation, query: Array, key: Array, value: Array, **options: Any) -> Float[Array, "b t n v"]:
    """`ablate_heads` for all tokens but the first, which keeps what its heads bring."""
    output = attn_jax.dot_product_attention(query, key, value, **options)
    first = (jnp.arange(output.shape[-3]) == 0)[None, :, None, None]
    return jnp.where(first, output, ablate_heads(own, query, key, value, **options))


def _loss(logits: Float[Array, "*b t c"], token_ids: Int[Array, "*b t"]) -> Float[Array, "*b"]:
    """Nats a token."""
    logits, following = logits[..., :-1, :].astype(jnp.float32), token_ids[..., 1:, None]
    chosen = jnp.take_along_axis(logits, following, axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean(axis=-1)


def importance(config: RemovalConfig, name: str, *, fitted: bool = False) -> Float[np.ndarray, "documents l n"]:
    """How much each head matters to each judged document, or to each fitted one.

    Of a decoder |∂ loss / ∂ gate|. The cosine of an encoder is largest where no head is gated, so that it has no
    gradient there: its heads are removed one by one, and that is the cost.
    """
    model, token_ids = load(name).model, documents(config, name, "model")[0 if fitted else 1]
    shape = (model.config.num_layers, model.config.num_heads)
    if model.config.head:
        return np.abs(np.asarray(_gradients(model, token_ids), np.float64))
    alone = np.eye(shape[0] * shape[1], dtype=bool).reshape(-1, *shape)
    return costs(config, name, "model", list(alone), fitted=fitted).T.reshape(-1, *shape)


@jax.jit
def _gradients(model: Transformer, token_ids: Int[Array, "b t"]) -> Float[Array, "b l n"]:
    def loss(gates: Array, token_ids: Array) -> Array:
        return _loss(model(token_ids, intervene=gate_heads, interventions=gates), token_ids)

    return gate_gradients(loss, jnp.ones((model.config.num_layers, model.config.num_heads)), token_ids)


def matched(
    rng: np.random.Generator,
    chosen: Bool[np.ndarray, "l n"],
    others: Bool[np.ndarray, "l n"],
    alike: Bool[np.ndarray, "l n n"],
) -> tuple[Bool[np.ndarray, "l n"], Bool[np.ndarray, "l n"]]:
    """Some of the chosen heads, and as many others of the same layers, drawn among those that are alike.

    A chosen head for which no other is left is left out.
    """
    kept, drawn = np.zeros_like(chosen), np.zeros_like(chosen)
    for layer in range(len(chosen)):
        for head in rng.permutation(np.flatnonzero(chosen[layer])):
            free = np.flatnonzero(others[layer] & alike[layer, head] & ~drawn[layer])
            if len(free):
                kept[layer, head] = drawn[layer, rng.choice(free)] = True
    return kept, drawn


def pair_rows(
    config: RemovalConfig,
    name: str,
    arm: str,
    chosen: Bool[np.ndarray, "l n"],
    others: Bool[np.ndarray, "l n"],
    alike: Bool[np.ndarray, "l n n"] | None = None,
    **where: Any,
) -> list[Row]:
    """The cost of removing chosen heads and of removing matched ones: a row for each draw, set and document."""
    alike = np.ones((*chosen.shape, chosen.shape[-1]), bool) if alike is None else alike
    stream = zlib.crc32(f"{name} {arm} {sorted(where.items())}".encode())
    rng = np.random.default_rng([config.seed, stream])
    sets = [x for _ in range(config.draws) for x in matched(rng, chosen, others, alike)]
    found = costs(config, name, arm, sets)
    at = {"part": "pairs", "checkpoint": name, "arm": arm, **where}
    return [
        {**at, "draw": i // 2, "set": ("chosen", "matched")[i % 2], "document": document, "heads": int(sets[i].sum()),
         "value": float(value)}
        for (i, document), value in np.ndenumerate(found)
    ]  # fmt: skip


def rows_by_head(values: Float[np.ndarray, "... l n"], axes: Iterable[str] = (), **fixed: Any) -> list[Row]:
    """A row for each head, and for each of the axes before."""
    columns = (*axes, "layer", "head")
    return [
        {**fixed, **dict(zip(columns, index, strict=True)), "value": float(value)}
        for index, value in np.ndenumerate(values)
    ]


def lowest(values: Float[np.ndarray, "l n"], share: float) -> Bool[np.ndarray, "l n"]:
    """This share of the heads, those of the lowest values of all layers."""
    return values.ravel().argsort(kind="stable").argsort().reshape(values.shape) < int(share * values.size)


def measured_checkpoints(measurements: pd.DataFrame) -> list[str]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(measurements["checkpoint"]))


def by_document(rows: pd.DataFrame, **where: object) -> Float[np.ndarray, " documents"]:
    """The mean of the values of those rows."""
    return estimates.by_run(_where(rows, **where), run="document")


def heads_removed(rows: pd.DataFrame, **where: object) -> float:
    """How many at once, mean over draws."""
    return float(np.mean(_where(rows, **where)["heads"]))


def _where(rows: pd.DataFrame, **where: object) -> pd.DataFrame:
    chosen = np.ones(len(rows), bool)
    for column, value in where.items():
        chosen &= np.asarray(rows[column] == value)
    return rows.loc[chosen]


def scope(config: RemovalConfig, measurements: pd.DataFrame) -> dict[str, object]:
    """What a verdict is about."""
    return {
        "models": ", ".join(measured_checkpoints(measurements)),
        "documents": measurements["document"].nunique(),
        "tokens": config.max_tokens,
        "text": config.text_file or texts.DEFAULT_NAME,
        "fitted": config.fitted,
        "share": f"{config.share:.0%}",
        "draws": config.draws,
    }

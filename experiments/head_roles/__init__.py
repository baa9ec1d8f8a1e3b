"""Do heads specialise: local, previous token, induction, syntax, coreference?

Claims: H8.
Command: python -m experiments.head_roles --preset=quick --out=results/head_roles
Time: smoke 10 s, quick 47 s, full about 5 min on two cores.

How much of its weight each head of a real model gives to what is near, to the token before, to what followed the same
token last time, to a verb's subject and to a pronoun's antecedent; beside the same architecture at random weights.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from tokenizers import Tokenizer

import attn_jax
from attn_jax import models
from attn_jax.typing import Array, Float
from experiments import artifacts, claims, estimates, figures, harness, texts
from experiments.artifacts import Row
from experiments.checkpoints import at_random, load
from experiments.claims.diagnosis import ROLE_LINES
from experiments.config import Config, option
from experiments.harness import Experiment, InputError, Result, Unit
from experiments.head_roles import probes
from experiments.progress import Table
from experiments.verdicts import Outcome

ARMS = ("model", "random_weights")
BATCH = 32  # sentences a call


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolesConfig(Config):
    """Flags of this experiment."""

    model: str = option("smollm2", f"a decoder ({', '.join(models.CHECKPOINTS)}) or the path of its file")
    text_file: str = option("", f"UTF-8 text to read; empty: {texts.DEFAULT_NAME}, which comes with Python")
    documents: int = option(16, "documents, and sequences of random tokens", least=4, most=256)
    max_tokens: int = option(128, "tokens of each", least=32, most=1024)


def _decoder(model: str) -> models.LoadedModel:
    loaded = load(model)
    if not loaded.config.causal:
        raise InputError(f"--model={model}: must be a decoder")
    return loaded


def _tokenizer(model: str) -> Tokenizer:
    tokenizer = _decoder(model).tokenizer
    assert tokenizer is not None  # `load` has seen to it
    return tokenizer


def inputs(config: RolesConfig) -> Mapping[str, str]:
    name, text = texts.read(config.text_file)
    source = _decoder(config.model).source
    return {source.name: artifacts.file_digest(source), name: texts.digest(text)}


def units(config: RolesConfig) -> list[Unit]:
    return [
        Unit(f"{arm}_{role}", lambda arm=arm, role=role: measure(config, arm, role))
        for arm in ARMS
        for role in ROLE_LINES
    ]


def probe(config: RolesConfig, role: str) -> probes.Probe:
    """The examples of one kind of head."""
    tokenizer = _tokenizer(config.model)
    if role in ("syntax", "coreference"):
        return getattr(probes, role)(tokenizer)
    if role == "induction":
        ordinary = np.arange(1000, min(tokenizer.get_vocab_size(), 30000))  # neither special nor rare
        return probes.induction(ordinary, config.documents, config.max_tokens // 2, config.seed)
    _, text = texts.read(config.text_file)
    return getattr(probes, role)(texts.documents(text, tokenizer, count=config.documents, length=config.max_tokens))


def measure(config: RolesConfig, arm: str, role: str) -> list[Row]:
    """A row for each example, layer and head."""
    asked = probe(config, role)
    model = _decoder(config.model).model if arm == "model" else at_random(config.model, config.seed)
    examples, sentences, length = asked.token_ids.shape
    token_ids, lengths = asked.token_ids.reshape(-1, length), asked.lengths.reshape(-1)
    target = asked.target.reshape(-1, length, length)
    size = min(BATCH, len(token_ids))
    found = []
    for start in range(0, len(token_ids), size):  # the last batch reaches back, so that all have one shape
        at = slice(min(start, len(token_ids) - size), None if start + size >= len(token_ids) else start + size)
        score = jax.tree_util.Partial(scores, jnp.asarray(target[at], jnp.float32))
        _, batch = model(token_ids[at], lengths[at], observe=score)
        found.append(np.asarray(batch, np.float64)[:, start - at.start :])
    by_example = np.concatenate(found, axis=1)  # [L, sequences, N]
    by_example = by_example.reshape(by_example.shape[0], examples, sentences, -1).mean(axis=2)
    return [
        {"arm": arm, "role": role, "example": example, "layer": layer, "head": head, "value": float(value)}
        for (layer, example, head), value in np.ndenumerate(by_example)
    ]


def scores(
    target: Float[Array, "b t t"],
    query: Float[Array, "b t n h"],
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k v"],
    **options: object,
) -> Float[Array, "b n"]:
    """Weights times targets, summed: what `Transformer`'s `observe` calls in every layer."""
    del value
    weights = attn_jax.attention_weights(query, key, **options)  # pyright: ignore[reportArgumentType]
    return jnp.einsum("bnts,bts->bn", weights, target)


def cube(measurements: pd.DataFrame, arm: str, role: str) -> np.ndarray:
    """Scores of an arm, `[examples, L, N]`."""
    chosen = measurements.query("arm == @arm and role == @role").sort_values(["example", "layer", "head"])
    shape = [len(chosen[axis].unique()) for axis in ("example", "layer", "head")]
    return chosen["value"].to_numpy(np.float64).reshape(shape)


def best_head(values: np.ndarray) -> tuple[tuple[int, int], np.ndarray]:
    """The head that scores most on every other example, and its scores on those between: chosen and judged apart."""
    layer, head = np.unravel_index(values[::2].mean(axis=0).argmax(), values.shape[1:])
    return (int(layer), int(head)), values[1::2, layer, head]


def judge(config: RolesConfig, measurements: pd.DataFrame) -> list[Outcome]:
    evidence = {}
    for role in ROLE_LINES:
        for arm, name in zip(ARMS, (role, f"{role}_random"), strict=True):
            evidence[name] = estimates.mean(best_head(cube(measurements, arm, role))[1])
    scope = {"model": config.model, "documents": config.documents, "tokens": config.max_tokens}
    return [claims.judge("H8", evidence, **scope)]


def tables(config: RolesConfig, measurements: pd.DataFrame) -> list[Table]:
    """The best head of each kind, how many heads are of it, and how many of those are of another kind too."""
    means = {role: cube(measurements, "model", role).mean(axis=0) for role in ROLE_LINES}
    over = {role: means[role] > line for role, line in ROLE_LINES.items()}
    rows = []
    for role, line in ROLE_LINES.items():
        (layer, head), values = best_head(cube(measurements, "model", role))
        _, control = best_head(cube(measurements, "random_weights", role))
        others = [over[other] for other in ROLE_LINES if other not in (role, "local")]
        shared = (over[role] & np.any(others, axis=0)).sum()
        rows.append(
            (role.replace("_", " "), f"{layer}.{head}", str(estimates.mean(values)), str(estimates.mean(control)),
             f"{line:g}", str(over[role].sum()), str(shared))
        )  # fmt: skip
    columns = ("kind", "best head", "its score", "at random weights", "line", "heads over it", "of another kind too")
    return [Table(f"{config.model}: heads by what they do", columns, tuple(rows))]


def figure(config: RolesConfig, measurements: pd.DataFrame) -> Figure:
    """A heat map of layers × heads for each kind, and the scores in order beside those at random weights."""
    drawn, axes = figures.panels(2, len(ROLE_LINES), width=3.2, height=3.6)
    for column, (role, line) in enumerate(ROLE_LINES.items()):
        means = {arm: cube(measurements, arm, role).mean(axis=0) for arm in ARMS}
        above, below = axes[0, column], axes[1, column]
        above.grid(visible=False)
        reach = max(float(np.abs(means["model"]).max()), line)
        colours = above.imshow(means["model"], aspect="auto", cmap="RdBu_r", vmin=-reach, vmax=reach)
        drawn.colorbar(colours, ax=above)
        above.set_title(role.replace("_", " "))
        above.set_xlabel("head")
        for index, (arm, values) in enumerate(means.items()):
            label = arm.replace("_", " ")
            figures.curve(below, index, np.arange(values.size) + 1, np.sort(values.ravel())[::-1], label, markersize=2)
        below.axhline(line, color="#888888", linestyle="--", linewidth=1)
        below.set_xscale("log")
        below.set_xlabel("heads, by score")
    axes[0, 0].set_ylabel("layer")
    axes[1, 0].set_ylabel("score")
    axes[1, 0].legend(fontsize=8)
    return drawn


EXPERIMENT = Experiment(
    name="head_roles",
    question="Do heads specialise: local, previous token, induction, syntax, coreference?",
    config=RolesConfig,
    presets={
        "smoke": {"documents": 10, "max_tokens": 32},
        "quick": {},
        "full": {"documents": 64, "max_tokens": 256},
    },
    units=units,
    judge=judge,
    figure=figure,
    alt="For each kind of head a heat map of its score, layers downwards and heads across, and below it the scores of "
    "all heads in order, beside those of the same architecture at random weights.",
    tables=tables,
    inputs=inputs,
    documentation=__doc__ or "",
)


def run(config: RolesConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)

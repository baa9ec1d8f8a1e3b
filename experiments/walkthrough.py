"""What happens to a sentence, link by link, and what does each choice change?

Claims: none; it shows the chain on a few words.
Command: python -m experiments.walkthrough --sentence="I love eating apples" --scale_rule=none --tie_qk --causal
Time: 10 s at every preset. Nothing is downloaded.

Words become random unit-variance vectors (the same word, the same vector), and untrained attention routes between
them: the numbers show what the links do before any learning. Each flag that differs from its default is compared with
the default alone, and all together.
"""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import attn_jax
from attn_jax import positions, projections, scaling
from attn_jax.diagnostics import attention_statistics
from attn_jax.typing import Array
from experiments import figures, harness
from experiments.artifacts import Row
from experiments.command_line import printable
from experiments.config import Config, option
from experiments.harness import Experiment, Result, Unit
from experiments.progress import Table

RULES = ("inverse_sqrt", "none", "inverse", "inverse_sqrt_model", "half_inverse_sqrt", "half_inverse")
CHOICES = ("scale_rule", "tie_qk", "num_heads", "causal", "positions")
SHOWN = 10  # words of a table
LABELS = {
    "logit_variance": "variance of the logits in a row",
    "entropy": "mean normalised entropy",
    "max_weight": "mean largest weight",
    "self_weight": "mean weight on the word itself",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkthroughConfig(Config):
    """Flags of this experiment."""

    sentence: str = option("I love eating apples", "the words to route between")
    scale_rule: str = option("inverse_sqrt", "what multiplies q·k", choices=RULES)
    tie_qk: bool = option(False, "use the query's projection for the key as well")
    num_heads: int = option(4, "heads that split the width", least=1, most=1024)
    causal: bool = option(False, "hide the words that follow")
    positions: str = option("rotary", "how a word knows where it sits", choices=("rotary", "sinusoidal", "none"))
    width: int = option(64, "model width D", least=2, most=4096)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= len(self.words) <= 512:
            raise ValueError(f"sentence must have 2 to 512 words, got {len(self.words)} in {self.sentence[:60]!r}")
        for heads in {self.num_heads, type(self).num_heads}:
            if self.width % (2 * heads):
                raise ValueError(f"width must be a multiple of 2 · num_heads = {2 * heads}, got {self.width}")

    @property
    def words(self) -> list[str]:
        """What attends to what."""
        return self.sentence.split()

    def changed(self) -> list[str]:
        """The choices that differ from their defaults."""
        return [name for name in CHOICES if getattr(self, name) != getattr(type(self), name)]

    def arms(self) -> dict[str, "WalkthroughConfig"]:
        """By name: the default, each changed choice alone, and what was asked for."""
        default = dataclasses.replace(self, **{name: getattr(type(self), name) for name in CHOICES})
        arms: dict[str, WalkthroughConfig] = {"default": default}
        if len(self.changed()) > 1:
            for name in self.changed():
                arms[name] = dataclasses.replace(default, **{name: getattr(self, name)})
        arms["asked"] = self
        return arms


def units(config: WalkthroughConfig) -> list[Unit]:
    return [Unit(name, lambda name=name, arm=arm: walk(name, arm)) for name, arm in config.arms().items()]


def walk(name: str, config: WalkthroughConfig) -> list[Row]:
    """One sentence through the chain: rows of each link's shape and variance, and of the weights."""
    length, width, heads = len(config.words), config.width, config.num_heads
    head_width = width // heads
    links: list[tuple[str, str, Array]] = []

    x = embed(config)
    links.append(("words", "a vector for each word", x))
    if config.positions == "sinusoidal":
        x = x + positions.sinusoidal(jnp.arange(length), width)
        links.append(("positions", "sinusoids are added", x))

    weights = {role: initialize(config, role) for role in ("query", "key", "value", "output")}
    split = (width, heads, head_width)
    query, key, value = projections.project_qkv(
        x,
        weights["query"].reshape(split),
        None if config.tie_qk else weights["key"].reshape(split),
        weights["value"].reshape(split),
    )
    matrices = "W_Q (= W_K) and W_V" if config.tie_qk else "W_Q, W_K and W_V"
    links.append(("projections", f"{matrices}; the query is shown", projections.merge_heads(query)))
    links.append(("heads", f"{heads} of width {head_width}", query))
    if config.positions == "rotary":
        query, key = (positions.apply_rotary(x, jnp.arange(length)) for x in (query, key))
        links.append(("positions", "query and key are rotated", query))

    scale = scaling.scale_factor(config.scale_rule, head_width, width)
    unscaled = jnp.einsum("tnh,snh->nts", query, key)
    links.append(("match", "q·k of each pair", unscaled))
    links.append(("scale", f"× {scale:.4g} ({config.scale_rule})", scale * unscaled))
    options = {"scale": scale, "is_causal": config.causal}
    routing = attn_jax.attention_weights(query, key, **options)
    seen = "the words so far" if config.causal else "every word"
    links.append(("mask and softmax", f"each row sums to 1 over {seen}", routing))
    fetched = attn_jax.dot_product_attention(query, key, value, **options)
    links.append(("values", "fetched by weight", fetched))
    output = projections.project_out(fetched, weights["output"].reshape(heads, head_width, width))
    links.append(("output projection", "the heads are mixed", output))

    rows: list[Row] = [
        {"arm": name, "measure": "variance", "step": step, "link": link, "note": note, "shape": shape(array),
         "value": float(jnp.var(array))}
        for step, (link, note, array) in enumerate(links)
    ]  # fmt: skip
    for head, query_word, key_word in np.ndindex(routing.shape):
        value_here = float(routing[head, query_word, key_word])
        at = {"head": head, "query": query_word, "key": key_word}
        rows.append({"arm": name, "measure": "weight", **at, "value": value_here})
    return rows + summarize(name, query, key, **options)


def summarize(name: str, query: Array, key: Array, **options: object) -> list[Row]:
    """Per word and head: entropy, the largest weight and that on itself; the variance of what is visible."""
    fields = ("normalized_entropy", "max_weight", "diagonal_mass", "logit_variance", "visible_keys")
    found = attention_statistics(query, key, statistics=fields, **options)  # pyright: ignore[reportArgumentType]
    assert found.visible_keys is not None
    several = np.asarray(found.visible_keys) > 1  # one visible word is no choice
    columns = {
        "entropy": found.normalized_entropy,
        "max_weight": found.max_weight,
        "self_weight": found.diagonal_mass,
        "logit_variance": found.logit_variance,
    }
    return [
        {"arm": name, "measure": measure, "head": head, "query": word, "value": float(np.asarray(column)[word, head])}
        for measure, column in columns.items()
        for word, head in zip(*np.nonzero(several), strict=True)
    ]


def embed(config: WalkthroughConfig) -> Array:
    """A unit-variance vector for each word, `[T, D]`: equal words have equal vectors, whatever the sentence."""
    root = jax.random.key(config.seed)
    keys = [jax.random.fold_in(root, zlib.crc32(word.lower().encode())) for word in config.words]
    return jnp.stack([jax.random.normal(key, (config.width,)) for key in keys])


def initialize(config: WalkthroughConfig, role: str) -> Array:
    """A projection `[D, D]` with entries of variance 1/D, which keeps the variance of what passes."""
    key = jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(f"projection {role}".encode()))
    return jax.random.normal(key, (config.width, config.width)) / np.sqrt(config.width)


def shape(array: Array) -> str:
    return " × ".join(map(str, array.shape))


def tables(config: WalkthroughConfig, measurements: pd.DataFrame) -> list[Table]:
    asked = measurements.query("arm == 'asked'")
    links = asked.query("measure == 'variance'")
    chain = tuple(
        (str(row["link"]), str(row["note"]), str(row["shape"]), f"{row['value']:.3g}")
        for row in links.to_dict("records")
    )
    return [
        Table("The chain", ("link", "what it does", "shape", "variance"), chain),
        _weights_table(config, asked),
        _changes_table(config, measurements),
    ]


def _weights_table(config: WalkthroughConfig, asked: pd.DataFrame) -> Table:
    words = config.words[:SHOWN]
    weights = _weights(asked)[0, :SHOWN, :SHOWN]
    rows_of_head = asked.query("measure == 'entropy' and head == 0")
    entropies = dict(zip(rows_of_head["query"].astype(int), rows_of_head["value"], strict=True))
    rows = tuple(
        (word, *(f"{weight:.2f}" for weight in weights[i]), f"{entropies[i]:.2f}" if i in entropies else "–")
        for i, word in enumerate(words)
    )
    more = f"; the first {SHOWN} of {len(config.words)} words" if len(config.words) > SHOWN else ""
    title = f"Weights of head 0, untrained, between random vectors: a row says where its word looks{more}"
    return Table(title, ("word", *words, "entropy / ln n"), rows)


def _changes_table(config: WalkthroughConfig, measurements: pd.DataFrame) -> Table:
    rows = []
    for arm, settings in config.arms().items():
        if arm == "asked" and not config.changed():
            continue
        changed = "\n".join(f"{name}={getattr(settings, name)}" for name in settings.changed()) or "the defaults"
        rows.append((changed, *(f"{_mean(measurements, arm, measure):.3g}" for measure in LABELS)))
    hint = "" if config.changed() else " (nothing: try --scale_rule=none or --tie_qk)"
    return Table(f"What each flag changed{hint}", ("flags", *LABELS.values()), tuple(rows))


def _mean(measurements: pd.DataFrame, arm: str, measure: str) -> float:
    return float(np.mean(measurements.query("arm == @arm and measure == @measure")["value"]))


def _weights(asked: pd.DataFrame) -> np.ndarray:
    """`[N, T, T]`."""
    weights = asked.query("measure == 'weight'").sort_values(["head", "query", "key"])
    length = len(weights["query"].unique())
    return weights["value"].to_numpy().reshape(-1, length, length)


def figure(config: WalkthroughConfig, measurements: pd.DataFrame) -> Figure:
    words = [printable(word) for word in config.words]
    chosen = "\n".join(f"{name}={getattr(config, name)}" for name in config.changed())
    titles = {"asked": chosen, "default": "default"} if chosen else {"asked": "default"}
    weights = {arm: _weights(measurements.query("arm == @arm"))[:4] for arm in titles}
    drawn, axes = figures.panels(len(titles), max(map(len, weights.values())), width=3.4, height=3.6)
    for row, (arm, title) in zip(axes, titles.items(), strict=True):
        for one in row[len(weights[arm]) :]:
            one.set_visible(False)
        for head, (one, square) in enumerate(zip(row, weights[arm], strict=False)):
            one.grid(visible=False)
            one.imshow(square, vmin=0, vmax=1, cmap="viridis")
            one.set_title(f"head {head}")
            one.set_xlabel("key")
            if len(words) <= 16:
                one.set_xticks(range(len(words)), words, rotation=60, ha="right", parse_math=False)
                one.set_yticks(range(len(words)), words, parse_math=False)
        row[0].set_ylabel(f"{title}\n\nquery")
    drawn.colorbar(axes[0, 0].images[0], ax=axes, label="weight")
    return drawn


EXPERIMENT = Experiment(
    name="walkthrough",
    question="What happens to a sentence, link by link, and what does each choice change?",
    config=WalkthroughConfig,
    presets={"smoke": {}, "quick": {}, "full": {}},
    units=units,
    judge=lambda config, measurements: (),
    figure=figure,
    alt="The weights of the first heads as squares, as asked for and, below, with the defaults: each row of a square "
    "says where its word looks.",
    tables=tables,
    documentation=__doc__ or "",
)


def run(config: WalkthroughConfig) -> Result:
    """The chain for one sentence."""
    return harness.run(EXPERIMENT, config)


if __name__ == "__main__":
    harness.main(EXPERIMENT)

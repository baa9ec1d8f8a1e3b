"""What the page shows of a model: how its heads route one text.

A forward pass brings, of every layer, the weights in a window of the text, the entropy by position and the spectrum of
the scores. Memory grows with T + S: the weights are fetched, by values that say which key they belong to.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import dot_product_attention
from attn_jax.diagnostics import attention_statistics, head_clusters, head_similarity, logit_spectrum
from attn_jax.diagnostics.diagnosis import Captures, Diagnosis, diagnose
from attn_jax.nn import Transformer
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int

MOST_POSITIONS = 256  # of the curves: no screen shows more
ALIKE = 0.3  # mean √divergence up to which clusters of heads are merged


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Look:
    """What one layer shows; of a model with a leading axis of layers.

    Attributes:
        pattern: `[N, W, C]`, weights of the queries of the window on its keys, then on all keys before and all after.
        choosing: `[N, W]`, whether a query of the window sees two keys or more.
        entropy: `[N, P]`, H / ln n at the positions of the curve.
        spectrum: `[N, R]`, singular values of the centred scores.
    """

    pattern: Float[Array, "*l n w c"]
    choosing: Bool[Array, "*l n w"]
    entropy: Float[Array, "*l n p"]
    spectrum: Float[Array, "*l n r"]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that has been looked at.

    Attributes:
        name: of the model.
        text: where the tokens come from.
        tokens: texts of the tokens in the window.
        start: position of its first token.
        length: T, tokens that the model read.
        diagnosis: findings and measures of all T tokens.
        look: `[L, ...]`, as NumPy arrays.
        positions: `[P]`, those of `look.entropy`.
        divergence: `[L N, L N]`, between the patterns of any two heads, of head `layer · N + head`.
        clusters: `[L N]`, a label for each head; heads that look alike share it.
    """

    name: str
    text: str
    tokens: tuple[str, ...]
    start: int
    length: int
    diagnosis: Diagnosis
    look: Look
    positions: Int[np.ndarray, " p"]
    divergence: Float[np.ndarray, "h h"]
    clusters: Int[np.ndarray, " h"]


def look(
    columns: Float[Array, "s c"],
    rows: Int[Array, " w"],
    positions: Int[Array, " p"],
    query: Float[Array, "t n h"],
    key: Float[Array, "s k h"],
    value: Any,
    bias: Any = None,
    mask: Any = None,
    **options: Any,
) -> Look:
    """An `observe` function, after its first three arguments: what a layer shows.

    Args:
        columns: which keys belong together; a column is 1 at its keys.
        rows: the queries of the window.
        positions: the queries of the curve.
        query, key, value, bias, mask, options: what the attention of the layer gets.
    """
    del value
    which = jnp.broadcast_to(columns[:, None].astype(key.dtype), (*key.shape[:2], columns.shape[1]))
    fetched = dot_product_attention(query, key, which, bias, mask, **options)  # [T, N, C]
    of_window = attention_statistics(query, key, bias, mask, statistics=("visible_keys",), rows=rows, **options)
    curve = attention_statistics(query, key, bias, mask, statistics=("normalized_entropy",), rows=positions, **options)
    assert of_window.visible_keys is not None
    assert curve.normalized_entropy is not None
    scale = options.get("scale")
    factor = jnp.asarray(query.shape[-1] ** -0.5 if scale is None else scale)
    return Look(
        pattern=jnp.moveaxis(fetched[rows], 0, 1),
        choosing=of_window.visible_keys.T >= 2,
        entropy=curve.normalized_entropy.T,
        spectrum=logit_spectrum(query, key, scale=1.0) * jnp.abs(factor.reshape(-1, 1)),
    )


@jax.jit
def _look_at_model(model: Transformer, token_ids: Array, columns: Array, rows: Array, positions: Array) -> Look:
    return model(token_ids, observe=jax.tree_util.Partial(look, columns, rows, positions))[1]  # logits: nobody asks


class Window:
    """The part of a text that is shown token by token, and the positions of the curves.

    Args:
        window: first and last (not included) position; the text may end before the last.
        length: T, tokens of the text.

    Raises:
        ValueError: a window that holds no token of the text.
    """

    def __init__(self, window: tuple[int, int], length: int) -> None:
        self.start, self.stop, self.length = window[0], min(window[1], length), length
        if not 0 <= self.start < self.stop:
            raise ValueError(f"window must hold tokens of the {length} that were read, got {window[0]}:{window[1]}")
        self.rows = np.arange(self.start, self.stop)
        self.positions = np.unique(np.linspace(0, length - 1, min(MOST_POSITIONS, length)).round().astype(int))

    def columns(self, num_keys: int) -> Float[np.ndarray, "s c"]:
        """A column for each key of the window, one for those before and one for those after it."""
        keys = np.arange(num_keys)[:, None]
        return np.concatenate([keys == self.rows, keys < self.start, keys >= self.stop], axis=1).astype(np.float32)

    def subject(self, shown: Look, diagnosis: Diagnosis, tokens: Sequence[str], *, name: str, text: str) -> Subject:
        """What was looked at, and which heads look alike."""
        layers, heads, rows, columns = shown.pattern.shape
        # A query that sees one key cannot differ between heads: it is left out as one that sees nothing.
        chosen = jnp.where(shown.choosing[..., None], shown.pattern, 0)
        divergence = np.asarray(head_similarity(chosen.reshape(layers * heads, rows, columns)), np.float64)
        divergence = np.where(np.isfinite(divergence), divergence, 1.0)  # no row in common: nothing in common
        np.fill_diagonal(divergence, 0.0)
        return Subject(
            name=name,
            text=text,
            tokens=tuple(tokens[self.start : self.stop]),
            start=self.start,
            length=self.length,
            diagnosis=diagnosis,
            look=jax.tree.map(np.asarray, shown),
            positions=self.positions,
            divergence=divergence,
            clusters=np.asarray(head_clusters(np.sqrt(divergence), threshold=ALIKE)),
        )


def subject_of_model(
    model: Transformer,
    token_ids: Int[ArrayLike, " t"],
    tokens: Sequence[str],
    *,
    name: str,
    text: str,
    window: tuple[int, int],
) -> Subject:
    """Looks at a model that reads one text.

    Args:
        model: whose layers are all attention.
        token_ids: int `[T]`.
        tokens: the text of each.
        name: of the model.
        text: of where the tokens come from.
        window: first and last (not included) position of what is shown token by token.

    Raises:
        ValueError: a window that holds no token of the text.
    """
    token_ids = jnp.asarray(token_ids, jnp.int32)
    of_window = Window(window, len(token_ids))
    columns = of_window.columns(len(token_ids))
    shown = _look_at_model(model, token_ids, columns, of_window.rows, of_window.positions)
    return of_window.subject(shown, diagnose(model, token_ids, name=name), tokens, name=name, text=text)


def subject_of_captures(captures: Captures, *, name: str, window: tuple[int, int]) -> Subject:
    """Looks at captured arrays, of the first sequence of their batch; what the tokens were is not known.

    Args, Raises: as `subject_of_model`; also ValueError where layers have other numbers of queries or keys.
    """
    arrays = {layer: captures.layer_arrays(layer) for layer in captures.layers}
    _, _, length, num_keys = next(iter(arrays.values())).square
    for layer, own in arrays.items():
        if own.square[2:] != (length, num_keys):
            raise ValueError(
                f"layers must have {length} queries and {num_keys} keys, got {own.square[2:]} in layer {layer}"
            )
    of_window = Window(window, length)
    shown = []
    for own in arrays.values():
        query, key = (jnp.asarray(x[0], jnp.float32) for x in (own.query, own.key))
        options = {"mask": None if own.visible is None else own.visible[0], "scale": own.scale}
        given = {option: jnp.asarray(x) for option, x in options.items() if x is not None}
        found = _look_at_arrays(
            of_window.columns(num_keys), of_window.rows, of_window.positions, query, key, None, **given
        )
        shown.append(jax.tree.map(np.asarray, found))
    tokens = [f"t{i}" for i in range(length)]
    return of_window.subject(_stacked(shown), diagnose(captures, name=name), tokens, name=name, text="captured arrays")


_look_at_arrays = jax.jit(look)


def _stacked(shown: Sequence[Look]) -> Look:
    """Of all layers; not known where a layer has fewer heads, or a narrower one fewer singular values."""

    def stack(*fields: np.ndarray) -> np.ndarray:
        most = np.max([x.shape for x in fields], axis=0)
        unknown = False if fields[0].dtype == bool else np.nan
        padding = [[(0, wanted - size) for wanted, size in zip(most, x.shape, strict=True)] for x in fields]
        return np.stack([np.pad(x, pad, constant_values=unknown) for x, pad in zip(fields, padding, strict=True)])

    return jax.tree.map(stack, *shown)

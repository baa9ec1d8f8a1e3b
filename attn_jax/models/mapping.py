"""From the tensors of a file to the parameters of a `Transformer`, by a family's name map.

A name map says where each stored tensor goes; a tensor that is stored fused stands in it once for each of its parts.
Nothing is allocated before every tensor is known to be there, in the shape that the configuration demands, and to have
a place: a model is loaded whole or not at all.
"""

import dataclasses
import math
import operator
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_jax.models.checkpoint import WeightFile
from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.nn.parameters import OutputMajor

Convert = Callable[[np.ndarray], np.ndarray]

_MOST_WIDTH = 1 << 20  # a configuration computes its rotary frequencies at once: a width that lies must not size them


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a name map.

    Attributes:
        stored: name in the file; `{}` stands for the layer's number where the parameter is stacked over layers.
        shape: of the stored tensor, slowest axis first.
        parameter: path in the `Transformer`, dotted.
        convert: from the stored layout to the parameter's, without the axis of layers.
    """

    stored: str
    shape: tuple[int, ...]
    parameter: str
    convert: Convert = lambda values: values

    @property
    def stacked(self) -> bool:
        """Whether there is one such tensor in each layer."""
        return "{}" in self.stored

    def names(self, num_layers: int) -> list[str]:
        """The tensors of this line: one a layer, or one alone."""
        return [self.stored.format(layer) for layer in range(num_layers)] if self.stacked else [self.stored]


def checked_config(path: pathlib.Path, **choices: Any) -> TransformerConfig:
    """The `TransformerConfig` of `choices`; what is wrong with them is an error of the file at `path`."""
    try:
        for name in ("model_width", "head_width"):
            size = choices.get(name)
            if size is not None and size > _MOST_WIDTH:
                raise ValueError(f"{name} must be at most {_MOST_WIDTH}, got {size}")
        return TransformerConfig(**choices)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def sizes_of(config: TransformerConfig) -> tuple[int, int, int, int, int, int]:
    """D, F, N, K, H, V: widths of model and MLP, heads of queries and of keys and values, widths of both."""
    read = operator.attrgetter("model_width", "mlp_width", "num_heads", "num_kv_heads", "head_width", "value_width")
    return read(config)


def prefix_of(file: WeightFile, word: str) -> str:
    """`word` if names in the file begin with it, else nothing: the same model is stored with it, or alone without."""
    return word if any(name.startswith(word) for name in file.names) else ""


def rows_to_heads(count: int) -> Convert:
    """A linear layer `[count · H, D]`, stored output first, as a projection into heads `[D, count, H]`."""
    return lambda rows: rows.T.reshape(rows.shape[1], count, -1)


def bias_to_heads(count: int) -> Convert:
    """The bias of a projection `[count · H]`, as `[count, H]`."""
    return lambda bias: bias.reshape(count, -1)


def columns_to_heads(count: int) -> Convert:
    """A linear layer `[D, count · V]`, stored output first, as a projection out of heads `[count, V, D]`."""
    return lambda columns: columns.T.reshape(count, -1, columns.shape[0])


def check_map(
    file: WeightFile, config: TransformerConfig, entries: Sequence[Entry], buffers: Sequence[str] = ()
) -> tuple[str, ...]:
    """Raises unless every tensor of a name map is in the file, and every tensor of the file in the map or a buffer.

    Args:
        file: the opened file.
        config: the model's sizes and choices.
        entries: the family's name map for that configuration.
        buffers: patterns of names that may stand in the file and that the model has no use for.

    Returns:
        Names of the tensors that are such buffers, sorted.

    Raises:
        ValueError: a tensor is missing, misshapen or has no place; by name.
    """
    unplaced = set(file.names)
    for layer in range(config.num_layers):  # layer by layer: a count that lies stops at the first missing one
        for entry in entries:
            name = entry.stored.format(layer)
            if layer == 0 or entry.stacked:
                file.check(name, entry.shape)
                unplaced.discard(name)
    unused = {name for name in unplaced if any(re.fullmatch(pattern, name) for pattern in buffers)}
    if unplaced > unused:
        names = ", ".join(map(repr, sorted(unplaced - unused)))
        raise ValueError(f"{file.path}: tensor {names} has no place in this model")
    return tuple(sorted(unused))


def load_weights(file: WeightFile, config: TransformerConfig, entries: Sequence[Entry]) -> Transformer:
    """The `Transformer` of `config` with every parameter taken from `file`.

    Args:
        file: the opened file, which `check_map` has passed.
        config: the model's sizes and choices.
        entries: the family's name map for that configuration.

    Returns:
        Transformer: its parameters in float32, the weights of products kept output-major, as the files have them.

    Raises:
        ValueError: a parameter has no tensor, by name; or sizes do not go together.
    """
    # The module is built in the abstract: no initial value exists that a forgotten tensor could leave behind.
    try:
        skeleton = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    except ValueError as error:  # sizes that do not go together
        raise ValueError(f"{file.path}: {error}") from error
    graph, state = nnx.split(skeleton)
    parameters = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    unset = parameters.keys() - {entry.parameter for entry in entries}
    if unset:
        raise ValueError(f"{file.path}: no tensor for parameter {', '.join(sorted(unset))}")
    # The largest first: a parameter is held twice while it is handed over, and then little else is held.
    for entry in sorted(entries, key=lambda entry: -parameters[entry.parameter].get_value().size):
        parameters[entry.parameter] = _stack(file, config, entry, parameters[entry.parameter])
    flat = [(path, parameters[".".join(map(str, path))]) for path, _ in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _stack(file: WeightFile, config: TransformerConfig, entry: Entry, expected: nnx.Variable) -> nnx.Param:
    """One parameter with its values; dequantised tensor by tensor into its place, so that little is held twice."""
    shape, metadata = expected.get_value().shape, expected.get_metadata()
    fan_in, fan_out = metadata.get("fan_in", ()), metadata.get("fan_out", ())
    own = shape[1:] if entry.stacked else shape  # of one layer
    kept_shape = (math.prod(fan_out), math.prod(fan_in)) if fan_in else own  # the weight of a product is output-major

    def read(name: str) -> np.ndarray:
        values = entry.convert(file.tensor(name, entry.shape))
        if values.shape != own:
            raise ValueError(f"{entry.parameter} takes shape {own} of {name!r}, the map gives {values.shape}")
        return values.reshape(kept_shape[::-1]).T if fan_in else values

    names = entry.names(config.num_layers)
    if entry.stacked:
        kept = np.empty((len(names), *kept_shape), np.float32)
        for place, name in zip(kept, names, strict=True):
            place[...] = read(name)
    else:
        kept = read(*names)
    values = jnp.asarray(kept, expected.dtype)
    return OutputMajor(values, fan_in=fan_in, fan_out=fan_out) if fan_in else nnx.Param(values)

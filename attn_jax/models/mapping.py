"""From the tensors of a file to the parameters of a `Transformer`, by a family's name map.

A name map says where each stored tensor goes. Nothing is allocated before every tensor is known to be there, in the
shape that the configuration demands, and to have a place: a model is loaded whole or not at all.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_jax.models.gguf_file import GGUFFile
from attn_jax.nn import Transformer, TransformerConfig

Convert = Callable[[np.ndarray], np.ndarray]


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


def load_weights(file: GGUFFile, config: TransformerConfig, entries: Sequence[Entry]) -> Transformer:
    """The `Transformer` of `config` with every parameter taken from `file`.

    Args:
        file: the opened file.
        config: the model's sizes and choices.
        entries: the family's name map for that configuration.

    Returns:
        Transformer: its parameters in float32.

    Raises:
        ValueError: a tensor is missing, misshapen or has no place, or a parameter has no tensor; by name.
    """
    _check_tensors(file, config, entries)
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
        variable = parameters[entry.parameter]
        variable.set_value(_stack(file, config, entry, variable.get_value()))
    return nnx.merge(graph, state)


def _check_tensors(file: GGUFFile, config: TransformerConfig, entries: Sequence[Entry]) -> None:
    unplaced = set(file.tensors)
    for layer in range(config.num_layers):  # layer by layer: a count that lies stops at the first missing one
        for entry in entries:
            name = entry.stored.format(layer)
            if layer == 0 or entry.stacked:
                file.check(name, entry.shape)
                unplaced.discard(name)
    if unplaced:
        raise ValueError(f"{file.path}: tensor {', '.join(map(repr, sorted(unplaced)))} has no place in this model")


def _stack(file: GGUFFile, config: TransformerConfig, entry: Entry, expected: jax.ShapeDtypeStruct) -> jax.Array:
    """The value of one parameter; dequantised tensor by tensor into its place, so that little is held twice."""
    out = np.empty(expected.shape, np.float32)
    for layer, name in enumerate(entry.names(config.num_layers)):
        place = out[layer] if entry.stacked else out
        values = entry.convert(file.tensor(name, entry.shape))
        if values.shape != place.shape:
            raise ValueError(f"{entry.parameter} takes shape {place.shape} of {name!r}, the map gives {values.shape}")
        place[...] = values
    return jnp.asarray(out, expected.dtype)

"""What is a checkpoint made of, as far as its headers and settings say?

Command: python -m experiments.inspect_checkpoint --path=smollm2
Time: 2 s: no weight is read.

The path is that of a GGUF file, of a folder as Hugging Face has it or of the weights in it, or a checkpoint's name.
What is shown went through the same checks as a model that is loaded: every tensor is there and has its place.
"""

import collections
import itertools
import math
import sys
from collections.abc import Sequence

from absl import flags

from attn_jax import models
from attn_jax.models import hub_folder
from attn_jax.models.gguf_file import GGUFFile
from attn_jax.models.loading import OpenedCheckpoint, open_checkpoint
from attn_jax.nn import TransformerConfig
from attn_jax.nn.options import AttentionConfig
from experiments import command_line
from experiments.progress import Table, show

HELP = f"a checkpoint ({', '.join(models.CHECKPOINTS)}) or the path of a file or folder"
_NORMS = {"pre": "before attention and MLP", "post": "after each sum", "both": "before and after attention and MLP"}
_BIASES = {True: "in attention and MLP", False: "none", "attention": "in attention", "mlp": "in the MLP"}
_HEADS = {"tied": "the embedding, transposed", "untied": "weights of its own", None: "none: hidden states come out"}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; its status."""
    return command_line.run(_main, argv)


def _main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_string("path", None, HELP, flag_values=values)
    flags.DEFINE_bool("help", False, "show this help", flag_values=values)
    with command_line.refusing():
        try:
            rest = values(list(argv))[1:]
        except flags.Error as error:
            raise ValueError(str(error)) from error
        if rest:
            raise ValueError(f"unexpected argument {rest[0]!r}; flags look like --name=value")
        if values["help"].value:
            command_line.say(f"{(__doc__ or '').strip()}\n\nFlags:\n  --path: {HELP}")
            return 0
        if not values["path"].value:
            raise ValueError(f"flag --path must be {HELP}")
        table = describe(str(values["path"].value))
    show(table)
    return 0


def describe(name_or_path: str) -> Table:
    """The table of a checkpoint, from its headers and settings alone.

    Args:
        name_or_path: as in `attn_jax.models.load`.

    Returns:
        Table: what there is to say, by name.

    Raises:
        OSError, ValueError: as `attn_jax.models.load`.
    """
    opened = open_checkpoint(name_or_path)
    config = opened.config
    tensors = opened.file.tensors
    kinds = collections.Counter(getattr(tensor.kind, "name", tensor.kind) for tensor in tensors.values())
    tokenizer, has_template = _words(opened)
    rows = [
        ("file", str(opened.file.path)),
        ("family", f"{opened.architecture} ({'decoder' if config.causal else 'encoder'})"),
        ("layers", str(config.num_layers)),
        ("heads", f"{config.num_heads} of queries, {config.num_kv_heads} of keys and values"),
        ("widths", _widths(config)),
        ("vocabulary", f"{config.vocabulary_size:,}"),
        ("positions", _positions(config)),
        ("norms", _norms(config)),
        ("MLP", f"{config.mlp}, {config.activation}"),
        ("biases", _BIASES[config.use_bias]),
        ("logits", _logits(config)),
        ("head", _HEADS[config.head]),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())),
        ("not used", ", ".join(opened.unmapped) or "none"),
        ("parameters", _size(opened)),
        ("tokenizer", tokenizer),
        ("chat template", "yes" if has_template else "no"),
    ]
    return Table("Checkpoint", ("", "as its headers and settings say"), tuple(rows))


def _widths(config: TransformerConfig) -> str:
    values = "" if config.value_width == config.head_width else f", values {config.value_width}"
    return f"model {config.model_width}, head {config.head_width}{values}, MLP {config.mlp_width}"


def _positions(config: TransformerConfig) -> str:
    """How positions are told, and the window; a line for each kind of layer."""
    if config.positions != "rotary":
        table = f", at most {config.max_length}" if config.max_length else ""
        types = f"; {config.num_token_types} token types" if config.num_token_types else ""
        return f"{config.positions}{table}{types}"
    pattern = [kind for kind in config.layer_attention if kind is not None]  # all: a checkpoint has no other mixers
    lines = []
    for kind in dict.fromkeys(pattern):
        layers = [layer for layer in range(config.num_layers) if pattern[layer % len(pattern)] == kind]
        where = f"layers {_ranges(layers)}: " if len(set(pattern)) > 1 else ""
        scaling = f", {kind.rotary_scaling}" if kind.rotary_scaling else ""
        lines.append(f"{where}rotary, base {kind.rotary_base:,.15g}{scaling}, {_window(kind)}")
    return "\n".join(lines)


def _window(kind: AttentionConfig) -> str:
    if kind.window is None:
        return "all keys"
    left, right = kind.window
    return f"a window of {left + 1 + right} keys, {left} before the query's own" + (
        f" and {right} after" if right else ""
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers that rise, as `0-4, 6-10`."""
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _norms(config: TransformerConfig) -> str:
    own = f", {config.qk_norm} on queries and keys" if config.qk_norm else ""
    first = ", one after the embedding" if config.embedding_norm else ""
    return f"{config.norm}, {_NORMS[config.norm_position]}{own}{first}; epsilon {config.norm_epsilon:.3g}"


def _logits(config: TransformerConfig) -> str:
    cap = f", soft cap {config.logits_soft_cap:g}" if config.logits_soft_cap else ""
    scaled = ", embeddings times √D" if config.scale_embedding else ""
    first = config.layer_attention[0]
    assert first is not None
    return f"query · key times {first.scale:.6g}{cap}{scaled}"


def _size(opened: OpenedCheckpoint) -> str:
    """How many numbers the model holds, tied ones once, and the bytes that they take when they are loaded."""
    counts = {
        entry.stored: math.prod(entry.shape) * (opened.config.num_layers if entry.stacked else 1)
        for entry in opened.entries
    }
    total = sum(counts.values())
    return f"{total:,} ({4 * total / 1e6:,.4g} MB in float32)"


def _words(opened: OpenedCheckpoint) -> tuple[str, bool]:
    """The tokenizer's kind, and whether there is a chat template."""
    file = opened.file
    if isinstance(file, GGUFFile):
        kind, cut = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        return f"{kind} ({cut})", bool(file.metadata.get("tokenizer.chat_template"))
    extras = hub_folder.read_extras(file.path.parent, opened.config)
    tokenizer = extras["tokenizer"]
    return type(tokenizer.model).__name__ if tokenizer else "none", extras["chat_template"] is not None


if __name__ == "__main__":
    sys.exit(main())

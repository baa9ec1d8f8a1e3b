"""Data to train on, small enough for two cores. A batch is a pure function of key and step.

    language_model   the next character, or byte pair, of a text
    Recall           values by their keys: multi-query associative recall
    Lookup           the same where a pair is one token
    Relation         who points to whom, where symmetric scores cannot succeed
    Copy             the symbol `distance` tokens ago
    digits           the class of an image that is read as patches

`Task` says what a task offers. The generated ones are numbers, hashable and equal by value; those with data are pytrees
of their arrays. So all pass through `jit`, `scan` and `vmap`, and a resumed run draws what an uninterrupted one would.
"""

from attn_jax.training.tasks.base import Batch, Task
from attn_jax.training.tasks.copying import Copy
from attn_jax.training.tasks.images import Digits, digits
from attn_jax.training.tasks.lookup import Lookup
from attn_jax.training.tasks.recall import Recall
from attn_jax.training.tasks.relation import Relation
from attn_jax.training.tasks.text import LanguageModel, byte_pairs, characters, language_model, read_text

__all__ = [
    "Batch",
    "Copy",
    "Digits",
    "LanguageModel",
    "Lookup",
    "Recall",
    "Relation",
    "Task",
    "byte_pairs",
    "characters",
    "digits",
    "language_model",
    "read_text",
]

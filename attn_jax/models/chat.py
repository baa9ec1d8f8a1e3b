"""Conversations as the text that a checkpoint was trained on, by the Jinja template that it carries."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from attn_jax.models.loading import LoadedModel


def chat_prompt(loaded: LoadedModel, messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt of a conversation, up to where the model's answer begins.

    The template comes from the checkpoint, so it runs in a sandbox: it can neither call into Python nor change what it
    is given. A token that begins every text is left to the tokenizer: the template finds its name empty.

    Args:
        loaded: a model with a `chat_template`.
        messages: `{"role": ..., "content": ...}` each, such as the roles "system", "user" and "assistant".

    Raises:
        ValueError: there is no template, or it refuses the messages or fails.
        TypeError: on messages of another form.

    >>> from attn_jax import models
    >>> loaded = models.load("smollm2")
    >>> models.chat_prompt(loaded, [{"role": "user", "content": "Hello"}])[-55:]
    '<|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\n'
    """
    if not isinstance(loaded, LoadedModel):
        raise TypeError(f"loaded must be a LoadedModel, got {type(loaded).__name__}")
    if loaded.chat_template is None:
        raise ValueError(f"loaded has no chat template: {loaded.source} carries none")
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise TypeError(f"messages must be a list of messages, at least one; got {messages!r}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            raise TypeError(f"messages[{index}] must have 'role' and 'content', both strings; got {message!r}")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    last = loaded.stop_tokens[0] if loaded.stop_tokens else None
    names: dict[str, Any] = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
        "bos_token": "",
        "eos_token": loaded.tokenizer.id_to_token(last) if loaded.tokenizer is not None and last is not None else "",
    }
    try:
        return environment.from_string(loaded.chat_template).render(names)
    # A template is a program of somebody else's: whatever it raises is its failure.
    except Exception as error:
        raise ValueError(f"{loaded.source}: the chat template fails: {' '.join(str(error).split())}") from error


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

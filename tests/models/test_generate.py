"""Generation: with a cache, without, in chunks, alone and in a batch, it is one continuation."""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models

from attn_jax import models
from attn_jax.models.generate import _extend
from tests.nn import reference
from tests.nn.test_transformer import DECODER, ENCODER, GEMMA, model

WORDS = {f"w{i}": i for i in range(16)} | {"<end>": 16}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}assistant:"
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9], [7, 9, 3, 2, 3, 8]]
NEW = 6


TINY = dataclasses.replace(GEMMA, num_layers=3)  # two rings and a full cache


def loaded(config=TINY, **fields):
    tokenizer = Tokenizer(tokenizer_models.WordLevel(WORDS, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    given = {"tokenizer": tokenizer, "chat_template": TEMPLATE, "stop_tokens": (16,)} | fields
    return models.LoadedModel(model=model(config), config=config, source=pathlib.Path("tiny.gguf"), **given)


generate = functools.partial(models.generate, max_new_tokens=NEW, stop_tokens=())


@functools.cache
def expected():
    """The likeliest continuations, by the reference in NumPy."""
    values, rows = reference.parameters(model(TINY)), []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW):
            logits, _ = reference.transformer(values, np.array([ids]), TINY)
            best, next_best = np.sort(logits[0, -1])[[-1, -2]]
            assert best - next_best > 1e-3  # no order is promised nearer than that
            ids.append(int(logits[0, -1].argmax()))
        rows.append(ids[len(prompt) :])
    return rows


@pytest.mark.parametrize(
    "options", [{}, {"chunk": 2}, {"chunk": 1}, {"chunk": 3, "capacity": 13}, {"use_cache": False}], ids=str
)
def test_one_continuation_however_it_is_computed(options):
    assert generate(loaded(), PROMPTS, **options) == expected()


def test_a_prompt_alone_gets_what_it_gets_in_a_batch():
    assert [generate(loaded(), [prompt])[0] for prompt in PROMPTS] == expected()


def test_prompts_and_steps_are_one_trace_each():
    new = loaded(dataclasses.replace(DECODER, num_layers=1))
    before = _extend._cache_size()
    generate(new, [[1, 2, 3], [4]])
    assert _extend._cache_size() - before == 2
    generate(new, [[5, 6, 7, 8], [9, 10, 11]], max_new_tokens=9)  # the same padding, the same rounded capacity
    assert _extend._cache_size() - before == 2


def test_text_is_as_its_tokens():
    text = " ".join(f"w{i}" for i in PROMPTS[0])
    assert generate(loaded(), text) == expected()[:1]
    assert generate(loaded(), [text, PROMPTS[1]]) == expected()[:2]
    assert generate(loaded(), []) == []


# Stopping and streaming


def test_stop_tokens_end_a_row_and_are_left_out():
    rows = expected()
    stop = rows[0][2]
    cut = [row[: row.index(stop)] if stop in row else row for row in rows]
    assert any(len(row) == NEW for row in cut)  # others go on
    assert generate(loaded(), PROMPTS, stop_tokens=[stop]) == cut
    assert generate(loaded(), PROMPTS, stop_tokens=[list(WORDS)[stop]]) == cut
    assert generate(loaded(stop_tokens=(stop,)), PROMPTS, stop_tokens=None) == cut


def test_tokens_are_streamed_in_order_without_the_stop_token():
    rows, seen = expected(), []
    stop = rows[0][2]
    new = generate(loaded(), PROMPTS, stop_tokens=[stop], on_token=lambda row, token: seen.append((row, token)))
    assert [[token for row, token in seen if row == index] for index in range(3)] == new
    steps = [sum(other == row for other, _ in seen[:i]) for i, (row, _) in enumerate(seen)]
    assert steps == sorted(steps)


# Drawing


def test_draws_do_not_depend_on_the_batch_and_copies_draw_anew():
    draw = functools.partial(generate, loaded(), temperature=3.0, top_p=0.95, key=jax.random.key(7))
    batch = draw([*PROMPTS, PROMPTS[0]])
    assert [draw([prompt])[0] for prompt in PROMPTS] == batch[:3]
    assert draw(PROMPTS[::-1], chunk=2) == batch[2::-1]
    assert batch[3] != batch[0]
    assert draw([PROMPTS[0]], key=jax.random.key(8)) != batch[:1]
    assert len(set(batch[0])) > 1  # steps do not share a draw
    assert draw(PROMPTS, top_p=1.0) == draw(PROMPTS, top_p=None)


def test_the_likeliest_alone_is_greedy():
    assert generate(loaded(), PROMPTS, temperature=2.0, top_k=1, key=jax.random.key(0)) == expected()


# Chat


def test_chat_uses_the_template_of_the_checkpoint():
    text = models.chat_prompt(loaded(), [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2 w3"}])
    assert text == "system: w1<end>\nuser: w2 w3<end>\nassistant:"
    template = "{% for m in messages %}{{ m.content }}{% break %}{% endfor %} w1"
    assert generate(loaded(chat_template=template), ["w3", "w5 w6"], chat=True) == generate(
        loaded(), ["w3 w1", "w5 w6 w1"]
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "Range too big"),
        ("{% for m in %}", "Expected an expression"),
        ("{{ messages[0].content.nothing.at_all }}", "no attribute"),
    ],
)
def test_a_template_cannot_do_harm(template, message):
    with pytest.raises(ValueError, match=f"tiny.gguf: the chat template fails.*{message}"):
        models.chat_prompt(loaded(chat_template=template), [{"role": "user", "content": "w1"}])


# What is refused

KEY = jax.random.key(0)
REFUSED = {
    "empty text": ({"prompts": [[1], ""]}, ValueError, r"prompts\[1\] must hold at least one token"),
    "no ids": ({"prompts": [[]]}, ValueError, r"prompts\[0\] must hold at least one token"),
    "ids alone": ({"prompts": [1, 2]}, TypeError, r"prompts\[0\] must be a text or a list of token ids, got int"),
    "floats": ({"prompts": [[1.5]]}, TypeError, r"prompts\[0\] must hold integers"),
    "ids beyond the vocabulary": ({"prompts": [[17]]}, ValueError, r"prompts\[0\] must lie in 0..16"),
    "a number": ({"prompts": 3}, TypeError, "prompts must be a text or a list"),
    "longer than the cache": ({"capacity": 4}, ValueError, "8 tokens, with 6 new ones it takes 13 slots.*capacity is 4"),
    "no new tokens": ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1"),
    "unknown stop name": ({"stop_tokens": ["w99"]}, ValueError, "stop_tokens must be tokens.*'w99'"),
    "unknown stop id": ({"stop_tokens": [17]}, ValueError, "stop_tokens must lie in 0..16"),
    "negative stop id": ({"stop_tokens": [-1]}, ValueError, "stop_tokens must be at least 0"),
    "stop tokens as a word": ({"stop_tokens": "w1"}, TypeError, "stop_tokens must be a list"),
    "top_p 0": ({"temperature": 1.0, "top_p": 0.0, "key": KEY}, ValueError, r"top_p must lie in \(0, 1\], got 0"),
    "top_p over 1": ({"temperature": 1.0, "top_p": 1.5, "key": KEY}, ValueError, r"top_p must lie in \(0, 1\], got 1.5"),
    "top_k 0": ({"temperature": 1.0, "top_k": 0, "key": KEY}, ValueError, "top_k must be at least 1"),
    "top_k when greedy": ({"top_k": 3}, ValueError, "top_k has no effect at temperature 0"),
    "top_p when greedy": ({"top_p": 0.5}, ValueError, "top_p has no effect at temperature 0"),
    "negative temperature": ({"temperature": -1.0, "key": KEY}, ValueError, "temperature must be at least 0, got -1"),
    "infinite temperature": ({"temperature": float("inf"), "key": KEY}, ValueError, "temperature must be finite"),
    "no key": ({"temperature": 1.0}, ValueError, "key must be a key"),
    "a seed": ({"temperature": 1.0, "key": 3}, TypeError, "key must be one key"),
    "no function": ({"on_token": 3}, TypeError, "on_token must be a function"),
    "chunk 0": ({"chunk": 0}, ValueError, "chunk must be at least 1"),
    "chunk without a cache": ({"chunk": 2, "use_cache": False}, ValueError, "chunk has no effect without a cache"),
    "ids in a chat": ({"chat": True}, TypeError, r"prompts\[0\] must be a text where chat=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_call_says_what_was_expected(name):
    options, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        generate(loaded(), **({"prompts": PROMPTS} | options))


def test_models_that_cannot():
    with pytest.raises(ValueError, match="is an encoder"):
        generate(loaded(ENCODER), PROMPTS)
    with pytest.raises(ValueError, match="no tokenizer came with tiny"):
        generate(loaded(tokenizer=None), "w1")
    with pytest.raises(ValueError, match="no chat template"):
        generate(loaded(chat_template=None), "w1", chat=True)
    with pytest.raises(TypeError, match="must be a LoadedModel"):
        generate(model(TINY), PROMPTS)
    learned = dataclasses.replace(ENCODER, causal=True, head="untied", norm_position="pre", num_layers=1, max_length=9)
    with pytest.raises(ValueError, match="takes 13 slots, and the model's max_length is 9"):
        generate(loaded(learned), PROMPTS)


# The real model


@pytest.mark.parametrize("new", [12, pytest.param(64, marks=pytest.mark.slow)])
def test_smollm2_continues_as_transformers_does(new, smollm2, golden):
    prompt, expected = golden["token_ids"][: golden["prompt_length"]], golden["continuation"]
    both = [prompt.tolist(), prompt[:50].tolist()]
    row, other = models.generate(smollm2, both, max_new_tokens=new, stop_tokens=())
    assert row == expected[:new].tolist()
    chunked = models.generate(smollm2, both, max_new_tokens=new // 4, stop_tokens=(), chunk=48)
    assert chunked == [row[: new // 4], other[: new // 4]]
    assert models.generate(smollm2, [prompt], max_new_tokens=3, use_cache=False) == [row[:3]]


def test_each_token_of_the_continuation_is_the_likeliest(smollm2, golden):
    """All 64 without a cache, in one call: each after the prompt and those before it."""
    prompt, expected = golden["token_ids"][: golden["prompt_length"]], golden["continuation"]
    logits = smollm2.model(np.concatenate([prompt, expected]))
    np.testing.assert_array_equal(logits[len(prompt) - 1 : -1].argmax(-1), expected)


def test_smollm2_chats(smollm2):
    text = models.chat_prompt(smollm2, [{"role": "user", "content": "Hello"}])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.tokenizer.encode(text).tokens[0] == "<|im_start|>"
    assert smollm2.stop_tokens == (smollm2.tokenizer.token_to_id("<|im_end|>"),)

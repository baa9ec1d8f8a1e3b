"""Makes smollm2.npz: what `transformers` computes from the GGUF file that attn_jax.models reads.

It needs torch, transformers 5, accelerate and gguf, none of which attn_jax needs at run time; so it lives in an
environment of its own and its result is kept beside it:

    HF_HUB_OFFLINE=1 python tests/golden/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

The file holds `text` and its `token_ids` [512] (an excerpt of pydoc_data.topics, which differs between versions of
Python), `positions` [6] with their full `logits` [6, vocabulary], `arg_max` [512] and `gap` [512] (largest logit less
the second largest) at every position, and `tokenizer_cases`, a JSON list of [text, ids]. `continuation` [64] is what
follows the first `prompt_length` tokens when the most likely token is taken every time, `continuation_gap` [64] by how
much each was ahead.
"""

import json
import pathlib
import pydoc_data.topics
import sys

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

TOPIC = "objects"
PROMPT_LENGTH, NEW_TOKENS = 128, 64
POSITIONS = (0, 1, 63, 200, 377, 511)
CASES = (
    "Hello world",
    "I love eating apples.",
    " leading and trailing spaces  ",
    "tabs\tand\n\nnewlines\r\n  \n   indented",
    "a  b   c    d     e                f",
    "1 12 123 1234567890 3.14159 -2e10 0xFF x2y v1.2.3",
    "year  1984, price   $5,000.00\n\t42",
    "I'm you're he'll they've it's we'd CAN'T",
    "naïve café Ünïcödé ﬁ ½ ² Ⅷ ٣٤ १२",
    "日本語のテキスト、中文字符。한국어",
    "emoji 😀 👩‍👩‍👧‍👦 🇫🇷 ❤️",
    "Привет, мир! Ελληνικά العربية עברית",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>a/b<file_sep>x  <|im_end|>",
    "<|im_start |> <|im_end",
    "def f(x):\n    return x**2  # squared\n\n\nclass A: pass",
    "zero\u200bwidth \u00a0nbsp \u3000ideographic \ufeffbom",
    "\u0000\u0001\u007f control",
    "a\u0004b\u0016c: bytes that the vocabulary lacks",
    "e\u0301 combining, e precomposed \u00e9",
    " ",
    "   7",
    "",
)


def load_tokenizer(path):
    """The tokenizer that transformers builds, with the digit rule of the file's pre-tokenizer put in.

    transformers reads the vocabulary and merges but leaves `tokenizer.ggml.pre = smollm` aside, so it would join a
    run of spaces differently before a digit. The rule is the one that the original tokenizer and llama.cpp apply.
    """
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = (*CASES, pydoc_data.topics.topics[TOPIC])
    plain = [tokenizer.encode(text) for text in texts]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ruled = [tokenizer.encode(text) for text in texts]
    changed = [text for text, a, b in zip(texts, plain, ruled, strict=True) if a != b]
    print(f"texts that the digit rule changes: {changed}")
    return tokenizer


def check_weights(model, path):
    """Raises unless every weight of `model` is what gguf itself dequantises, bit for bit."""
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {f"attn_{short}": f"self_attn.{short}_proj" for short in "qkv"} | {"attn_output": "self_attn.o_proj"}
    names |= {f"ffn_{kind}": f"mlp.{kind}_proj" for kind in ("gate", "up", "down")}
    state, seen = model.state_dict(), set()
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{names[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        if parts[-2] in ("attn_q", "attn_k"):  # stored with the two halves of a head interleaved
            head_width = model.config.hidden_size // model.config.num_attention_heads
            pairs = values.reshape(-1, head_width // 2, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        np.testing.assert_array_equal(state[name].numpy(), values, err_msg=name)
        seen.add(name)
    missing = set(state) - seen - {"lm_head.weight"}
    if missing or state["lm_head.weight"].data_ptr() != state["model.embed_tokens.weight"].data_ptr():
        raise ValueError(f"not every weight was compared: {sorted(missing)}")
    print(f"{len(seen)} tensors equal those of gguf")


def continuation(model, token_ids):
    """The `NEW_TOKENS` tokens that follow `token_ids` greedily: each from a pass over all before it, without a cache."""
    token_ids = list(token_ids)
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            token_ids.append(
                int(model(torch.tensor([token_ids]), use_cache=False, logits_to_keep=1).logits[0, -1].argmax())
            )
    return token_ids[-NEW_TOKENS:]


def main(path):
    """Computes the golden from the GGUF file at `path` and writes it beside this script."""
    tokenizer = load_tokenizer(path)
    token_ids = tokenizer.encode(pydoc_data.topics.topics[TOPIC])[:512]
    text = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    if len(token_ids) != 512 or tokenizer.encode(text) != token_ids:
        raise ValueError("the excerpt must be 512 tokens that its text encodes to")

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    check_weights(model, path)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0].numpy()
    ordered = np.sort(logits, axis=-1)
    following = continuation(model, token_ids[:PROMPT_LENGTH])
    with torch.no_grad():
        last = model(torch.tensor([[*token_ids[:PROMPT_LENGTH], *following]])).logits[0, PROMPT_LENGTH - 1 : -1]
    best = last.topk(2).values.numpy()
    print(f"continuation: {tokenizer.decode(following)!r}; smallest gap {(best[:, 0] - best[:, 1]).min():.4g}")
    out = pathlib.Path(__file__).with_name("smollm2.npz")
    np.savez_compressed(
        out,
        text=np.array(text),
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(POSITIONS, np.int32),
        logits=logits[list(POSITIONS)],
        arg_max=logits.argmax(-1).astype(np.int32),
        gap=ordered[:, -1] - ordered[:, -2],
        prompt_length=np.array(PROMPT_LENGTH, np.int32),
        continuation=np.array(following, np.int32),
        continuation_gap=best[:, 0] - best[:, 1],
        tokenizer_cases=np.array(json.dumps([[case, tokenizer.encode(case)] for case in CASES])),
    )
    print(f"{out}: {out.stat().st_size} bytes; smallest gap {float((ordered[:, -1] - ordered[:, -2]).min()):.4g}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

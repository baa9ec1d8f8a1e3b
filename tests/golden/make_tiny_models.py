"""Makes tiny/: checkpoints of a few kilobytes that `transformers` writes, random, with the outputs that it computes.

It needs torch and transformers 5, neither of which attn_jax needs at run time; so it lives in an environment of its
own and its results are kept beside it:

    python tests/golden/make_tiny_models.py

Each folder is what `save_pretrained` writes, with `output.npz` beside it: `token_ids` [T] and, in float32, `output`,
logits [T, vocabulary] or hidden states [T, width]. The checkpoints of `llama_rotary` share their weights: its
`NAME.json` is a `config.json`, its output stands under NAME. `rotary.npz` holds what the functions that transformers
has for each scaling make of a `config.json`: `NAME` (JSON), `NAME.frequencies`, `NAME.magnitude`.
"""

import json
import math
import pathlib
import shutil

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

OUT = pathlib.Path(__file__).with_name("tiny")
TOKENS = 40
LLAMA = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,  # fewer than the tokens: scalings that look at it act
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
ROTARY = {
    "plain": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 12,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 12,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
# At the sizes of published models.
PUBLISHED = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 4096},
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "attention_factor": 1.25,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def randomize(model, seed):
    """Draws every parameter anew, biases and norms too: initial values of 0 and 1 hide what is left out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_((0.0 if name.endswith("bias") else 1.0) + 0.3 * drawn)
            else:
                parameter.copy_(drawn / math.sqrt(parameter.shape[-1]))
    return model.eval()


def output(model, token_ids):
    """Logits or hidden states of one sequence, in float32."""
    with torch.no_grad():
        outputs = model.float()(torch.tensor([token_ids]))
    return (outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state)[0].numpy()


def write(name, model, token_ids, reader=None, **options):
    """Saves the checkpoint, and the output of what is read back: what the file holds, whatever was in memory."""
    model.save_pretrained(OUT / name, **options)
    read = (reader or type(model)).from_pretrained(OUT / name, dtype=torch.float32, attn_implementation="eager").eval()
    np.savez_compressed(
        OUT / name / "output.npz", token_ids=np.array(token_ids, np.int32), output=output(read, token_ids)
    )


def main():
    """Writes every checkpoint and its output."""
    shutil.rmtree(OUT, ignore_errors=True)
    generator = np.random.default_rng(0)
    token_ids = generator.integers(0, 48, TOKENS).tolist()

    model = randomize(LlamaForCausalLM(LlamaConfig(**LLAMA, rope_parameters=dict(ROTARY["plain"]))), 0)
    model.save_pretrained(OUT / "llama_rotary")
    outputs = {"token_ids": np.array(token_ids, np.int32)}
    for name, rope in ROTARY.items():
        config = LlamaConfig(
            **LLAMA, rope_parameters=dict(rope), architectures=["LlamaForCausalLM"], attn_implementation="eager"
        )
        scaled = LlamaForCausalLM(config).eval()
        scaled.load_state_dict(model.state_dict())
        outputs[name] = output(scaled, token_ids)
        config.to_json_file(OUT / "llama_rotary" / f"{name}.json")
    np.savez_compressed(OUT / "llama_rotary" / "output.npz", **outputs)

    biased = LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    write("llama_biased", randomize(LlamaForCausalLM(LlamaConfig(**biased)), 1), token_ids, max_shard_size="12KB")
    narrow = randomize(LlamaForCausalLM(LlamaConfig(**LLAMA | {"attention_bias": True})), 2).to(torch.bfloat16)
    write("llama_bfloat16", narrow, token_ids)

    sizes = {"vocab_size": 48, "n_positions": 48, "n_embd": 16, "n_layer": 2, "n_head": 4}
    write("gpt2", randomize(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=3)), 3), token_ids)

    sizes = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = BertConfig(**sizes, intermediate_size=24, max_position_embeddings=48)
    write("bert", randomize(BertForMaskedLM(bert), 4), token_ids, BertModel)

    stored = {}
    for name, rope in PUBLISHED.items():
        config = LlamaConfig(
            hidden_size=512, num_attention_heads=4, max_position_embeddings=65536, rope_parameters=dict(rope)
        )
        length = {"seq_len": 100_000} if name == "dynamic" else {}
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), **length)
        stored[name] = np.array(json.dumps(json.loads(config.to_json_string(use_diff=False)), default=str))
        stored[f"{name}.frequencies"], stored[f"{name}.magnitude"] = frequencies.numpy(), np.array(magnitude)
    np.savez_compressed(OUT / "rotary.npz", **stored)
    for path in sorted(OUT.rglob("*")):
        print(path.relative_to(OUT), path.stat().st_size if path.is_file() else "")


if __name__ == "__main__":
    main()

"""Makes tiny_gemma3/: a random Gemma 3 text model that `transformers` writes, with the logits that it computes.

It needs torch and transformers 5, neither of which attn_jax needs at run time; so it lives in an environment of its
own and its results are kept beside it:

    python tests/golden/make_tiny_gemma3.py

The folder is what `save_pretrained` writes. Its NAME.json are the `config.json` of models with the same weights:
`older` spells the same model as files of 2025 do, `unscaled` is without a scaling of the global layers, `layer_types`
has global layers at irregular places. `output.npz` holds `token_ids` [96] and under each NAME, and under `config`, the
logits [96, vocabulary] in float32.
"""

import json
import math
import pathlib
import shutil

import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

OUT = pathlib.Path(__file__).with_name("tiny_gemma3")
TOKENS = 96
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "query_pre_attn_scalar": 16,  # another number than head_dim
    "sliding_window": 4,
    "max_position_embeddings": 128,
}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
SCALED = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
NAMES = {
    "config": {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": SCALED}},
    "older": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    },
    "unscaled": {"rope_theta": 1e6, "rope_local_base_freq": 10000.0},
    "layer_types": {
        "rope_parameters": {"sliding_attention": LOCAL, "full_attention": SCALED},
        "layer_types": ["full_attention" if layer in (0, 4, 5, 9) else "sliding_attention" for layer in range(12)],
    },
}


def randomize(model):
    """Draws every parameter anew: norm weights of 0 hide what is left out."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim == 1 else (0.25 if "embed" in name else 1.0) / math.sqrt(parameter.shape[-1])
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def main():
    """Writes the checkpoint, its other settings and the logits."""
    shutil.rmtree(OUT, ignore_errors=True)
    token_ids = np.random.default_rng(0).integers(0, SIZES["vocab_size"], TOKENS).tolist()
    randomize(Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **NAMES["config"]))).save_pretrained(OUT)
    outputs = {"token_ids": np.array(token_ids, np.int32)}
    for name, settings in NAMES.items():
        config = Gemma3TextConfig(**SIZES, **json.loads(json.dumps(settings)))
        model = Gemma3ForCausalLM.from_pretrained(
            OUT, config=config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            outputs[name] = model(torch.tensor([token_ids])).logits[0].numpy()
        if name != "config":
            words = {"model_type": "gemma3_text", **SIZES, **settings}
            (OUT / f"{name}.json").write_text(json.dumps(words, indent=2) + "\n")
        print(name, [float(np.abs(outputs[name] - outputs[other]).max()) for other in outputs if other in NAMES])
    np.savez_compressed(OUT / "output.npz", **outputs)
    for path in sorted(OUT.iterdir()):
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()

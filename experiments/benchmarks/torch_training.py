"""A training step of `transformers`' Llama in PyTorch. Imported only where both are installed."""

import importlib
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.sides import Contestant
from experiments.benchmarks.training_sides import CHECKED_STEPS, LEARNING_RATE, OPTIMIZER, Problem

torch: Any = importlib.import_module("torch")  # by name: type checkers need not find them
transformers: Any = importlib.import_module("transformers")


def contestant(problem: Problem) -> Contestant:
    """The same decoder with the same parameters, its own attention (`sdpa`) and fused AdamW, on every core."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = build(problem)
    inputs, targets = (torch.from_numpy(np.array(x)).long() for x in problem.batch[:2])
    decayed = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": OPTIMIZER.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    betas = OPTIMIZER.beta1, OPTIMIZER.beta2
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=betas, eps=OPTIMIZER.epsilon, fused=True)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*decayed, *gains], OPTIMIZER.clip_norm)
        optimizer.step()
        return loss

    def run() -> None:
        for _ in range(problem.steps_per_call):
            step()

    def result() -> list[np.ndarray]:
        losses = [float(step().detach()) for _ in range(CHECKED_STEPS)]
        return [np.array(losses), np.array(sum(p.numel() for p in model.parameters()))]

    return Contestant(run, result, None)


def build(problem: Problem) -> Any:
    """`LlamaForCausalLM` of the problem's sizes and parameters."""
    sizes = problem.model
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary_size,
        hidden_size=sizes.model_width,
        intermediate_size=sizes.mlp_width,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_width,
        rms_norm_eps=sizes.norm_epsilon,
        rope_theta=sizes.rotary_base,
        max_position_embeddings=problem.length,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).float().train()
    weights = {name: torch.from_numpy(np.array(array)) for name, array in _named(problem.state.params)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # tied
    assert not unexpected, unexpected
    return model


def _named(params: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Our parameters under the names of `transformers`, as matrices `[out, in]`."""
    params = jax.tree.map(np.asarray, params)
    layers, width = params["layers"], params["embedding"].shape[1]
    yield "model.embed_tokens.weight", params["embedding"]
    yield "model.norm.weight", params["final_norm"]["scale"]
    for index in range(len(layers["attention_norm"]["scale"])):
        attention = {name: weight[index] for name, weight in layers["attention"].items()}
        mlp = {name: weight[index] for name, weight in layers["mlp"].items()}
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", layers["attention_norm"]["scale"][index]
        yield f"{prefix}.post_attention_layernorm.weight", layers["mlp_norm"]["scale"][index]
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
            yield f"{prefix}.self_attn.{theirs}_proj.weight", attention[f"{ours}_weight"].reshape(width, -1).T
        yield f"{prefix}.self_attn.o_proj.weight", attention["output_weight"].reshape(-1, width).T
        for name in ("gate", "up", "down"):
            yield f"{prefix}.mlp.{name}_proj.weight", mlp[f"{name}_weight"].T

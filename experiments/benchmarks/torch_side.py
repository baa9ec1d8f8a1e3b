"""PyTorch's scaled dot-product attention as a side of the benchmark. Imported only where PyTorch is installed."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from attn_jax.typing import Array
from experiments.benchmarks.problems import Problem
from experiments.benchmarks.sides import Contestant

torch: Any = importlib.import_module("torch")  # by name: type checkers need not find it


def contestant(problem: Problem, direction: str) -> Contestant:
    """The problem in PyTorch, in its own layout `[B, N, T, H]`, which it is given contiguous."""
    query, key, value = inputs = [_tensor(x).transpose(1, 2).contiguous() for x in problem.inputs]
    cotangent = _tensor(problem.cotangent).transpose(1, 2).contiguous()
    masked = problem.case.windowed or problem.mask is not None  # it has no word for a window
    hidden = problem.visible if masked else problem.bias
    options = {
        "attn_mask": None if hidden is None else _tensor(hidden),
        "is_causal": problem.case.causal and not masked,
        "enable_gqa": problem.case.groups > 1,
    }
    backward = direction == "forward_backward"
    for x in inputs:
        x.requires_grad_(backward)

    def run() -> list[Any]:
        with torch.set_grad_enabled(backward):
            output = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
        return [output, *torch.autograd.grad(output, inputs, cotangent)] if backward else [output]

    def result() -> list[np.ndarray]:
        return [x.detach().transpose(1, 2).numpy() for x in run()]

    return Contestant(run, result, None)


def matrix_product(matrix: Array) -> Callable[[], Any]:
    """The product of a square matrix with itself, to run."""
    tensor = _tensor(matrix)
    return lambda: tensor @ tensor


def _tensor(x: Array) -> Any:
    return torch.from_numpy(np.array(x))  # a copy: PyTorch wants memory that it may write

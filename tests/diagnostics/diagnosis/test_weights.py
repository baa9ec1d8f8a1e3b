"""What parameters show: ties, copies, dead heads and outputs that do not mix, against plain matrix products."""

import numpy as np
import pytest
from flax import nnx

from attn_jax.diagnostics import Limits, head_weights
from attn_jax.diagnostics.diagnosis import weights

D, N, K, H, L = 32, 4, 2, 8, 3
NUMBERS = np.random.default_rng(0)


def draw(*shape):
    return NUMBERS.standard_normal(shape) / np.sqrt(D)


def layers(**changes):
    """Layers of usual weights; a change replaces a role's weight in layer 1."""
    made = {
        n: {"query": draw(D, N, H), "key": draw(D, N, H), "value": draw(D, N, H), "out": draw(N, H, D)}
        for n in range(L)
    }
    made[1] |= {role: change(made[1]) for role, change in changes.items()}
    return made


def found(given, **options):
    return list(weights.examine(given, Limits(), **options))


def test_usual_weights_are_silent():
    assert found(layers()) == []


def test_grouped_heads_are_silent():
    grouped = {0: {"query": draw(D, N, H), "key": draw(D, K, H), "value": draw(D, K, H), "out": draw(N, H, D)}}
    assert found(grouped) == []


def in_blocks(own):
    return own["out"] * np.repeat(np.eye(N), H, axis=1)[:, None]


def copied(role):
    def change(own):
        x = own[role].copy()
        if role == "out":
            x[2] = 3 * x[0]
        else:
            x[:, 2] = x[:, 0]
        return x

    return change


FAULTY = {
    # name: (changes, signal, link, severity)
    "W_K = W_Q": ({"key": lambda own: own["query"]}, "tied_projections", "projections", "serious"),
    "W_V = W_K": ({"value": lambda own: own["key"]}, "tied_projections", "projections", "serious"),
    "nearly symmetric": ({"key": lambda own: own["query"] + 0.1 * draw(D, N, H)}, "symmetry", "projections", "notice"),
    "identity": ({"out": lambda own: np.eye(D).reshape(N, H, D)}, "output_mixing", "output", "serious"),
    "blocks": ({"out": in_blocks}, "output_mixing", "output", "serious"),
    "tiny": ({"out": lambda own: 1e-3 * own["out"]}, "output_size", "output", "serious"),
    "rank one": ({"out": lambda own: own["out"][..., :1] * np.ones(D)}, "output_rank", "output", "notice"),
    "a dead head": ({"value": lambda own: own["value"] * (np.arange(N) != 3)[:, None]}, "dead_heads", "heads", "notice"),
    "copies": ({role: copied(role) for role in ("query", "key", "value", "out")}, "equal_heads", "heads", "serious"),
    "one pattern": ({role: copied(role) for role in ("query", "key")}, "equal_heads", "heads", "serious"),
    "NaN": ({"value": lambda own: np.where(own["value"] > 0, own["value"], np.nan)}, "parameters", "numerics", "serious"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named(name):
    changes, signal, link, severity = FAULTY[name]
    (one,) = found(layers(**changes))
    assert (one.signal, one.link, one.severity, one.layers) == (signal, link, severity, (1,))
    if name == "a dead head":
        assert one.heads == ((1, 3),)
    if name in ("copies", "one pattern"):
        assert one.heads == ((1, 0), (1, 2))


def test_an_output_of_zeros_everywhere_is_a_beginning():
    """Some models begin so: a notice; one such layer among others is an alarm."""
    zero = {n: {**own, "out": 0 * own["out"]} for n, own in layers().items()}
    assert {one.severity for one in found(zero)} == {"notice"}
    assert [one.severity for one in found(layers(out=lambda own: 0 * own["out"]))] == ["serious"]


def test_a_tie_that_is_meant_is_a_notice():
    tied = {n: {role: x for role, x in own.items() if role != "key"} for n, own in layers().items()}
    (one,) = found(tied, tied=True)
    assert (one.signal, one.severity) == ("tied_projections", "notice")


def test_inner_products_of_heads_are_those_of_their_matrices():
    q, k, v, o = draw(D, N, H), draw(D, K, H), draw(D, K, H), draw(N, H, D)
    match = [q[:, n] @ k[:, n // 2].T for n in range(N)]
    fetch = [v[:, n // 2] @ o[n] for n in range(N)]

    def cosines(matrices):
        return [[np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b) for b in matrices] for a in matrices]

    found = head_weights.alike(q, k, v, o)
    np.testing.assert_allclose(found[0], cosines(match), atol=1e-12)
    np.testing.assert_allclose(found[1], cosines(fetch), atol=1e-12)
    np.testing.assert_allclose(head_weights.fetch_norms(v, o), [np.linalg.norm(x) for x in fetch], rtol=1e-12)


def test_weights_of_any_module_are_found_by_name():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs) for _ in range(11)])
            self.head = nnx.Linear(D, 7, rngs=rngs)

    model = Model(nnx.Rngs(0))
    read = weights.of_parameters(model)
    assert list(read) == list(range(11))
    for n, own in read.items():
        layer = model.blocks[n]
        assert own.keys() == {"query", "key", "value", "out"}
        np.testing.assert_allclose(own["query"], layer.query.kernel[...])
        np.testing.assert_allclose(own["out"], layer.out.kernel[...])


def test_weights_in_nested_mappings_are_found_by_name():
    tree = {f"layer_{n}": {"attention": {"q_proj": {"kernel": draw(D, N, H)}}} for n in (0, 2, 10)}
    read = weights.of_parameters({**tree, "bias": {"query": draw(N, H)}})
    for n, name in enumerate(("layer_0", "layer_2", "layer_10")):
        np.testing.assert_array_equal(read[n]["query"], tree[name]["attention"]["q_proj"]["kernel"])

"""The data of a program, drawn by Hypothesis, and the call that a program makes of it."""

import dataclasses
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

from tests import oracles
from tests.exact.programs import LAZY_BIASES, LAZY_MASKS, TABLE_ROWS, Program


@dataclasses.dataclass(frozen=True)
class Problem:
    program: Program
    arrays: dict[str, np.ndarray]  # everything that is data, in the dtypes in which it is passed
    d_output: np.ndarray
    d_logsumexp: np.ndarray
    poison: float | None
    description: str

    def _repr_pretty_(self, printer, cycle):  # what Hypothesis shows of a failing draw
        printer.text(f"Problem({self.program}, {self.description})")

    def oracle(self) -> oracles.Attention:
        return oracles.attention(**arguments(self.program, self.arrays, for_oracle=True))

    def reached(self, forward: oracles.Attention) -> dict[str, np.ndarray]:
        """Which queries see, which keys are seen by their group, which entries of the bias count."""
        geometry, visible = self.program.geometry, forward.visible
        by_group = visible.reshape(*geometry.batch, geometry.K, -1, geometry.T, geometry.S)
        seen = np.moveaxis(by_group.any((-3, -2)), -1, -2)
        reached = {"query": np.moveaxis(visible.any(-1), -1, -2), "key": seen, "value": seen}
        if "bias" in self.arrays:
            reached["bias"] = oracles.sum_to(visible, self.arrays["bias"].shape) > 0
        return reached

    def poisoned(self, forward: oracles.Attention) -> dict[str, np.ndarray]:
        """The arrays with NaN or infinity in all that nobody may see."""
        if self.poison is None:
            return self.arrays
        reached = self.reached(forward)
        spoilt = {
            name: np.where(
                reached[name][..., None], self.arrays[name], np.asarray(self.poison, self.arrays[name].dtype)
            )
            for name in ("query", "key", "value")
        }
        return self.arrays | spoilt


def arguments(program: Program, arrays: dict[str, Any], *, for_oracle: bool = False) -> dict[str, Any]:
    """The call of `dot_product_attention`, or of the oracle, that a program makes of its arrays."""
    s, spelling = program.structure, "oracle" if for_oracle else "package"
    call: dict[str, Any] = {name: arrays[name] for name in ("query", "key", "value")}
    call |= {"is_causal": s.is_causal, "local_window_size": s.local_window_size, "logits_soft_cap": s.logits_soft_cap}
    call["scale"] = arrays["scale"] if s.scale == "per head" else s.scale
    given = ("sinks", "query_seq_lengths", "key_value_seq_lengths", "query_offset", "query_positions", "key_positions")
    call |= {name: arrays[name] for name in given if name in arrays}
    data = arrays | {"heads": program.geometry.N}
    if s.mask is not None:
        lazy = LAZY_MASKS.get(s.mask)
        call["mask"] = getattr(lazy, spelling)(data) if lazy else arrays["mask"]
    if s.bias is not None:
        lazy = LAZY_BIASES.get(s.bias)
        call["bias"] = getattr(lazy, spelling)(data) if lazy else arrays["bias"]
    return call


@st.composite
def problems(draw, program: Program) -> Problem:
    """Data for a program; every number that a case may turn on is drawn by Hypothesis, the rest by a drawn seed."""
    g, s = program.geometry, program.structure
    seed = draw(st.integers(0, 2**32 - 1), label="seed")
    spread = draw(st.sampled_from([1.0, 0.0, 0.1, 3.0, 10.0]), label="spread of the logits")
    density = draw(st.sampled_from([0.5, 0.0, 0.1, 0.9, 1.0]), label="density of array masks")
    poison = draw(st.sampled_from([np.nan, None, np.inf]), label="poison")
    rng, dtype = np.random.default_rng(seed), jax.numpy.dtype(program.dtype)
    accumulated = np.float64 if program.dtype == "float64" else np.float32

    def normal(*shape, factor=1.0, dtype=dtype):
        return np.asarray(factor * rng.standard_normal(shape), dtype)

    def per_item(low, high, label):
        if not g.batch:
            return np.int32(draw(st.integers(low, high), label=label))
        count = int(np.prod(g.batch))
        drawn = draw(st.lists(st.integers(low, high), min_size=count, max_size=count), label=label)
        return np.array(drawn, np.int32).reshape(g.batch)

    def spelled(letters):
        sizes = dict(zip("nts", (g.N, g.T, g.S), strict=True)) | {"1": 1}
        if letters == "ts":
            return g.T, g.S
        lead = g.batch if letters[0] == "b" else (1,) * len(g.batch)
        return (*lead, *(sizes[letter] for letter in letters[1:]))

    def positions(length, label):
        kind = draw(st.sampled_from(["ordered", "shuffled", "holes", "repeated"]), label=label)
        start = draw(st.integers(0, 5), label="start")
        shape = (*g.batch, length) if draw(st.booleans(), label="per item") else (length,)
        steps = rng.integers(0, length, shape) if kind == "repeated" else np.broadcast_to(np.arange(length), shape)
        places = start + (rng.permuted(steps, axis=-1) if kind == "shuffled" else steps)
        # Two shapes would be two programs: always pass the full one.
        places = np.where(rng.random(shape) < 0.3, -1, places) if kind == "holes" else places
        return np.array(np.broadcast_to(places, (*g.batch, length)), np.int32)

    arrays: dict[str, np.ndarray] = {
        "query": normal(*g.batch, g.T, g.N, g.H, factor=spread),
        "key": normal(*g.batch, g.S, g.K, g.H),
        "value": normal(*g.batch, g.S, g.K, g.V),
    }
    if s.scale == "per head":
        arrays["scale"] = normal(g.N, dtype=accumulated)
    if s.sinks:
        far = draw(st.sampled_from([0.0, -12.0, -150.0, 150.0]), label="sinks around")
        arrays["sinks"] = np.asarray(far + normal(g.N, dtype=accumulated), accumulated)
    if "q" in s.lengths:
        arrays["query_seq_lengths"] = per_item(0, g.T, "query lengths")
    if "k" in s.lengths:
        arrays["key_value_seq_lengths"] = per_item(0, g.S, "key lengths")
    if s.positions == "offset":
        arrays["query_offset"] = np.int32(draw(st.integers(-3, g.S + 3), label="offset"))
    if s.positions == "offsets":
        arrays["query_offset"] = per_item(-3, g.S + 3, "offsets")
    if s.positions in ("q", "qk"):
        arrays["query_positions"] = positions(g.T, "query positions")
    if s.positions in ("k", "qk"):
        arrays["key_positions"] = positions(g.S, "key positions")

    reads = LAZY_MASKS[s.mask].reads if s.mask in LAZY_MASKS else ("mask",) if s.mask else ()
    if "mask" in reads:
        arrays["mask"] = rng.random(spelled(s.mask)) < density
    for letters in {"b11s", "b1t1"} & set(reads):
        arrays[letters] = rng.random(spelled(letters)) < density
    if "prefix" in reads:
        arrays["prefix"] = per_item(0, g.S, "prefix")
    if "padding" in reads:
        arrays["padding"] = per_item(0, g.S, "padding")
    if "query_ids" in reads:
        arrays["query_ids"] = np.sort(rng.integers(0, 3, (*g.batch, g.T)), axis=-1).astype(np.int32)
        arrays["key_ids"] = np.sort(rng.integers(0, 3, (*g.batch, g.S)), axis=-1).astype(np.int32)

    reads = LAZY_BIASES[s.bias].reads if s.bias in LAZY_BIASES else ("bias",) if s.bias else ()
    if "bias" in reads:
        letters = s.bias.split()[-1]
        closed = draw(st.sampled_from([0.0, 0.2, 1.0]), label="share of -inf in the bias")
        shape = spelled(letters)
        arrays["bias"] = np.where(rng.random(shape) < closed, -np.inf, normal(*shape, factor=2.0)).astype(dtype)
    if "table" in reads:
        arrays["table"] = normal(TABLE_ROWS, g.N)

    return Problem(
        program,
        arrays,
        d_output=normal(*g.batch, g.T, g.N, g.V),
        d_logsumexp=normal(*g.batch, g.T, g.N, dtype=accumulated),
        poison=poison,
        description=f"seed={seed}, spread={spread}, density={density}, poison={poison}",
    )

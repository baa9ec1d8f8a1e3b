"""The benchmark of several devices at sizes that say nothing about speed."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from experiments.benchmarks import parallel, parallel_sides
from experiments.benchmarks.parallel import ParallelConfig


def test_tiles_are_shared_evenly_and_none_is_lost():
    for devices in (1, 2, 8):
        counts = parallel_sides.tiles(devices, 1024, 32)
        assert len(counts) == devices
        assert sum(counts) == 32 * 33 // 2  # the lower triangle
        assert max(counts) == min(counts)


def test_what_is_kept_of_a_token_is_cut_by_heads():
    config = ParallelConfig().large(1)
    one, two, four = (parallel_sides.kept_by_a_token(config, heads) for heads in (1, 2, 4))
    assert one > two > four > one / 4
    assert one - two == pytest.approx(2 * (two - four))


def test_gain_is_in_tokens_per_second():
    rows = [("1x1x1", [2.0, 2.0, 4.0]), ("2x1x1", [2.0, 3.0, 2.0])]
    rows = [(mesh, i, seconds) for mesh, readings in rows for i, seconds in enumerate(readings)]
    measurements = pd.DataFrame(rows, columns=["mesh", "round", "seconds"]).assign(part="scaling")
    assert parallel.gain(measurements, "2x1x1").value == 2 * 2.0 / 2.0  # twice the tokens, medians 2 and 2


def test_differences_are_relative():
    expected = ({"a": np.array([1.0, -4.0])}, np.array([2.0, 1.0]))
    found = ({"a": np.array([1.0, -4.4])}, np.array([2.0, 1.5]))
    apart = parallel_sides.differences(found, expected)
    assert apart == pytest.approx({"loss": 0.0, "gradient": 0.1, "loss, 20 steps": 0.5})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"meshes": ("2x2",)}, "meshes must hold words like 2x2x2"),
        ({"meshes": ("2x0x2",)}, "meshes must hold words like 2x2x2"),
        ({"devices": (0, 2)}, "devices must be at least 1, got 0"),
    ],
)
def test_bad_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**flags)


def test_too_few_devices():
    config = dataclasses.replace(ParallelConfig(), meshes=("4x2x2",))
    with pytest.raises(ValueError, match="16 devices are needed, got 8: on CPUs set XLA_FLAGS="):
        parallel.units(config)


@pytest.mark.slow
def test_the_smoke_preset():
    result = parallel.run(parallel.EXPERIMENT.preset("smoke"))
    for name, most in (("loss", 1e-5), ("gradient", 1e-5), ("loss, 20 steps", 1e-4)):
        for mesh in ("pmap", "2x2x2"):
            assert parallel.value(result.measurements, "equality", name, mesh=mesh) < most
    assert parallel.memory_exponent(result.measurements).value < -0.8
    assert parallel.value(result.measurements, "ring", "largest_share_of_tiles", devices=4) <= 1.15
    held, grown, formula = (
        parallel.value(result.measurements, "memory", name, mesh="1x1x1")
        for name in ("bytes held for a parameter", "floats of a token and layer", "of the formula")
    )
    assert 12 <= held < 13
    assert grown == pytest.approx(formula, rel=0.2)
    assert len(result.tables) == 4
    assert len(result.figure().axes) == 1


@pytest.mark.slow
def test_a_layer_keeps_its_share_of_a_sequence():
    """Tokens that are gathered somewhere, in the MLP say, would be kept by all four devices."""
    config = ParallelConfig(memory_meshes=("1x1x4",), model_width=64, length=1024)
    found = {row["measure"]: row["value"] for row in parallel._memory(config, "1x1x4")}
    assert found["floats of a token and layer"] == pytest.approx(found["of the formula"], rel=0.2)

"""Does a training step on many devices return the numbers of one, in less memory and time?

Claims: none; the figures of the documentation rest on it.
Command: XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.benchmarks.parallel --preset=quick
Time: smoke 1 min, quick 2 min, full 6 min on two cores.

Equality: loss and gradient of a step, and the losses of 20, on every mesh (data x heads x sequence) and by `pmap`,
against one device. Memory of a device: of causal ring attention, counted by the compiler, against 1/devices; of a step,
against the formula of docs/scaling_out.md. Tiles of the causal square that the ring's devices work on. Weak scaling: a
step of one device on one core against one of twice the tokens on two, run in turn in one process (`parallel_worker`).
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attn_jax.nn import TransformerConfig
from experiments import counting, figures, harness
from experiments.artifacts import Row
from experiments.benchmarks import parallel_sides, parallel_worker
from experiments.benchmarks.timing import LEAST_ROUNDS, ratio
from experiments.command_line import CommandError
from experiments.config import Config, option
from experiments.estimates import Estimate
from experiments.harness import Experiment, Result, Unit
from experiments.progress import Table, cells

PMAP, ONE = "pmap", "1x1x1"
DEPTHS = (2, 4)  # of models whose memory is compared: the difference is that of the layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(Config):
    """Flags of this benchmark."""

    meshes: tuple[str, ...] = option(("8x1x1", "1x1x8", "2x2x2", "1x4x2", "2x1x4"), "data x heads x sequence")
    memory_meshes: tuple[str, ...] = option((ONE, "2x2x2"), "where the memory of a step is counted")
    devices: tuple[int, ...] = option((1, 2, 4, 8), "of the ring whose memory and tiles are counted", least=1)
    num_heads: int = option(4, "heads", least=1)
    model_width: int = option(128, "D where time and memory are measured", least=8)
    length: int = option(512, "tokens of a sequence there", least=8)
    ring_length: int = option(16384, "tokens in the ring", least=16)
    tile: int = option(128, "queries and keys of a tile that is counted", least=1)
    rounds: int = option(LEAST_ROUNDS, "readings of each side", least=LEAST_ROUNDS, most=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        for mesh in (*self.meshes, *self.memory_meshes):
            parallel_sides.sizes_of(mesh)

    def check_devices(self) -> None:
        """Raises ValueError if there are too few."""
        sizes = [int(np.prod(list(parallel_sides.sizes_of(mesh).values()))) for mesh in self.meshes]
        most = max(*sizes, *self.devices)
        if jax.device_count() < most:
            raise ValueError(
                f"{most} devices are needed, got {jax.device_count()}: on CPUs set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={most}"
            )

    @property
    def small(self) -> TransformerConfig:
        """The model whose numbers are compared."""
        return TransformerConfig(vocabulary_size=16, num_layers=2, model_width=32, num_heads=4)

    def large(self, num_layers: int) -> TransformerConfig:
        """The one whose memory is counted."""
        return TransformerConfig(
            vocabulary_size=64, num_layers=num_layers, model_width=self.model_width, num_heads=self.num_heads
        )


def units(config: ParallelConfig) -> list[Unit]:
    config.check_devices()
    alone = functools.cache(lambda: parallel_sides.follow(parallel_sides.step_on(ONE), config.small, 8, 32))

    def equality(mesh: str) -> list[Row]:
        found = parallel_sides.follow(parallel_sides.step_on(mesh), config.small, 8, 32)
        apart = parallel_sides.differences(found, alone())
        return [{"part": "equality", "mesh": mesh, "measure": name, "value": x} for name, x in apart.items()]

    return [
        *(Unit(f"equality-{mesh}", functools.partial(equality, mesh)) for mesh in (PMAP, *config.meshes)),
        Unit("ring", functools.partial(_ring, config)),
        *(Unit(f"memory-{mesh}", functools.partial(_memory, config, mesh)) for mesh in config.memory_meshes),
        Unit("scaling", functools.partial(_scaling, config)),
    ]


def _ring(config: ParallelConfig) -> list[Row]:
    rows: list[Row] = []
    for devices in sorted(config.devices):
        memory = parallel_sides.ring_memory(devices, config.ring_length, config.num_heads, 32)
        counts = parallel_sides.tiles(devices, config.ring_length, config.tile)
        share = max(counts) / (sum(counts) / devices)
        found = {"temporary_bytes": memory, "largest_share_of_tiles": share}
        rows += [{"part": "ring", "devices": devices, "measure": name, "value": x} for name, x in found.items()]
    return rows


def _memory(config: ParallelConfig, mesh: str) -> list[Row]:
    """What a step holds, and what each further layer takes of it for a token, beside the formula."""
    sizes, batch_size = parallel_sides.sizes_of(mesh), 4
    few, many = (
        parallel_sides.step_memory(config.large(depth), mesh, batch_size, config.length, shard_parameters=False)
        for depth in DEPTHS
    )
    tokens = batch_size * config.length / (sizes["data"] * sizes["sequence"])
    gradients = 4 * (many["parameters"] - few["parameters"])
    grown = (many["temporary_bytes"] - few["temporary_bytes"] - gradients) / (DEPTHS[1] - DEPTHS[0]) / tokens / 4
    found = {
        "bytes held for a parameter": many["argument_bytes"] / many["parameters"],
        "floats of a token and layer": grown,
        "of the formula": parallel_sides.kept_by_a_token(config.large(1), sizes["heads"]),
    }
    return [{"part": "memory", "mesh": mesh, "measure": name, "value": value} for name, value in found.items()]


def _scaling(config: ParallelConfig) -> list[Row]:
    if len(os.sched_getaffinity(0)) < 2:
        return [{"part": "scaling", "note": "left out: it takes two cores"}]
    problem = {
        "vocabulary_size": 256, "num_layers": 2, "model_width": config.model_width, "num_heads": config.num_heads,
        "batch_size": 2, "length": config.length, "rounds": config.rounds,
    }  # fmt: skip
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": parallel_worker.FLAGS}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    command = [sys.executable, "-m", parallel_worker.__name__, json.dumps(problem)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(f"the worker of the scaling ended with status {done.returncode}: {done.stderr.strip()}")
    readings = json.loads(done.stdout.splitlines()[-1])
    return [
        {"part": "scaling", "mesh": parallel_worker.MESHES[side], "round": i, "seconds": seconds}
        for side, of_side in readings.items()
        for i, seconds in enumerate(of_side)
    ]


def value(measurements: pd.DataFrame, part: str, measure: str, **where: object) -> float:
    """A number that was counted."""
    rows = measurements[(measurements["part"] == part) & (measurements["measure"] == measure)]
    for name, x in where.items():
        rows = rows[rows[name] == x]
    return float(np.asarray(rows["value"], dtype=np.float64)[0])


def gain(measurements: pd.DataFrame, mesh: str) -> Estimate:
    """Tokens per second of two devices over those of one, which has half as many tokens."""
    rows = measurements.query("part == 'scaling'")
    one, two = (rows.query("mesh == @name").sort_values("round")["seconds"] for name in (ONE, mesh))
    found = ratio(one, two)
    return dataclasses.replace(found, value=2 * found.value, low=2 * found.low, high=2 * found.high)


def memory_exponent(measurements: pd.DataFrame) -> Estimate:
    """Of the ring's memory in the devices, from 2 on: -1 is 1/devices. One device sends nothing, and keeps less."""
    rows = measurements.query("part == 'ring' and measure == 'temporary_bytes' and devices > 1")
    return counting.counted_exponent(rows["devices"].to_numpy(), rows["value"].to_numpy())


def tables(config: ParallelConfig, measurements: pd.DataFrame) -> list[Table]:
    names = ("loss", "gradient", f"loss, {parallel_sides.STEPS} steps")
    equal = [
        (mesh, *(f"{value(measurements, 'equality', name, mesh=mesh):.1e}" for name in names))
        for mesh in (PMAP, *config.meshes)
    ]
    ring = [
        (
            devices,
            f"{value(measurements, 'ring', 'temporary_bytes', devices=devices) / 1e6:.2f}",
            f"{value(measurements, 'ring', 'largest_share_of_tiles', devices=devices):.3f}",
        )
        for devices in sorted(config.devices)
    ]
    found = ("bytes held for a parameter", "floats of a token and layer", "of the formula")
    memory = [
        (mesh, *(f"{value(measurements, 'memory', name, mesh=mesh):.1f}" for name in found))
        for mesh in config.memory_meshes
    ]
    title = "Temporary memory of a device in causal ring attention, and its tiles over an equal share"
    made = [
        Table("Against one device, relative", ("mesh", *names), cells(equal)),
        Table(title, ("devices", "MB", "most tiles"), cells(ring)),
        Table("Memory of a device in a step", ("mesh", *found), cells(memory)),
    ]
    if "seconds" in measurements:
        gains = {mesh: gain(measurements, mesh) for mesh in parallel_worker.MESHES.values() if mesh != ONE}
        rows = [(mesh, f"{x.value:.2f} [{x.low:.2f}, {x.high:.2f}]") for mesh, x in gains.items()]
        made.append(Table("Twice the tokens on two cores", ("mesh", "tokens per second over one"), cells(rows)))
    return made


def figure(config: ParallelConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(1, 1)
    devices = sorted(config.devices)
    memory = np.array([value(measurements, "ring", "temporary_bytes", devices=n) for n in devices])
    figures.curve(axes[0, 0], 0, devices, memory / 1e6, "causal ring attention, forward and backward")
    figures.curve(axes[0, 0], 1, devices, memory[0] / 1e6 / np.array(devices), "1/devices", linestyle=":")
    axes[0, 0].set(title="Temporary memory of a device", xlabel="devices", ylabel="MB", yscale="log")
    figures.powers(axes[0, 0], devices)
    axes[0, 0].legend()
    return drawn


EXPERIMENT = Experiment(
    name="benchmarks.parallel",
    question="Does a training step on many devices return the numbers of one, in less memory and time?",
    config=ParallelConfig,
    presets={
        "smoke": {
            "meshes": ("2x2x2",),
            "memory_meshes": (ONE,),
            "devices": (2, 4),
            "model_width": 32,
            "length": 64,
            "ring_length": 2048,
        },
        "quick": {"meshes": ("8x1x1", "1x1x8", "2x2x2")},
        "full": {"memory_meshes": (ONE, "4x1x1", "1x1x4", "1x4x1", "2x2x2"), "rounds": 15},
    },
    units=units,
    judge=lambda config, measurements: (),
    figure=figure,
    alt="Memory against devices, both on a log scale: it falls along the line of 1/devices.",
    tables=tables,
    documentation=__doc__ or "",
)


def run(config: ParallelConfig) -> Result:
    """Measures; writes nothing."""
    return harness.run(EXPERIMENT, config)


if __name__ == "__main__":
    harness.main(EXPERIMENT)

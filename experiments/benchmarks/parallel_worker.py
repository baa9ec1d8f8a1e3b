"""Weak scaling, in a process of its own: `python -m experiments.benchmarks.parallel_worker JSON` prints readings.

One device has one core, two devices have two: XLA's threads for single operations are off (the flags are set by
`parallel.py`, before JAX is imported), and before each reading every thread of the process is bound to as many cores as
devices are at work. Without that one device would take both cores, and there would be nothing to scale to.
"""

import json
import os
import pathlib
import sys
from collections.abc import Callable

import jax

from attn_jax.nn import TransformerConfig
from experiments.benchmarks import parallel_sides
from experiments.benchmarks.timing import interleave

FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
MESHES = {"one": "1x1x1", "data": "2x1x1", "heads": "1x2x1", "sequence": "1x1x2"}


def bind(cores: set[int]) -> None:
    """Lets every thread of this process run on these cores alone."""
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:  # it has ended
            continue


def main(asked: str) -> None:
    problem = json.loads(asked)
    rounds, batch_size, length = (problem.pop(name) for name in ("rounds", "batch_size", "length"))
    config = TransformerConfig(**problem)
    cores = sorted(os.sched_getaffinity(0))

    def side(name: str) -> Callable[[], object]:
        devices = 1 if name == "one" else 2
        step, state = parallel_sides.step_on(MESHES[name]), parallel_sides.begin(config)
        batch = parallel_sides.draw(0, config.vocabulary_size, batch_size * devices, length)

        def run() -> object:
            bind(set(cores[:devices]))
            return jax.block_until_ready(step(state, batch))

        run()
        return run

    print(json.dumps(interleave({name: side(name) for name in MESHES}, rounds=rounds)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

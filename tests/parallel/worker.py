"""One of several processes: `python -m tests.parallel.worker COORDINATOR PROCESSES PROCESS`."""

import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from attn_jax.parallel import Layout, distributed, make_mesh


def main(coordinator: str, processes: str, process: str) -> None:
    distributed.join(coordinator, processes=int(processes), process=int(process), timeout=60)
    layout = Layout(make_mesh(data=jax.device_count()))
    array = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    spread = distributed.put(array, NamedSharding(layout.mesh, PartitionSpec("data")))
    key = layout.place(jax.random.key(5))
    called = []

    def fail() -> None:
        called.append(1)
        raise KeyError("of the first")

    try:
        distributed.in_first(fail)
    except KeyError as error:
        raised = error.args[0]
    found = {
        "devices": jax.device_count(),
        "told": distributed.in_first(lambda: {"process": jax.process_index(), "rows": [1.5, None]}),
        "raised": raised,
        "called": len(called),
        "largest": distributed.largest(10 + jax.process_index()),
        "values": distributed.values(spread).tolist(),
        "fetched": np.asarray(layout.fetch(spread)).tolist(),
        "drawn": float(np.asarray(jax.random.uniform(layout.fetch(key)))),
    }
    print(json.dumps(found), flush=True)
    distributed.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Settings of every test: eight CPU devices, strict ranks, a compilation cache, little optimisation, no accelerator."""

import gc
import itertools
import os
import pathlib
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # XLA's own threads already share the work of a batch
# A seventh of the time: programs without lines of source. Here and below by environment, so that interpreters which a
# test starts do the same.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Tests run thousands of small programs once each: compiling is what they cost, and these more than halve it. The same
# tests must pass as users run the code, too: `XLA_FLAGS= make test`.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)

# A suite that a script starts in the background ignores Ctrl-C; the tests that send it would wait in vain.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_numpy_rank_promotion", "raise")

# Draws are the same on every machine: a failing draw becomes a named example, not a flake.
settings.register_profile(
    "default", deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("default")


# Tracing makes millions of objects, few of them garbage: looking for it as often as Python does took a sixteenth.
gc.set_threshold(50_000, 20, 20)

MAPS = pathlib.Path("/proc/self/maps")
DONE = itertools.count(1)


def pytest_runtest_teardown():
    """Lets go of compiled programs before they hold all memory maps that Linux gives a process, 65,530 by default.

    The compiler crashes there, and a worker comes to as many in half an hour. Counting takes milliseconds, so it is
    done every so often; what is needed again is traced again, so it is done late.
    """
    if next(DONE) % 20 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64():
    """64-bit types for one test."""
    with jax.enable_x64(True):
        yield

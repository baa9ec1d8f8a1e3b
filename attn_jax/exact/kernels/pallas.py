"""Flash attention, forward with statistics, as a Pallas kernel for GPUs (Triton) and TPUs (Mosaic).

The square of logits is never in memory: each tile of queries meets the tiles of keys that it may see, one after
another, and carries the softmax over those that it has met (`attn_jax.exact.kernels.recurrence`). The two machines
differ in where that happens.

    GPU   One program for each tile of queries loops over its keys. What it carries stays in registers.
    TPU   The steps of the grid run in turn on one core, which fetches what the next step needs during this one. So
          each step is one visit, and what is carried from step to step stays in scratch memory.

On a CPU the kernel for GPUs is interpreted: slow, and meant for tests.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as mosaic
from jax.experimental.pallas import triton

from attn_jax import checks
from attn_jax.exact.kernels import recurrence
from attn_jax.exact.kernels.recurrence import State, Static
from attn_jax.exact.kernels.visits import Lists, Visits, in_turn
from attn_jax.typing import Array, Bool, Float, Int

STATISTICS = tuple(recurrence.NEEDS)
SMALLEST = 16  # side of a matrix product on a GPU
ZERO = np.int32(0)  # in index maps, where 0 would be int64 under x64
Machine = Literal["cuda", "tpu"]


def flash_attention(
    query: Float[Array, "p r h"],
    key: Float[Array, "p s h"],
    value: Float[Array, "p s v"],
    *,
    query_length: int,
    plan: Callable[[int, int], Visits],
    visible: Callable[[Int[Array, "t 1"], Int[Array, "1 s"]], Bool[Array, "#t #s"]] | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    statistics: Sequence[str] = (),
    precision: Literal["default", "highest"] | None = None,
    tile: tuple[int, int] | None = None,
    interpret: Machine | None = None,
) -> tuple[Float[Array, "p r v"], Float[Array, "p r"], dict[str, Float[Array, "p r"] | Int[Array, "p r"]]]:
    """Output, log-sum-exp and statistics of `softmax(cap(scale · q·k)) · value` over the visible keys.

    Args:
        query: `[P, R, H]`: P batch items × key/value heads; R = G · T rows, one query head of the group after another.
        key, value: `[P, S, H]`, `[P, S, V]`. All three are float32, bfloat16 or float16, and not without entries.
        query_length: T.
        plan: the visits for tiles of so many (queries, keys), in NumPy: which size is best depends on the machine.
        visible: who may see whom, of the indices of queries `[t, 1]` and keys `[1, s]`, without arrays of its own;
            None: all see all.
        scale, soft_cap: of the logits.
        statistics: names out of `STATISTICS`.
        precision: of the products. None is the machine's: float32 is multiplied as TF32 on GPUs, as bfloat16 on TPUs.
        tile: (queries, keys) a tile, powers of two from 16 on; None chooses by the machine.
        interpret: interpret the kernel for this machine rather than run that for the machine at hand.

    Returns:
        Output `[P, R, V]`, log-sum-exp `[P, R]` and statistics `[P, R]`: float32, and int32 for `visible_keys`. A row
        that sees nothing has output 0, log-sum-exp and `max_logit` -inf, and 0 for the others.

    Raises:
        ValueError: an unknown statistic, or a tile of another size.
        TypeError: arrays of another dtype.
    """
    for name in statistics:
        checks.one_of("statistics", name, STATISTICS)
    if query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"query must be float32, bfloat16 or float16, got {query.dtype}")
    if tile is not None and any(size != max(SMALLEST, pl.next_power_of_2(size)) for size in tile):
        raise ValueError(f"tile must be two powers of two from {SMALLEST} on, got {tile}")
    lengths, measured = (query_length, key.shape[1]), tuple(dict.fromkeys(("logsumexp", *statistics)))

    def kernel(machine: Machine, interpreted: bool) -> Callable[[Array, Array, Array], list[Array]]:
        sizes = tile or _choose_tile(machine, lengths, max(query.shape[-1], value.shape[-1]), query.dtype.itemsize)
        lists = in_turn(plan(*sizes), cut_short=lengths[1] % sizes[1] != 0)
        static = Static(lengths, sizes, visible, scale, soft_cap, measured, precision)
        return functools.partial(_run, static, lists, machine, interpreted)

    if interpret is not None:
        output, *rows = kernel(interpret, True)(query, key, value)
    else:  # no default: elsewhere it had better raise than crawl
        output, *rows = lax.platform_dependent(
            query, key, value, cuda=kernel("cuda", False), tpu=kernel("tpu", False), cpu=kernel("cuda", True)
        )
    by_name = dict(zip(measured, rows, strict=True))
    if "visible_keys" in by_name:
        by_name["visible_keys"] = by_name["visible_keys"].astype(jnp.int32)
    return output, by_name["logsumexp"], {name: by_name[name] for name in statistics}


def _choose_tile(machine: Machine, lengths: tuple[int, int], width: int, itemsize: int) -> tuple[int, int]:
    row = pl.next_power_of_2(width) * itemsize
    if machine == "tpu":  # a step must outweigh what it costs to begin one, and its tiles fit 16 MiB
        largest = (min(2**20 // row, 512),) * 2
    else:  # 32 KiB of queries and twice, for what is used and what is fetched next, 16 KiB of keys and of values
        largest = min(2**15 // row, 256 // itemsize), min(2**14 // row, 128 // itemsize)
    queries, keys = (
        max(SMALLEST, min(most, pl.next_power_of_2(length))) for most, length in zip(largest, lengths, strict=True)
    )
    return queries, keys


def _run(
    static: Static, lists: Lists, machine: Machine, interpret: bool, query: Array, key: Array, value: Array
) -> list[Array]:
    """Runs the kernel on axes padded to what its machine needs: output `[P, R, V]`, then the statistics `[P, R]`."""
    rows, (length, _), value_width = query.shape[:2], static.lengths, value.shape[-1]
    if machine == "tpu":
        width, run = (lambda n: n), _run_grid
        if query.dtype == jnp.float16:  # which a TPU does not have
            query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    else:
        width, run = (lambda n: max(SMALLEST, pl.next_power_of_2(n))), _run_loop

    def pad(x: Array, tile: int) -> Array:
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % tile), (0, width(x.shape[2]) - x.shape[2])))

    query = query.reshape(-1, length, query.shape[-1])  # one query head after another
    output, *statistics = run(
        static, lists, interpret, *map(pad, (query, key, value), (static.tile[0], *static.tile[1:] * 2))
    )
    statistics = [x.reshape(len(x), -1)[:, :length].reshape(rows) for x in statistics]
    return [output[:, :length, :value_width].reshape(*rows, value_width), *statistics]


def _results(static: Static, query: Array, value: Array, of_tile: Callable[..., pl.BlockSpec]) -> dict[str, Any]:
    """Shapes and blocks of output `[P · G, T, V]` and of each statistic, tile by tile: `[P · G, nq, 1, t]`."""
    (heads, length, _), size = query.shape, static.tile[0]
    shapes = [(heads, length, value.shape[-1]), *[(heads, length // size, 1, size)] * len(static.measured)]
    blocks = [of_tile(None, size, value.shape[-1]), *[of_tile(None, None, 1, size)] * len(static.measured)]
    return {"out_shape": [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], "out_specs": blocks}


def _write(static: Static, results: Sequence[Any], state: State) -> None:
    output, *statistics = recurrence.finish(static, state)
    results[0][...] = output
    for ref, column in zip(results[1:], statistics, strict=True):
        ref[...] = column.T


# On a GPU: a loop.


def _loop_kernel(
    static: Static, columns: Any, begins: Any, full: Any, mixed: Any, query: Any, key: Any, value: Any, *results: Any
) -> None:
    i, size, queries = lax.rem(pl.program_id(0), np.int32(begins.shape[0])), static.tile[1], query[...]

    def visit(mixed: bool, n: Array, state: State) -> State:
        keys = pl.ds(columns[n] * size, size)
        return recurrence.visit(static, state, queries, key[keys, :], value[keys, :], (i, columns[n]), mixed=mixed)

    state = recurrence.start(static, value.shape[-1])
    begin, middle, end = begins[i], begins[i] + full[i], begins[i] + full[i] + mixed[i]
    state = lax.fori_loop(begin, middle, functools.partial(visit, False), state)
    state = lax.fori_loop(middle, end, functools.partial(visit, True), state)
    _write(static, results, state)


def _run_loop(static: Static, lists: Lists, interpret: bool, query: Array, key: Array, value: Array) -> Sequence[Array]:
    size, tiles, group = static.tile[0], np.int32(len(lists.begins)), np.int32(query.shape[0] // key.shape[0])

    def of_tile(*block: int | None) -> pl.BlockSpec:
        rest = (ZERO,) * (len(block) - 2)
        return pl.BlockSpec(block, lambda program: (lax.div(program, tiles), lax.rem(program, tiles), *rest))

    def of_head(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda program: (lax.div(program, tiles * group), ZERO, ZERO))

    num_warps = 4 if size * max(query.shape[-1], value.shape[-1]) <= 2**12 else 8  # by the registers that the sums take
    return pl.pallas_call(
        functools.partial(_loop_kernel, static),
        # One axis, a head after another: programs that run at once share its keys in the cache.
        grid=(query.shape[0] * len(lists.begins),),
        in_specs=[*[pl.BlockSpec()] * 4, of_tile(None, size, query.shape[-1]), of_head(key), of_head(value)],
        **_results(static, query, value, of_tile),
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=2),
        interpret=interpret,
        name="flash_attention",
    )(*lists[1:], query, key, value)


# On a TPU: a grid.


def _grid_kernel(
    static: Static,
    rows: Any, columns: Any, begins: Any, full: Any, mixed: Any,
    query: Any, key: Any, value: Any, *results_and_state: Any,
) -> None:  # fmt: skip
    *results, carried = results_and_state
    n = pl.program_id(1)
    i = rows[n]
    turn, count = n - begins[i], full[i] + mixed[i]

    def keep(state: State) -> None:
        for name, x in state.items():
            carried[name][...] = x

    def kept() -> State:
        return {name: ref[...] for name, ref in carried.items()}

    def visit(mixed: bool) -> None:
        keep(recurrence.visit(static, kept(), query[...], key[...], value[...], (i, columns[n]), mixed=mixed))

    pl.when(turn == 0)(lambda: keep(recurrence.start(static, value.shape[-1])))
    pl.when(turn < full[i])(lambda: visit(mixed=False))
    pl.when((turn >= full[i]) & (turn < count))(lambda: visit(mixed=True))
    pl.when(turn == jnp.maximum(count, 1) - 1)(lambda: _write(static, results, kept()))


def _run_grid(static: Static, lists: Lists, interpret: bool, query: Array, key: Array, value: Array) -> Sequence[Array]:
    (size, keys), group = static.tile, np.int32(query.shape[0] // key.shape[0])

    def of_tile(*block: int | None) -> pl.BlockSpec:
        rest = (ZERO,) * (len(block) - 2)
        return pl.BlockSpec(block, lambda head, n, rows, *_: (head, rows[n], *rest))

    def of_keys(x: Array) -> pl.BlockSpec:
        block = None, keys, x.shape[-1]
        return pl.BlockSpec(block, lambda head, n, _, columns, *__: (lax.div(head, group), columns[n], ZERO))

    results = _results(static, query, value, of_tile)
    state = jax.eval_shape(functools.partial(recurrence.start, static, value.shape[-1]))
    return pl.pallas_call(
        functools.partial(_grid_kernel, static),
        grid_spec=mosaic.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lists),
            grid=(query.shape[0], len(lists.rows)),
            in_specs=[of_tile(None, size, query.shape[-1]), of_keys(key), of_keys(value)],
            out_specs=results["out_specs"],
            scratch_shapes=[{name: mosaic.VMEM(x.shape, x.dtype) for name, x in state.items()}],
        ),
        out_shape=results["out_shape"],
        compiler_params=mosaic.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="flash_attention",
    )(*lists, query, key, value)

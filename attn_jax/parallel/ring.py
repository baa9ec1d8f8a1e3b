"""Exact softmax attention over a sequence that is spread over devices: no device ever holds all keys.

Each device keeps its queries, and the keys and values go round the ring. At each turn a device attends to those that
are visiting, merges what it fetched into what it has by the log-sum-exps, and passes them on. After D turns every
query has met every key, and the keys are home again.

    for _ in range(D):
        output, lse = merge((output, lse), attention(query, key, value))
        key, value = pass_on((key, value))

Backward goes round once more. The gradients of queries stay, those of keys and values travel with them: given the
log-sum-exp over all keys, a part of the weights is computed again without the other parts.

A part, queries of one chunk of the sequence by keys of another, is a small square of the large one. The tile loop of
`attn_jax.exact` works on it with the positions that it has there, and skips what the mask hides.

Reference: Liu, Zaharia & Abbeel 2023 (ring attention), section 3; the gradients: Dao et al. 2022, algorithm 4.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from attn_jax import biases, checks, masks
from attn_jax.exact import blockwise
from attn_jax.exact.arguments import AttentionOptions, Slots, only_attention_options, prepare
from attn_jax.exact.merge import merge_attention
from attn_jax.exact.steps import Differentiable, Fixed, Static, like
from attn_jax.exact.tiles import Blocks, Blockwise, choose_blocks
from attn_jax.lazy import Grid, Square
from attn_jax.parallel import collectives, parts
from attn_jax.parallel.zigzag import Ring, from_zigzag, to_zigzag
from attn_jax.typing import Array, ArrayLike, Float

Mask = masks.Mask | ArrayLike | None
Bias = biases.Bias | ArrayLike | None
Part = tuple[Static, Differentiable, Fixed]  # a call of the tile loop
Rows = tuple[Array, Array]  # output [*B, T, K, G, V] and log-sum-exp [*B, T, K, G]


@overload
def ring_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: Bias = None, mask: Mask = None, *,
    mesh: Mesh, axis_name: str | None, batch_axis: str | None = None, head_axis: str | None = None,
    dropout_rate: float = 0.0, dropout_rng: ArrayLike | None = None, implementation: str | Blockwise | None = None,
    return_residual: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> Array: ...  # fmt: skip


@overload
def ring_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: Bias = None, mask: Mask = None, *,
    mesh: Mesh, axis_name: str | None, batch_axis: str | None = None, head_axis: str | None = None,
    dropout_rate: float = 0.0, dropout_rng: ArrayLike | None = None, implementation: str | Blockwise | None = None,
    return_residual: Literal[True], **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...  # fmt: skip


def ring_attention(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b s k h"],
    value: Float[ArrayLike, "*b s k v"],
    bias: Bias = None,
    mask: Mask = None,
    *,
    mesh: Mesh,
    axis_name: str | None,
    batch_axis: str | None = None,
    head_axis: str | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: ArrayLike | None = None,
    implementation: str | Blockwise | None = None,
    return_residual: bool = False,
    **options: Unpack[AttentionOptions],
) -> Array | tuple[Array, Array]:
    """`attn_jax.dot_product_attention` on a mesh: the sequence along one axis, batch and heads along others.

    The same semantics for the same global arrays, in and out, with gradients in reverse mode, in memory that falls
    with the devices. A length that `2 · D` divides (D if nothing is causal) should arrive in parts of the sequence;
    another one arrives whole, and is filled up inside. A causal mask makes the sequence lie in zig-zag meanwhile.

    Masks and biases that are arrays are shared by queries, each row being whole. One of your own reads positions like
    those of the package, and annotates its arrays with their axes, as in `ids: Int[Array, "*b t"]`.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        value: `[*B, S, K, V]`.
        bias, mask, dropout_rate, dropout_rng, return_residual, ...: as for `dot_product_attention`; dropout keeps
            the same weights.
        mesh: the devices, on automatic axes (`make_mesh`). Along an axis that is not named below, all do the same.
        axis_name: the mesh axis that shares T and S; None for none.
        batch_axis: the one that shares the first batch axis.
        head_axis: the one that shares N and K.
        implementation: None or "blockwise", or `Blockwise(...)` for tiles of a chosen size.

    Returns:
        `[*B, T, N, V]` in the query's dtype; with `return_residual` also the log-sum-exp `[*B, T, N]`.

    Raises:
        ValueError: also for an axis that the mesh does not have, and sizes that its devices cannot share evenly.
        TypeError: a wrong type or dtype.

    Reference: Liu, Zaharia & Abbeel 2023, section 3.

    >>> from attn_jax.parallel import make_mesh
    >>> x, mesh = jnp.zeros((4, 1, 1)), make_mesh(sequence=jax.device_count())  # all logits are 0
    >>> value = jnp.array([1.0, 3.0, 5.0, 7.0])[:, None, None]
    >>> output = ring_attention(x, x, value, mesh=mesh, axis_name="sequence", is_causal=True)
    >>> output[:, 0, 0].round(4).tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    problem = prepare(
        query, key, value, bias, mask,
        dropout_rate=dropout_rate, dropout_rng=dropout_rng, **only_attention_options("ring_attention", options),
    )  # fmt: skip
    ring = Ring(mesh, axis_name, batch_axis, head_axis)
    ring.check_shares(problem.query, problem.key)
    if not isinstance(implementation, Blockwise):
        checks.one_of("implementation", implementation, [None, "blockwise"])
        implementation = Blockwise()
    if ring.devices > 1 and _leans(problem.mask):
        ring = dataclasses.replace(ring, pieces=2)
    static, differentiable, fixed = blockwise.call_of(problem, Blocks(1, 1, 1, 1))
    rows = _run(
        _Call(ring, static, implementation),
        dataclasses.replace(differentiable, sinks=None),
        dataclasses.replace(fixed, mask=parts.with_ids_of_keys(fixed.mask)),
    )
    output, logsumexp = blockwise.per_head(rows[0]), blockwise.per_head(rows[1], 0)
    if problem.sinks is not None:  # once, not at each turn
        output, _ = merge_attention([output], [logsumexp], sinks=problem.sinks)
    output = output.astype(problem.query.dtype)
    return (output, logsumexp) if checks.boolean("return_residual", return_residual) else output


def _leans(mask: masks.Mask | None) -> bool:
    """Whether later queries are known to see more than earlier ones."""
    if isinstance(mask, masks.And):
        return _leans(mask.left) or _leans(mask.right)
    return isinstance(mask, (masks.Causal, masks.PrefixLM))


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is known of a call when it is traced. The sizes of tiles in `static` are left to each part."""

    ring: Ring
    static: Static
    tiles: Blockwise


@functools.partial(jax.jit, static_argnums=0)
def _run(call: _Call, differentiable: Differentiable, fixed: Fixed) -> Rows:
    """Fills up the sequence until all chunks are full, and lays it out for the ring and back."""
    ring, (*batch, _, queries, keys) = call.ring, fixed.square.shape
    all_queries, all_keys = (ring.chunks * max(-(-length // ring.chunks), 1) for length in (queries, keys))
    if (all_queries, all_keys) != (queries, keys):
        there = Slots(jnp.arange(all_queries) < queries, jnp.arange(all_keys) < keys)
        fixed = dataclasses.replace(fixed, mask=there if fixed.mask is None else fixed.mask & there)
    letters, lengths = parts.letters_of(differentiable, fixed), {"t": all_queries, "k": all_keys, "s": all_keys}
    arrays = jax.tree.map(lambda x, spelling: parts.pad(x, spelling, lengths), (differentiable, fixed), letters)
    of_rows = (letters[0].query,) * 2
    rows = _attend(call, *to_zigzag(arrays, letters, ring))
    output, logsumexp = from_zigzag(rows, of_rows, ring)
    first = functools.partial(lax.slice_in_dim, start_index=0, limit_index=queries, axis=len(batch))
    return first(output), first(logsumexp)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, differentiable: Differentiable, fixed: Fixed) -> Rows:
    return _forward_once(call, differentiable, fixed)


def _attend_forward(call: _Call, differentiable: Differentiable, fixed: Fixed) -> tuple[Rows, tuple]:
    output, logsumexp = _forward_once(call, differentiable, fixed)
    rows = checkpoint_name(output, blockwise.OUTPUT), checkpoint_name(logsumexp, blockwise.LOGSUMEXP)
    return rows, (differentiable, fixed, rows)


def _attend_backward(call: _Call, residuals: tuple, cotangents: Rows) -> tuple[Differentiable, None]:
    return _backward_once(call, *residuals, cotangents), None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(call: _Call, differentiable: Differentiable, fixed: Fixed) -> Rows:
    letters = parts.letters_of(differentiable, fixed)

    def on_device(differentiable: Differentiable, fixed: Fixed) -> Rows:
        return _Device(call, letters, differentiable, fixed).forward()

    return _on_devices(on_device, call.ring, letters, (letters[0].query,) * 2)(differentiable, fixed)


def _backward(
    call: _Call, differentiable: Differentiable, fixed: Fixed, rows: Rows, cotangents: Rows
) -> Differentiable:
    letters = parts.letters_of(differentiable, fixed)
    of_rows, of_gradients = (letters[0].query,) * 2, parts.letters_of_gradients(differentiable, letters[0])

    def on_device(differentiable: Differentiable, fixed: Fixed, rows: Rows, cotangents: Rows) -> dict[str, Any]:
        return _Device(call, letters, differentiable, fixed).backward(rows, cotangents)

    run = _on_devices(on_device, call.ring, (*letters, of_rows, of_rows), of_gradients)
    return like(differentiable, run(differentiable, fixed, rows, cotangents))


def _on_devices(function: Callable[..., Any], ring: Ring, takes: Any, gives: Any) -> Callable[..., Any]:
    takes, gives = jax.tree.map(ring.spec, (takes, gives))
    # Unchecked, since the tile loop starts from zeros that are the same everywhere.
    return jax.shard_map(function, mesh=ring.mesh, in_specs=takes, out_specs=gives, check_vma=False)


def _name(_: _Call) -> str:
    return "ring_attention"


_forward_once, _backward_once = blockwise.once(_forward, _name), blockwise.once(_backward, _name)


@dataclasses.dataclass(frozen=True)
class _Device:
    """What one device does, inside `shard_map`, with its share of the arrays."""

    call: _Call
    letters: tuple[Any, Any]
    differentiable: Differentiable
    fixed: Fixed

    @property
    def dtype(self) -> jnp.dtype:
        """That of logits and sums."""
        return jnp.promote_types(self.differentiable.query.dtype, jnp.float32)

    def forward(self) -> Rows:
        """The output and the log-sum-exp of its queries, over all keys."""
        letters = self.letters[0].query

        def visit(place: parts.Place, part: Part, _: None, rows: Rows) -> tuple[None, Rows]:
            output, logsumexp = (parts.cut(x, letters, place) for x in rows)
            fetched: Any = blockwise.forward(*part)
            merged = merge_attention([output, fetched.output], [logsumexp, fetched.logsumexp])
            output, logsumexp = (parts.put(x, new, letters, place) for x, new in zip(rows, merged, strict=True))
            return None, (output, logsumexp)

        value: Any = self.differentiable.value
        shape = self.differentiable.query.shape[:-1]
        nothing = jnp.zeros((*shape, value.shape[-1]), self.dtype), jnp.full(shape, -jnp.inf, self.dtype)
        return self.go_round(visit, None, nothing)[1]

    def backward(self, rows: Rows, cotangents: Rows) -> dict[str, Any]:
        """The gradients of its queries and, once they are home, of its keys and values; of the rest the whole sums."""
        letters = parts.letters_of_gradients(self.differentiable, self.letters[0])

        def visit(place: parts.Place, part: Part, travelling: dict, staying: dict) -> tuple[dict, dict]:
            output, logsumexp = (parts.cut(x, letters["query"], place) for x in rows)
            d_output, d_logsumexp = (parts.cut(x, letters["query"], place) for x in cotangents)
            results, pulled = blockwise.Results(output, logsumexp, {}), blockwise.Results(d_output, d_logsumexp, {})
            gradients = blockwise.backward(*part, results, pulled)

            def add(total: Array, x: Array, spelling: PartitionSpec) -> Array:
                return parts.add(total, x, spelling, place)

            def added(totals: dict) -> dict:
                return {name: jax.tree.map(add, x, gradients[name], letters[name]) for name, x in totals.items()}

            return added(travelling), added(staying)

        of: Any = self.differentiable
        zeros = functools.partial(jnp.zeros_like, dtype=self.dtype)
        heads = math.prod(of.query.shape[-3:-1])
        travelling = {"key": zeros(of.key), "value": zeros(of.value)}
        staying = {
            "query": zeros(of.query),
            "bias": [] if of.bias is None else of.bias.zeros(self.dtype),
            "scale": None if of.scale is None else jnp.zeros(heads, self.dtype),
            "sinks": None,
        }
        travelling, staying = self.go_round(visit, travelling, staying)

        def add_up(x: Array, spelling: PartitionSpec) -> Array:
            """Over the devices that have all of an array, each of which saw another part of its gradient."""
            shared = self.call.ring.spec(spelling)
            return collectives.add_up(x, [axis for axis in self.call.ring.axes if axis not in shared])

        return travelling | {name: jax.tree.map(add_up, x, letters[name]) for name, x in staying.items()}

    def go_round(self, visit: Callable[..., tuple[Any, Any]], travelling: Any, staying: Any) -> tuple[Any, Any]:
        """What travels with the keys and what stays, after `visit` of every part: its place and its arrays."""
        ring, axis = self.call.ring, len(self.fixed.square.batch)
        me = collectives.device_index(ring.axis_name)
        queries, keys = (x.shape[axis] // ring.pieces for x in (self.differentiable.query, self.differentiable.key))

        def turn(step: Array, carry: tuple) -> tuple:
            visiting, travelling, staying = carry
            owner = (me - step) % ring.devices  # of the keys that are visiting

            def pair(index: Array, carry: tuple) -> tuple:
                mine, theirs = index // ring.pieces, index % ring.pieces
                first_query, first_key = ring.chunk(me, mine) * queries, ring.chunk(owner, theirs) * keys
                place = {"t": (mine * queries, queries), "k": (theirs * keys, keys), "s": (first_key, keys)}
                part = self.part(place, visiting, first_query, first_key)
                return lax.cond(_may_see(part[2]), lambda: visit(place, part, *carry), lambda: carry)

            travelling, staying = lax.fori_loop(0, ring.pieces**2, pair, (travelling, staying))
            # The turn has only read the keys: they may have been on their way meanwhile.
            visiting, travelling = (
                collectives.pass_on(x, ring.axis_name, ring.devices) for x in (visiting, travelling)
            )
            return visiting, travelling, staying

        visiting = self.differentiable.key, self.differentiable.value
        _, travelling, staying = lax.fori_loop(0, ring.devices, turn, (visiting, travelling, staying))
        return travelling, staying

    def part(self, place: parts.Place, visiting: tuple[Array, Array], first_query: Array, first_key: Array) -> Part:
        """A call of the tile loop on the part that begins at a query and a key of the whole square."""
        ring, whole = self.call.ring, self.fixed.square
        arrays = dataclasses.replace(self.differentiable, key=visiting[0], value=visiting[1]), self.fixed
        differentiable, fixed = jax.tree.map(lambda x, letters: parts.cut(x, letters, place), arrays, self.letters)
        *batch, queries, kv_heads, groups, _ = differentiable.query.shape
        shape = (*batch, kv_heads * groups, queries, differentiable.key.shape[-3])
        origin = [0] * len(batch) + [collectives.device_index(ring.head_axis) * shape[-3], first_query, first_key]
        if batch:
            origin[0] = collectives.device_index(ring.batch_axis) * batch[0]
        query_positions, key_positions = fixed.square.query_positions, fixed.square.key_positions
        if query_positions is None:
            assert whole.first_query is not None
            following = jnp.arange(queries) + first_query + whole.first_query
            query_positions = Square(shape).per_query("query_positions", following)
        if key_positions is None:
            key_positions = Square(shape).per_key("key_positions", jnp.arange(shape[-1]) + first_key)
        square = Square(
            shape,
            None,
            query_positions,
            key_positions,
            keys_in_place=whole.keys_in_place,
            part_of=whole.shape,
            origin=jnp.stack([jnp.asarray(start, jnp.int32) for start in origin]),
        )
        blocks = choose_blocks(square, kv_heads, self.call.tiles, fixed.mask)
        tile = {"queries": _even(queries, blocks.queries), "keys": _even(shape[-1], blocks.keys)}
        static = dataclasses.replace(self.call.static, blocks=dataclasses.replace(blocks, **tile))
        return static, differentiable, dataclasses.replace(fixed, square=square)


def _even(length: int, most: int) -> int:
    """A size up to `most` of tiles that hardly overlap."""
    return -(-length // -(-length // most))


def _may_see(fixed: Fixed) -> Array | bool:
    """Whether the mask of a part may leave anything of it."""
    if fixed.mask is None:
        return True
    *_, queries, keys = fixed.square.shape
    some, _ = fixed.mask.bounds(Grid(fixed.square, (queries, keys)))
    return jnp.asarray(some).any()

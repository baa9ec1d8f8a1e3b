"""What a task is, and how sequences are drawn from it."""

import dataclasses
from typing import Any, NamedTuple, Protocol, dataclass_transform, runtime_checkable

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int, Num


class Batch(NamedTuple):
    """Sequences, what to say at each token, and which answers count.

    Attributes:
        inputs: int32 `[*B, T]`, token ids.
        targets: int32 `[*B, T]`, token ids; 0 where nothing is asked.
        weights: float32 `[*B, T]`, 1 where an answer is asked for, else 0.

    >>> import jax
    >>> from attn_jax.training import tasks
    >>> batch = tasks.Copy(num_symbols=4, distance=1, length=4).batch(jax.random.key(0), step=0, size=2)
    >>> batch.weights.tolist()  # nothing is asked at the first token
    [[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]]
    >>> bool((batch.targets[:, 1:] == batch.inputs[:, :-1]).all())
    True
    """

    inputs: Int[Array, "*b t"]
    targets: Int[Array, "*b t"]
    weights: Float[Array, "*b t"]


@runtime_checkable
class Task(Protocol):
    """What a training run needs of its data.

    >>> import jax
    >>> from attn_jax.training import tasks
    >>> task = tasks.Copy(num_symbols=4, distance=1, length=4)
    >>> isinstance(task, tasks.Task), task.vocabulary_size, task.length, task.chance
    (True, 4, 4, 0.25)
    >>> first, again, later = (task.batch(jax.random.key(0), step, 2).inputs for step in (0, 0, 1))
    >>> bool((first == again).all()), bool((first == later).all())  # a function of key and step
    (True, False)
    """

    @property
    def vocabulary_size(self) -> int:
        """How many token ids there are, for inputs and targets alike."""
        ...

    @property
    def length(self) -> int:
        """T, tokens in a sequence."""
        ...

    @property
    def chance(self) -> float | None:
        """The accuracy of an answer without looking anything up; None where it is not known."""
        ...

    @property
    def num_held_out(self) -> int | None:
        """How many sequences evaluation has; None: as many as it wants."""
        ...

    def batch(self, key: Array, step: int | Int[ArrayLike, ""], size: int) -> Batch:
        """The training batch of a step."""
        ...

    def evaluation(self, num_batches: int, size: int) -> Batch:
        """Batches that never change and that training never sees."""
        ...


@dataclass_transform(frozen_default=True)
class TaskBase:
    """Makes each subclass a frozen dataclass and a pytree, and draws batches from its single sequences.

    Fields named in `data` hold arrays and are leaves. All others are static: hashable, compared by value.
    """

    def __init_subclass__(cls, *, data: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=not data)(cls)
        names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
        static = [name for name in names if name not in data]
        jax.tree_util.register_dataclass(cls, data_fields=list(data), meta_fields=static)

    @property
    def num_held_out(self) -> int | None:
        """How many sequences evaluation has; None: as many as it wants."""
        return None

    def batch(self, key: Array, step: int | Int[ArrayLike, ""], size: int) -> Batch:
        """The training batch of a step: the same for the same key and step, on its own or inside `jit`, `scan`, `vmap`.

        Args:
            key: of the run, `jax.random.key(seed)`.
            step: from 0 on; may be traced.
            size: B, how many sequences.

        Returns:
            Batch: `[B, T]`.

        Raises:
            ValueError, TypeError: something that is no key, no step or no size.
        """
        size = checks.positive_int("size", size)
        step = checks.integer_array("step", step)
        checks.rank("step", step, 0, "[]")
        checks.within("step", step, 0)
        keys = jax.random.split(jax.random.fold_in(checks.prng_key("key", key), step), size)
        return jax.vmap(self._train)(keys)

    def evaluation(self, num_batches: int, size: int) -> Batch:
        """Batches that never change and that training never sees; with more of them, the first stay the same.

        Args:
            num_batches: how many.
            size: B, sequences in each.

        Returns:
            Batch: `[num_batches, B, T]`, to go through by `lax.map`.

        Raises:
            ValueError, TypeError: numbers that are none, or more sequences than are held out.
        """
        num_batches = checks.positive_int("num_batches", num_batches)
        size = checks.positive_int("size", size)
        most = self.num_held_out
        if most is not None and num_batches * size > most:
            raise ValueError(
                f"num_batches · size must be at most {most}, the sequences held out; got {num_batches} · {size}"
            )
        flat = jax.vmap(self._evaluate)(jnp.arange(num_batches * size, dtype=jnp.int32))
        return jax.tree.map(lambda x: x.reshape(num_batches, size, *x.shape[1:]), flat)

    def _train(self, key: Array) -> Batch:
        """One training sequence, `[T]`."""
        raise NotImplementedError(f"{type(self).__name__} must define _train(key)")

    def _evaluate(self, index: Int[Array, ""]) -> Batch:
        """One sequence that is held out, `[T]`."""
        raise NotImplementedError(f"{type(self).__name__} must define _evaluate(index)")

    def _check_sizes(self, **least: int) -> None:
        """Raises unless each named field is an integer of at least that much."""
        for name, smallest in least.items():
            object.__setattr__(self, name, checks.positive_int(name, getattr(self, name), least=smallest))


class Generated(TaskBase):
    """A task whose sequences are drawn.

    Each task splits its sequences in two kinds that share no content, by a property that no part of a sequence tells
    (the sum of all symbols, the sign of a permutation). Training draws from one, evaluation from the other: disjoint
    for certain, however small the space, and alike in every statistic of a few tokens.
    """

    def draw(self, key: Array, *, held_out: bool) -> Batch:
        """One sequence of either kind, `[T]`."""
        raise NotImplementedError(f"{type(self).__name__} must define draw(key, *, held_out)")

    def _train(self, key: Array) -> Batch:
        return self.draw(key, held_out=False)

    def _evaluate(self, index: Int[Array, ""]) -> Batch:
        # The generator is named: evaluation does not follow the configured default.
        return self.draw(jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), index), held_out=True)


def shuffled(bits: Num[Array, "*b n"]) -> Int[Array, "*b n"]:
    """The numbers 0..n-1 in the random order that n random words stand in.

    One sort, and words that one call has drawn for all: `jax.random.permutation` of each would take twice as long to
    compile. Words that are equal, one in 2³² pairs, leave the smaller number first.
    """
    return jnp.argsort(bits, axis=-1).astype(jnp.int32)


def is_odd(order: Int[Array, "*b n"]) -> Bool[Array, "*b"]:
    """Whether different numbers stand in an odd permutation of their sorted order."""
    inversions = jnp.triu(order[..., :, None] > order[..., None, :])
    return jnp.sum(inversions, axis=(-2, -1), dtype=jnp.int32) % 2 == 1


def swap_last(order: Int[Array, " n"], when: Bool[Array, ""]) -> Int[Array, " n"]:
    """The last two numbers swapped, which turns an odd order into an even one and back."""
    return jnp.where(when, jnp.concatenate([order[:-2], order[:-3:-1]]), order)

"""A directed relation: A points to B, and B not to A. Symmetric scores cannot say it."""

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.training.tasks.base import Batch, Generated, is_odd, shuffled, swap_last
from attn_jax.typing import Array

CYCLE = 3  # the shortest cycle, where symmetric scores do worst


class Relation(Generated):
    """Entities that point to each other in fixed cycles x → y → z → x: say the payload of the one that x points to.

        (z, 1) (x, 0) (v, 7) (y, 5) (u, 3) (w, 4)   (y, 5) (u, 3)      asked at the last two: y → z: 1, u → v: 7

    A token is an entity and its payload. A sequence shows some cycles, all their entities in random order, so that x
    stands before y as often as after it; then one entity of each again, its token unchanged: the same token asks and is
    asked for. Payloads in a cycle differ. Who points to whom is the same in every sequence; it is learned. No position
    is needed, and one layer does it.

    **Direction is needed.** A scorer answers x with the payload of the token of largest score s(x, ·), as attention
    does whose largest weight decides. If s is symmetric, the three questions of a cycle need

        s(x, y) > s(x, z),   s(y, z) > s(y, x),   s(z, x) > s(z, y)

    which with s(a, b) = s(b, a) reads xy > zx > yz > xy: never all three. Each is asked as often as the others, so
    no symmetric scorer is right in more than 2/3 (`symmetric_limit`), and some are in 2/3. Terms of the query alone or
    of the key alone (biases, norms, the size of a value) cancel in the sum of the three inequalities and change
    nothing; nor does a causal mask, which shows a question all it needs. Outside the bound are positions that tell the
    questions apart, and what is computed from a mixture of all tokens, such as an answer by elimination: the fewer
    payloads, the more of that is to be learned.

    The order of the payloads, over all cycles shown, is an odd permutation in training and an even one in evaluation:
    what all cycles but one show tells nothing of it, and no choice of payloads is in both.

    Tokens: `num_payloads · entity + payload`, entity = `3 · cycle + member`, where member m points to m + 1 mod 3; then
    the answers.

    Args:
        num_cycles: of the relation, at least `num_shown`.
        num_shown: cycles in a sequence, at least 2; T is four times that.
        num_payloads: to choose from, at least 3.

    Raises:
        ValueError, TypeError: a size out of range or no integer.

    >>> import jax
    >>> from attn_jax.training import tasks
    >>> batch = tasks.Relation(num_cycles=2, num_shown=2, num_payloads=3).batch(jax.random.key(0), step=0, size=1)
    >>> (batch.inputs[0] // 3).tolist(), (batch.inputs[0] % 3).tolist()  # entities, payloads
    ([2, 5, 0, 3, 4, 1, 1, 4], [1, 1, 2, 0, 2, 0, 0, 2])
    >>> (batch.targets[0, 6:] - 18).tolist()  # of 2, and of 5
    [1, 1]
    """

    num_cycles: int = 8
    num_shown: int = 4
    num_payloads: int = 8

    def __post_init__(self) -> None:
        self._check_sizes(num_cycles=1, num_shown=2, num_payloads=CYCLE)
        if self.num_cycles < self.num_shown:
            raise ValueError(f"num_cycles must be at least num_shown = {self.num_shown}, got {self.num_cycles}")

    @property
    def vocabulary_size(self) -> int:
        """Entities with payloads, and answers."""
        return (CYCLE * self.num_cycles + 1) * self.num_payloads

    @property
    def length(self) -> int:
        """Three facts and a question for each cycle."""
        return (CYCLE + 1) * self.num_shown

    @property
    def chance(self) -> float:
        """Of the two others in the cycle, either."""
        return 1 / (CYCLE - 1)

    @property
    def symmetric_limit(self) -> float:
        """The most that symmetric scores reach."""
        return (CYCLE - 1) / CYCLE

    def draw(self, key: Array, *, held_out: bool) -> Batch:
        """One sequence, `[T]`."""
        words = (self.num_cycles, self.num_shown * self.num_payloads, self.num_shown * CYCLE, self.num_shown * CYCLE)
        bits = jnp.split(jax.random.bits(key, (sum(words),), jnp.uint32), np.cumsum(words)[:-1])
        for_cycles, for_payloads, for_questions, for_order = bits
        cycles = shuffled(for_cycles)[: self.num_shown]
        payloads = shuffled(for_payloads.reshape(self.num_shown, -1))[:, :CYCLE]
        odd = jnp.sum(is_odd(payloads)) % 2 == 1
        payloads = payloads.at[-1].set(swap_last(payloads[-1], odd if held_out else ~odd))

        members = jnp.arange(CYCLE, dtype=jnp.int32)
        tokens = self.num_payloads * (CYCLE * cycles[:, None] + members[None, :]) + payloads  # [cycles shown, members]
        facts = tokens.reshape(-1)[shuffled(for_order)]
        who = shuffled(for_questions.reshape(self.num_shown, CYCLE))[:, :1]
        questions = jnp.take_along_axis(tokens, who, axis=1)[:, 0]
        answers = jnp.take_along_axis(payloads, (who + 1) % CYCLE, axis=1)[:, 0]
        nothing = jnp.zeros_like(facts)
        return Batch(
            inputs=jnp.concatenate([facts, questions]),
            targets=jnp.concatenate([nothing, CYCLE * self.num_cycles * self.num_payloads + answers]),
            weights=jnp.concatenate([nothing, jnp.ones_like(answers)]).astype(jnp.float32),
        )

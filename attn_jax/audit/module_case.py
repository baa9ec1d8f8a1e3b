"""A module under audit: how it is called, which tokens it should see, and what its own weights would answer."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from attn_jax.audit import roles
from attn_jax.audit.context import Expectation
from attn_jax.diagnostics import reference

Array = NDArray[np.float64]
LENGTH = 8

Turned = tuple[str | None, str | None]  # the rotary positions of queries and of keys


class Skip(Exception):
    """A check cannot say anything; the message says why."""


class Case:
    """One module under audit."""

    def __init__(
        self,
        module: nnx.Module,
        width: int,
        call: Callable[..., Any],
        decode: Callable[..., Any] | None,
        expect: Expectation,
        found: roles.Projections,
    ) -> None:
        self.module, self.width, self.expect, self.found = module, width, expect, found
        self.call, self._decode = call, decode
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((2, LENGTH, width)).astype(np.float32)
        self.other = rng.standard_normal((2, LENGTH, width)).astype(np.float32)

    def require_projections(self) -> None:
        """Skips a check that reads weights which were not found."""
        if missing := [role for role in roles.ROLES if role not in self.found.weights]:
            raise Skip(
                f"no weight of {', '.join(missing)} was found: say parameters=, and num_heads= of matrices [D, N H]"
            )

    def run(self, x: Any) -> Array:
        """The output in float64."""
        output = self.call(self.module, jnp.asarray(x))
        output = output[0] if isinstance(output, (tuple, list)) else output
        output = np.asarray(output, np.float64)
        if output.shape != np.shape(x):
            raise ValueError(f"it returned shape {output.shape} where {np.shape(x)}, [B, T, D], was expected")
        return output

    def decoded(self, x: Any) -> Array:
        """The same, token by token."""
        if self._decode is None:
            raise Skip("no decode= was given")
        return np.asarray(self._decode(self.module, jnp.asarray(x)), np.float64)

    def seen(self) -> NDArray[np.bool_]:
        window = self.expect.window
        assert not isinstance(window, int)
        return reference.visible(LENGTH, LENGTH, causal=self.expect.causal, window=window)

    def answer(self, x: Any, scale: float, turned: Turned, *, tiled: bool = False) -> Array:
        """What its projections give with a scale, rotary positions, and keys tiled over the heads of a group."""
        query, key, value = (self.found.heads(role, np.asarray(x, np.float64)) for role in roles.ROLES[:3])
        query, key = (
            y if kind is None
            else reference.rotate(y, base=self.expect.rotary_base, interleaved=kind == "rotary_interleaved")
            for y, kind in zip((query, key), turned, strict=True)
        )  # fmt: skip
        if tiled:
            key = np.tile(key, (1, 1, query.shape[2] // key.shape[2], 1))
        logits = scale * reference.scores(query, key)
        mask = np.broadcast_to(self.seen(), logits.shape)
        weights = reference.weights(logits, mask, cap=self.expect.logits_soft_cap)
        return self.found.merged(reference.outputs(weights, value))

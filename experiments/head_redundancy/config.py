"""The flags of `head_redundancy`."""

import dataclasses

from experiments.config import option
from experiments.head_removal import RemovalConfig

ORDERS = {"similar": "the most similar first", "importance": "the least important first", "chance": "by chance"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RedundancyConfig(RemovalConfig):
    """Flags of this experiment."""

    shares: tuple[float, ...] = option((0.2, 0.4), "shares of the heads that go, ascending", least=0.001, most=0.9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.shares) != sorted(self.shares):
            raise ValueError(f"shares must ascend, got {self.shares}")

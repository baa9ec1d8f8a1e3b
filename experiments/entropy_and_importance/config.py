"""The flags of `entropy_and_importance`."""

import dataclasses

from experiments.config import option
from experiments.head_removal import RemovalConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportanceConfig(RemovalConfig):
    """Flags of this experiment."""

    singles: int = option(6, "heads that are removed one by one", least=3, most=10**6)

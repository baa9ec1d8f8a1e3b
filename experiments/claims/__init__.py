"""The claims: what people say, what we predicted, and the rule of each verdict, written before measuring.

The lines in the rules (5%, one hundredth, …) were fixed before the first run and are not moved afterwards. A verdict
holds for the scope it prints and no further.
"""

from collections.abc import Mapping
from typing import Any

from experiments import verdicts
from experiments.claims import (
    cost,
    diagnosis,
    dynamics,
    explanation,
    heads,
    inductive,
    linear,
    low_rank,
    positions,
    projections,
    recall,
    removal,
    scale,
    scores,
    sparse,
    trained_heads,
)
from experiments.verdicts import Claim, Evidence, Outcome

TOPICS = (
    scores,
    scale,
    projections,
    heads,
    trained_heads,
    positions,
    cost,
    diagnosis,
    dynamics,
    recall,
    linear,
    low_rank,
    inductive,
    sparse,
    explanation,
    removal,
)

CLAIMS: Mapping[str, Claim] = {claim.id: claim for topic in TOPICS for claim in topic.CLAIMS}


def judge(claim_id: str, evidence: Evidence, **scope: Any) -> Outcome:
    """The outcome of claim `claim_id` on `evidence`."""
    return verdicts.judge(CLAIMS[claim_id], evidence, **scope)

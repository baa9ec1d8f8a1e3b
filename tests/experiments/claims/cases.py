"""Evidence made by hand."""

from experiments.claims import CLAIMS
from experiments.estimates import Estimate

WIDE = "wide"  # an interval that settles nothing


def evidence(claim_id: str, **values) -> dict[str, Estimate]:
    """Tight intervals around the given values (a pair is an interval); what is not given is 1."""
    found = {}
    for name in CLAIMS[claim_id].evidence:
        value = values.pop(name, 1.0)
        if value == WIDE:
            found[name] = Estimate(0.5, -1e6, 1e6, 16)
        elif isinstance(value, tuple):
            found[name] = Estimate(sum(value) / 2, *value, 16)
        else:
            found[name] = Estimate(value, value - 1e-6, value + 1e-6, 16)
    assert not values, f"{claim_id} reads no {sorted(values)}"
    return found

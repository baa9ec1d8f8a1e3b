"""How the page calls what was measured, in the order in which it is best read."""

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Measure:
    """The words and the colours of a measure.

    Attributes:
        label: its name on the page.
        explanation: how to read it.
        low, high: ends of the colours; None: of what was measured.
    """

    label: str
    explanation: str
    low: float | None = None
    high: float | None = None


MEASURES = {
    "normalized_entropy": Measure("Entropy", "H / ln n: 1 spreads evenly over the keys in sight, 0 takes one.", 0, 1),
    "normalized_entropy_no_sink": Measure(
        "Entropy without the sink", "The same over all keys but the first: what a sink hides.", 0, 1
    ),
    "sink_mass": Measure("Mass on the first token", "Mean weight on position 0; heads above 0.3 are sink heads.", 0, 1),
    "max_weight": Measure("Largest weight", "Mean over rows of their largest weight.", 0, 1),
    "logit_sd": Measure("Spread of the logits", "Mean over rows of the standard deviation.", 0),
    "max_logit": Measure("Largest logit", "Of all rows. Above 100, bfloat16 rounds by half a unit."),
    "distance_ratio": Measure("Distance", "How far a head looks, in units of what uniform weights would.", 0),
    "score_rank": Measure("Rank of the scores", "Effective rank of q (k − mean k)ᵀ, at most the head width.", 0),
    "saturated": Measure("Saturated rows", "Share of rows whose largest weight exceeds 0.95.", 0, 1),
    "distance_ratio_no_sink": Measure("Distance without the sink", "The same over all keys but the first.", 0),
    "query_norm": Measure("Norm of the queries", "Root mean square of |q|.", 0),
    "key_norm": Measure("Norm of the keys", "Root mean square of |k|, of the key head that a head reads.", 0),
    "value_norm": Measure("Norm of the values", "Root mean square of |v|, of the value head that a head reads.", 0),
    "output_norm": Measure("Norm of the output", "What a head fetches, before the output projection.", 0),
    "first_value_ratio": Measure(
        "Value of the first token", "Its norm over the median of the others: small where the sink fetches nothing.", 0
    ),
    "nearest_distance": Measure(
        "Distance to the nearest head", "Divergence from the most similar head of the layer.", 0, 1
    ),
    "nearest_similarity": Measure("Likeness of outputs", "Of the outputs of a head and its nearest one.", 0, 1),
    "non_finite": Measure("Rows that are not finite", "How many see a logit that is NaN or infinite.", 0),
    "token_cosine": Measure(
        "Likeness of the tokens", "Mean cosine between the values of two tokens, by layer.", None, 1
    ),
    "scale_ratio": Measure("Scale", "What multiplies q · k, in units of 1/√H.", 0),
    "function_misfit": Measure("Misfit of the function", "What its output is off from attention as asked for.", 0),
    "visible_keys": Measure("Keys in sight", "How many a query sees, the median, by layer.", 0),
    "past_share": Measure("Past in sight", "Which part of the keys before it a query sees, by layer.", 0, 1),
    "own_share": Measure("Own key in sight", "Share of queries that see their own key, by layer.", 0, 1),
    "future_keys": Measure("Future in sight", "How many keys after itself a query sees, by layer.", 0),
    "key_slots": Measure("Keys", "How many there are, by layer.", 0),
    "head_width": Measure("Width of a head", "Of queries and keys, by layer.", 0),
}
MAIN = 8  # maps; the others are shown on demand
_INDICES = ("nearest_head",)  # numbers of heads: they have no order, and the page names the nearest heads itself


def ordered(found: Mapping[str, np.ndarray]) -> list[tuple[str, Measure, np.ndarray]]:
    """What was measured, in the order of the list; what is not in it comes last, called by its name."""
    names = [name for name in MEASURES if name in found]
    names += [name for name in found if name not in MEASURES and name not in _INDICES]
    words = {name: MEASURES.get(name) or Measure(name.replace("_", " ").capitalize(), "") for name in names}
    return [(name, words[name], np.asarray(found[name], np.float64)) for name in names]

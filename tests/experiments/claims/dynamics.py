"""Known decisions of the rules on depth and training."""

from tests.experiments.claims.cases import WIDE

D4_COLLAPSES = {"gain_causal": 0.2, "gain_sharp": 0.2, "skip": 0.4, "mlp": 0.3}
D5_FORETOLD = {"logit_ahead": 20.0, "entropy_ahead": 15.0, "rescued": 0.8, "normed": 0.05, "normed_top": 0.1}
D2B_TELLS = {"gap_sizes": -0.9, "gap_time": -0.9, "starved_heads": 0.8, "starved_time": 0.8}
D2B_TELLS_NOTHING = {**D2B_TELLS, "gap_time": -0.2, "starved_time": -0.8, "collapsed_entropy": 0.01}

CASES = {
    "D4": [
        ("confirmed", D4_COLLAPSES),
        ("refined", {**D4_COLLAPSES, "gain_causal": -0.1}),
        ("refined", {**D4_COLLAPSES, "gain_sharp": -0.1}),
        ("refined", {**D4_COLLAPSES, "mlp": 1e-200}),
        ("refined", {**D4_COLLAPSES, "mlp": 1e-200, "gain_causal": WIDE}),  # whatever the causal mask does
        ("refuted", {**D4_COLLAPSES, "slope": -0.1}),
        ("refuted", {**D4_COLLAPSES, "gain": -0.1}),
        ("refuted", {**D4_COLLAPSES, "gain_bare": -0.1, "mlp": WIDE}),
        ("refuted", {**D4_COLLAPSES, "mlp": 1e-200, "skip": 1e-3}),
        ("inconclusive", {**D4_COLLAPSES, "gain_causal": (-0.1, 0.1)}),
        ("inconclusive", {**D4_COLLAPSES, "mlp": 1e-200, "skip": (0.05, 0.2)}),
        ("inconclusive", {**D4_COLLAPSES, "slope": float("nan")}),
    ],
    "D5": [
        ("confirmed", D5_FORETOLD),
        ("refined", {**D5_FORETOLD, "entropy_ahead": -3.0}),
        ("refined", {**D5_FORETOLD, "logit_ahead": -3.0}),
        ("refined", {**D5_FORETOLD, "normed": 0.6}),
        ("refined", {**D5_FORETOLD, "normed_top": 0.9}),
        ("refined", {**D5_FORETOLD, "normed_top": 0.9, "entropy_ahead": WIDE}),
        ("refined", {**D5_FORETOLD, "logit_ahead": -3.0, "entropy_ahead": -3.0}),  # the remedy is a half of it
        ("refined", {**D5_FORETOLD, "rescued": -0.1, "normed": 0.9, "normed_top": 1.0}),
        ("refuted", {**D5_FORETOLD, "logit_ahead": -3.0, "entropy_ahead": -3.0, "rescued": -0.1, "normed": 0.9}),
        ("inconclusive", {**D5_FORETOLD, "normed_top": (0.1, 0.4)}),
        ("inconclusive", {**D5_FORETOLD, "logit_ahead": float("nan"), "entropy_ahead": float("nan")}),
    ],
    "D2b": [
        ("confirmed", D2B_TELLS),
        ("refined", {**D2B_TELLS, "starved_heads": -0.4}),
        ("refined", {**D2B_TELLS, "gap_sizes": 0.3, "gap_time": WIDE}),
        ("refined", {**D2B_TELLS_NOTHING, "collapsed_share": 0.01}),
        ("refuted", D2B_TELLS_NOTHING),
        ("refuted", {**D2B_TELLS_NOTHING, "collapsed_entropy": 0.3, "collapsed_share": 0.01}),  # of what did not collapse
        ("inconclusive", {**D2B_TELLS_NOTHING, "collapsed_share": WIDE}),
        ("inconclusive", {**D2B_TELLS, "gap_sizes": (-0.8, -0.2)}),
        ("inconclusive", {**D2B_TELLS, "gap_sizes": 0.3, "starved_heads": WIDE}),
    ],
}  # fmt: skip

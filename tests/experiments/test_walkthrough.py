"""The walkthrough: what it prints is what attention does."""

import numpy as np
import pytest

from experiments import artifacts, progress, walkthrough
from experiments.walkthrough import EXPERIMENT, WalkthroughConfig


@pytest.fixture(scope="module")
def result():
    return walkthrough.run(EXPERIMENT.preset("smoke", scale_rule="none", tie_qk=True, causal=True))


def test_every_link_is_shown(result):
    chain, weights, changes = result.tables
    assert [row[0] for row in chain.rows] == [
        "words", "projections", "heads", "positions", "match", "scale", "mask and softmax", "values",
        "output projection",
    ]  # fmt: skip
    assert [row[2] for row in chain.rows][:4] == ["4 × 64", "4 × 64", "4 × 4 × 16", "4 × 4 × 16"]
    assert weights.columns == ("word", "I", "love", "eating", "apples", "entropy / ln n")
    assert [row[0] for row in changes.rows][:2] == ["the defaults", "scale_rule=none"]
    assert changes.rows[-1][0] == "scale_rule=none\ntie_qk=True\ncausal=True"


def test_rows_of_weights_sum_to_one_and_are_causal(result):
    weights = result.measurements.query("arm == 'asked' and measure == 'weight'")
    square = weights.pivot_table(index=["head", "query"], columns="key", values="value").to_numpy().reshape(4, 4, 4)
    np.testing.assert_allclose(square.sum(-1), 1, rtol=1e-6)
    assert (square[:, ~np.tri(4, dtype=bool)] == 0).all()


def test_the_flags_do_what_they_are_known_for(result):
    def mean(arm, measure):
        return result.measurements.query("arm == @arm and measure == @measure")["value"].mean()

    assert mean("scale_rule", "logit_variance") == pytest.approx(16 * mean("default", "logit_variance"))  # H = 16
    assert mean("scale_rule", "entropy") < mean("default", "entropy")
    assert mean("tie_qk", "self_weight") > mean("default", "self_weight")
    assert mean("causal", "max_weight") > mean("default", "max_weight")


def test_equal_words_have_equal_vectors():
    vectors = walkthrough.embed(WalkthroughConfig(sentence="to be or not to BE"))
    np.testing.assert_array_equal(vectors[0], vectors[4])
    np.testing.assert_array_equal(vectors[1], vectors[5])


def test_no_change_is_said_to_be_none():
    result = walkthrough.run(WalkthroughConfig())
    assert len(result.tables[2].rows) == 1
    assert len(result.figure().axes) == 5  # four heads and their scale


def test_the_figure_shows_what_was_asked_for_above_the_default():
    axes = walkthrough.run(WalkthroughConfig(scale_rule="none", num_heads=2)).figure().axes
    shown = [one for one in axes if one.get_visible()]
    assert len(shown) == 2 + 4 + 1  # two heads, the default's four, and their scale
    assert [one.get_ylabel() for one in shown if "query" in one.get_ylabel()] == [
        "scale_rule=none\nnum_heads=2\n\nquery",
        "default\n\nquery",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"sentence": ""}, "sentence must have 2 to 512 words, got 0 in ''"),
        ({"sentence": "alone"}, "sentence must have 2 to 512 words, got 1"),
        ({"num_heads": 3}, "width must be a multiple of 2 · num_heads = 6, got 64"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"scale_rule": "sqrt"}, "scale_rule must be one of inverse_sqrt"),
        ({"positions": "learned"}, "positions must be one of rotary, sinusoidal, none"),
    ],
)
def test_bad_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        WalkthroughConfig(**flags)


@pytest.mark.parametrize("sentence", ["a\x07 b\x1b[31m", "nul\x00 \x9b", "我 爱 苹果 🍎", "$x_1$ $\\frac$"])
def test_a_word_that_no_font_draws_is_no_warning(sentence, tmp_path, capsys):
    result = walkthrough.run(WalkthroughConfig(sentence=sentence))
    artifacts.Store(tmp_path, "key").write_figure("figure.png", result.figure())
    assert (tmp_path / "figure.png").stat().st_size > 1000
    progress.show(result.tables[1])
    assert not [c for c in capsys.readouterr().out if not c.isprintable() and c != "\n"]

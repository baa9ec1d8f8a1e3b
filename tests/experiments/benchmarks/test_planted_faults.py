"""The benchmark of the audit: what counts as named, and its command on a few."""

import subprocess
import sys

from attn_jax.audit import LINKS
from experiments.benchmarks.planted.functions import FAULTS, HEALTHY, Planted, attention
from experiments.benchmarks.planted.held_out import HELD_OUT
from experiments.benchmarks.planted.models import FAULTS as MODELS
from experiments.benchmarks.planted.models import HEALTHY as HEALTHY_MODELS
from experiments.benchmarks.planted.models import PlantedModel
from experiments.benchmarks.planted_faults import look, measure, measure_models


def test_only_the_first_link_counts():
    wrong = {"no fault": Planted(attention, "scale"), "another": Planted(FAULTS["no scale"].function, "mask")}
    score = measure({**wrong, "right": FAULTS["no scale"]})
    assert score.named == ("right",)
    assert score.told == {"no fault": (), "another": ("scale",)}
    assert str(score) == "1 of 3, 33%"


def test_there_are_enough_of_every_kind():
    assert len(FAULTS) >= 30
    assert len(HELD_OUT) >= (len(FAULTS) + len(HELD_OUT)) / 3
    assert {planted.link for planted in FAULTS.values()} == set(LINKS)
    assert not FAULTS.keys() & HELD_OUT.keys()
    assert len(HEALTHY) >= 8


def test_the_command_tells_of_a_few():
    ran = subprocess.run(
        [sys.executable, "-m", "experiments.benchmarks.planted_faults", "--only=mask transposed"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "Faults named at their link" in ran.stdout
    assert "held out               │ 1 of 1, 100% │ 21 of 30, 70%" in ran.stdout
    assert "faults told of 0 healthy functions: 0" in ran.stdout


def test_models_are_named_at_their_link_or_told_of():
    name = "captured huge queries"
    planted = {name: MODELS[name], "elsewhere": PlantedModel(MODELS[name].build, "mask")}
    score = measure_models(planted)
    assert score.named == (name,)
    assert set(score.told) == {"elsewhere"}
    assert score.told["elsewhere"][0] == "projections"
    assert str(score) == "1 of 2, 50%"


def test_a_healthy_model_has_no_alarm():
    assert look(HEALTHY_MODELS["captured"]).ok


def test_every_link_is_planted_in_models():
    assert {link for one in MODELS.values() for link in one.links} == set(LINKS)
    assert len(MODELS) >= 15
    assert len(HEALTHY_MODELS) >= 12
    assert all(one.links == () for one in HEALTHY_MODELS.values())

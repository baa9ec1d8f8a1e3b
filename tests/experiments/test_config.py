"""Flags to configurations: presets, overrides, and one line for every kind of wrong flag."""

import dataclasses
import shlex

import pytest

from experiments.config import Config, describe, option, parse
from experiments.harness import PRESETS
from tests.experiments.toy import ToyConfig, make

PRESETS_OF_TOY = make().presets


def read(*flags: str) -> ToyConfig:
    return parse(ToyConfig, ["toy", *flags], presets=PRESETS, out="results/toy").configuration(
        ToyConfig, PRESETS_OF_TOY
    )


def test_a_preset_changes_the_defaults_and_a_given_flag_overrides_the_preset():
    assert read() == ToyConfig()
    assert read("--preset=full") == ToyConfig(sizes=(1, 2, 3, 4), factor=2.0)
    assert read("--preset=full", "--factor=1", "--seed=7") == ToyConfig(sizes=(1, 2, 3, 4), factor=1.0, seed=7)
    # the default's own value, given, still overrides the preset
    assert read("--sizes=1,2,3", "--preset=smoke").sizes == (1, 2, 3)


def test_values_are_parsed_by_their_type():
    config = read("--sizes", " 4, 5 ", "--rates=0,1e-3", "--kind=odd", "--loud", "--factor=2")
    assert config == ToyConfig(sizes=(4, 5), rates=(0.0, 1e-3), kind="odd", loud=True, factor=2.0)
    assert isinstance(config.factor, float)
    assert all(isinstance(size, int) for size in config.sizes)
    assert read("--noloud").loud is False


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--sizes=16,x", "sizes.*'x' is not an integer"),
        ("--sizes=16,2.5", "sizes.*'2.5' is not an integer"),
        ("--sizes=1,,2", "sizes.*'' is not an integer"),
        ("--sizes=", "sizes.*'' is not an integer"),
        ("--sizes=0", "sizes must be at least 1, got 0"),
        ("--sizes=1001", "sizes must be at most 1000, got 1001"),
        ("--sizes=2,2", "sizes must not repeat"),
        ("--rates=a", "rates.*'a' is not a number"),
        ("--factor=nan", "factor must be finite"),
        ("--factor=inf", "factor must be finite"),
        ("--factor=one", "factor.*'one' is not a number"),
        ("--factor=11", "factor must be at most 10"),
        ("--seed=-1", "seed must be at least 0"),
        ("--seed=1.5", "seed.*'1.5' is not an integer"),
        ("--kind=even", "kind must be one of plain, odd; got 'even'"),
        ("--loud=perhaps", "^flag --loud must be true or false, got 'perhaps'$"),
        ("--help=perhaps", "^flag --help must be true or false, got 'perhaps'$"),
        ("--undefok=bogus", "^flag --undefok is not known"),
        ("-undefok", "^flag --undefok is not known"),
        ("--flagfile=flags.txt", "^flag --flagfile is not known"),
        ("--flagfile", "^flag --flagfile is not known"),
        ("--kind=caf\udce9", "kind must be Unicode text, got 'caf\\\\udce9'"),
        ("--preset=huge", "preset.*smoke|quick|full"),
        ("--unknown=1", "unknown"),
        ("--out=", "out must name a directory"),
        ("stray", "unexpected argument 'stray'"),
    ],
)
def test_a_wrong_flag_is_named_in_one_line(flag, says):
    with pytest.raises(ValueError, match=says) as caught:
        read(flag)
    assert "\n" not in str(caught.value)


def test_no_flag_lets_an_unknown_one_pass(tmp_path):
    (tmp_path / "flags").write_text("--factor=7")
    for flags in (
        ["--undefok=bogus", "--bogus=7"],
        ["--undefok", "bogus", "--bogus=7"],
        [f"--flagfile={tmp_path}/flags"],
    ):
        with pytest.raises(ValueError, match=r"^flag --(undefok|flagfile) is not known"):
            read(*flags)


def test_switches_are_read_in_every_spelling():
    for text, value in (("true", True), ("1", True), ("T", True), ("false", False), ("0", False), ("F", False)):
        assert read(f"--loud={text}").loud is value


@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": [1]},
        {"sizes": ()},
        {"sizes": (1.5,)},
        {"sizes": (True,)},
        {"loud": 1},
        {"kind": "even"},
        {"kind": "\udce9"},
        {"seed": "0"},
    ],
)
def test_a_configuration_made_in_code_is_checked_like_flags(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        ToyConfig(**fields)


def test_the_command_says_what_was_given_and_not_where_it_goes():
    asked = parse(ToyConfig, ["toy", "--out=/a/b", "--rates=0.5,1", "--loud"], presets=PRESETS, out="results/toy")
    assert asked.command("toy") == "python -m experiments.toy --preset=quick --rates=0.5,1.0 --loud=true"
    assert asked.out == "/a/b"


def test_a_command_with_spaces_can_be_pasted_into_a_shell():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Words(Config):
        sentence: str = option("a", "words")

    asked = parse(Words, ["words", "--sentence=I love $(rm) 'it'"], presets=PRESETS, out="o")
    again = shlex.split(asked.command("words"))
    assert again[-1] == "--sentence=I love $(rm) 'it'"


def test_help_names_every_flag_and_what_the_presets_change():
    text = describe(ToyConfig, PRESETS_OF_TOY, out="results/toy")
    assert all(f"--{name}" in text for name in ("preset", "out", "seed", "sizes", "rates", "factor", "kind", "loud"))
    assert "smoke: 1,2, quick: 1,2,3, full: 1,2,3,4" in text


def test_a_field_of_a_type_that_flags_cannot_spell_is_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wrong(Config):
        table: dict = dataclasses.field(default_factory=dict, metadata={"help": "no flag can say this"})

    with pytest.raises(TypeError, match="field must be int, float, str, bool or a tuple"):
        parse(Wrong, ["wrong"], presets=PRESETS, out="o")

"""Flags to one frozen configuration.

An experiment's configuration is a frozen dataclass that extends `Config`; each field made by `option` is at once a
flag (absl), its help, its limits and its place in config.json. A preset is a mapping of field names to values; a flag
that was given overrides the preset.
"""

import dataclasses
import math
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

C = TypeVar("C", bound="Config")


def option(
    default: Any,
    help_text: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """A field of a configuration: its default, its help and the values it may take (for a list, each of its items)."""
    limits = {"help": help_text, "least": least, "most": most, "choices": None if choices is None else tuple(choices)}
    return dataclasses.field(default=default, metadata=limits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What every experiment has. Fields may be int, float, str, bool or a tuple of int, float or str."""

    seed: int = option(0, "seed of every random number", least=0, most=2**31 - 1)

    def __post_init__(self) -> None:
        types = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            _check(field, types[field.name], getattr(self, field.name))

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON would hold them."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class Choices:
    """What a command line asked for."""

    preset: str
    given: Mapping[str, Any]  # the configuration's flags that were given, parsed
    out: str
    help: bool

    def configuration(self, kind: type[C], presets: Mapping[str, Mapping[str, Any]]) -> C:
        """The preset, overridden by the flags that were given."""
        return kind(**{**presets[self.preset], **self.given})

    def command(self, name: str) -> str:
        """The command that asks for the same, wherever its results are put."""
        flags_given = [shlex.quote(f"--{field}={_spell(value)}") for field, value in self.given.items()]
        return " ".join(["python -m", f"experiments.{name}", f"--preset={self.preset}", *flags_given])


def parse(kind: type[Config], argv: Sequence[str], *, presets: Sequence[str], out: str) -> Choices:
    """Reads `argv` (the program's name first); where there is one preset, there is no flag for it.

    Raises ValueError with one line that names the flag at fault.
    """
    values = flags.FlagValues()  # our own, not the global one: parsing leaves nothing behind
    if len(presets) > 1:
        flags.DEFINE_enum("preset", "quick", presets, "how much to measure", flag_values=values)
    flags.DEFINE_string("out", out, "directory of the results", flag_values=values)
    flags.DEFINE_flag(_switch("help", "show this help"), values)
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if types[field.name] is bool:
            flags.DEFINE_flag(_switch(field.name, field.metadata["help"]), values)
        else:
            flags.DEFINE(_parser(types[field.name]), field.name, None, field.metadata["help"], flag_values=values)
    for argument in argv[1:]:
        if found := re.match(r"--?(undefok|flagfile)(=|$)", argument):  # absl's own, which would hide wrong flags
            raise ValueError(f"flag --{found[1]} is not known; flags are listed by --help")
    try:
        rest = values(list(argv))[1:]
    except flags.Error as error:
        raise ValueError(" ".join(str(error).split())) from error
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; flags look like --name=value")
    if not values["out"].value:
        raise ValueError("flag --out must name a directory, got an empty string")
    given = {field.name: values[field.name].value for field in dataclasses.fields(kind) if values[field.name].present}
    preset = str(values["preset"].value) if len(presets) > 1 else presets[0]
    return Choices(preset, given, str(values["out"].value), bool(values["help"].value))


def describe(kind: type[Config], presets: Mapping[str, Mapping[str, Any]], *, out: str) -> str:
    """The flags, their help and their value in each preset: the text of --help."""
    lines = [f"  --preset={'|'.join(presets)}: how much to measure (quick)"] if len(presets) > 1 else []
    lines.append(f"  --out: directory of the results ({out})")
    for field in dataclasses.fields(kind):
        by_preset = {preset: _spell(getattr(kind(**chosen), field.name)) for preset, chosen in presets.items()}
        same = len(set(by_preset.values())) == 1
        shown = next(iter(by_preset.values())) if same else ", ".join(f"{p}: {v}" for p, v in by_preset.items())
        lines.append(f"  --{field.name}: {field.metadata['help']} ({shown})")
    return "\n".join(lines)


class _Items(flags.ArgumentParser):
    """A list flag: `16,64,256`, each item read by the parser of its kind."""

    def __init__(self, item: flags.ArgumentParser, noun: str):
        self.item, self.noun = item, noun

    def parse(self, argument: str) -> tuple[Any, ...]:
        return tuple(self._one(part.strip()) for part in argument.split(","))

    def _one(self, part: str) -> Any:
        try:
            return self.item.parse(part)
        except (TypeError, ValueError):
            raise ValueError(f"{part!r} is not {self.noun}") from None


class _Switch(flags.ArgumentParser):
    """true or false, in the spellings that absl knows."""

    def __init__(self, name: str):
        self.name = name

    def parse(self, argument: str) -> bool:
        try:
            return flags.BooleanParser().parse(argument)
        except ValueError:
            message = f"flag --{self.name} must be true or false, got {argument!r}"
            raise flags.IllegalFlagValueError(message) from None


def _switch(name: str, help_text: str) -> flags.Flag:
    return flags.Flag(_Switch(name), None, name, None, help_text, boolean=True)


class _Number(flags.ArgumentParser):
    def __init__(self, kind: type[int] | type[float], noun: str):
        self.kind, self.noun = kind, noun

    def parse(self, argument: str) -> float:
        try:
            return self.kind(argument)
        except ValueError:
            raise ValueError(f"{argument!r} is not {self.noun}") from None


def _parser(kind: Any) -> flags.ArgumentParser:
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return _Items(_parser(item), {int: "an integer", float: "a number", str: "a word"}[item])
    if kind is int:
        return _Number(int, "an integer")
    if kind is float:
        return _Number(float, "a number")
    if kind is str:
        return flags.ArgumentParser()
    raise TypeError(f"a configuration's field must be int, float, str, bool or a tuple of them, got {kind}")


def _check(field: dataclasses.Field, kind: Any, value: Any) -> None:
    """Raises ValueError, naming the field, unless `value` has its type and lies in its limits."""
    name = field.name
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, tuple) or not value:
            raise ValueError(f"{name} must be a non-empty tuple, got {value!r}")
        if len(set(value)) != len(value):
            raise ValueError(f"{name} must not repeat an item, got {_spell(value)}")
        items, kind = value, typing.get_args(kind)[0]
    else:
        items = (value,)
    for item in items:
        right = isinstance(item, kind) or (kind is float and isinstance(item, int))
        if not right or (isinstance(item, bool) and kind is not bool):
            raise ValueError(f"{name} must hold {kind.__name__}, got {item!r}")
        if isinstance(item, str) and any("\ud800" <= letter <= "\udfff" for letter in item):  # bytes that are not UTF-8
            raise ValueError(f"{name} must be Unicode text, got {item!r}")
        limits = field.metadata
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{name} must be finite, got {item}")
        if limits["least"] is not None and item < limits["least"]:
            raise ValueError(f"{name} must be at least {limits['least']}, got {item}")
        if limits["most"] is not None and item > limits["most"]:
            raise ValueError(f"{name} must be at most {limits['most']}, got {item}")
        if limits["choices"] is not None and item not in limits["choices"]:
            raise ValueError(f"{name} must be one of {', '.join(limits['choices'])}; got {item!r}")


def _spell(value: Any) -> str:
    """A value as a flag spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_spell, value)) if isinstance(value, tuple) else str(value)

"""The lines between what is ordinary and what is told, and how they are kept in a file."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from attn_jax import checks
from attn_jax.files import RunError, refusal, write_atomic

FORMAT, VERSION = "attn_jax attention limits", 1


class LimitsError(RunError):
    """A file of limits cannot be read; the message says why in one line.

    >>> from attn_jax.diagnostics import Limits, LimitsError
    >>> try:
    ...     Limits.load("nowhere.json")
    ... except LimitsError as error:
    ...     print(error)
    no limits in nowhere.json: No such file or directory
    """


def _limit(default: float, *, above: bool, share: bool = False) -> Any:
    """A number that is passed upwards, or downwards; a share lies in [0, 1]."""
    return dataclasses.field(default=default, metadata={"above": above, "share": share})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a monitor and a diagnosis tell of. The starting values are to be calibrated (`calibrate`); None: not told.

    Attributes:
        max_logit, serious_max_logit: a head's largest logit above it.
        sharp_entropy: a head's normalized entropy without the first key below it.
        share_of_heads: so many sharp heads of a layer are a notice, and serious beside a logit above `max_logit`; so
            many dead ones are serious.
        entropy_ratio: the mean entropy of a layer below this part of its running mean.
        logit_growth: that is serious if its largest logit is above `max_logit`, and above so many times its running
            mean.
        saturated: more of a layer's rows with nearly all weight on one key.
        logit_sd: the median head's standard deviation of the logits above it.
        sink_mass: a head's mean weight on the first key above it.
        clone_distance, clone_similarity: two heads nearer than the one and with outputs more alike than the other.
        dead_output: what a head fetches below this part of what the median head of all layers does.
        gradient_ratio: the gradients of W_Q and W_K below this part of that of W_V.

    and what `attn_jax.diagnostics.diagnose` tells of besides:

        uniform_entropy: the normalized entropy of every head of a layer above it: information.
        small_logit_sd: a notice if the logits' standard deviation is also below this in all heads.
        score_rank: the effective rank of the centred scores of half of a layer's heads below this part of their width.
        token_cosine: the mean cosine between values of two tokens above it.
        distance_change: the distance ratio of every head this near to 1, in layers that choose: positions may not act.
        symmetry: tr(W²)/|W|² of half of a layer's heads above it.
        update_ratio: what attention adds to the stream below this part of it.
        loss_cliff: the loss of later positions is more nats above that of earlier ones.

    Raises:
        ValueError, TypeError: on a limit that is negative or no number, a share above 1, or logits that are serious
            before they are a notice.

    >>> import pathlib, tempfile
    >>> from attn_jax.diagnostics import Limits
    >>> limits = Limits(max_logit=50.0, sink_mass=None)  # logits are told of earlier, sinks not at all
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     limits.save(pathlib.Path(folder, "limits.json"))
    ...     Limits.load(pathlib.Path(folder, "limits.json")) == limits
    True
    >>> limits.relaxed(0.8).max_logit  # below which they have come back
    40.0
    """

    max_logit: float | None = _limit(100.0, above=True)
    serious_max_logit: float | None = _limit(1000.0, above=True)
    sharp_entropy: float | None = _limit(0.05, above=False, share=True)
    share_of_heads: float | None = _limit(0.5, above=True, share=True)
    entropy_ratio: float | None = _limit(0.5, above=False, share=True)
    logit_growth: float | None = _limit(1.5, above=True)
    saturated: float | None = _limit(0.3, above=True, share=True)
    logit_sd: float | None = _limit(10.0, above=True)
    sink_mass: float | None = _limit(0.3, above=True, share=True)
    clone_distance: float | None = _limit(0.05, above=False, share=True)
    clone_similarity: float = _limit(0.95, above=True, share=True)
    dead_output: float | None = _limit(0.01, above=False, share=True)
    gradient_ratio: float | None = _limit(1e-3, above=False)
    uniform_entropy: float | None = _limit(0.99, above=True, share=True)
    small_logit_sd: float | None = _limit(0.01, above=False)
    score_rank: float | None = _limit(0.05, above=False, share=True)
    token_cosine: float | None = _limit(0.9, above=True, share=True)
    distance_change: float | None = _limit(0.02, above=False)
    symmetry: float | None = _limit(0.9, above=True, share=True)
    update_ratio: float | None = _limit(1e-3, above=False)
    loss_cliff: float | None = _limit(1.0, above=True)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name == "clone_similarity":
                value = checks.finite_number(field.name, value, least=0.0)
                if field.metadata["share"] and value > 1:
                    raise ValueError(f"{field.name} must be at most 1, got {value:g}")
                object.__setattr__(self, field.name, value)
        first, second = self.max_logit, self.serious_max_logit
        if first is not None and second is not None and second < first:
            raise ValueError(f"serious_max_logit must be at least max_logit = {first:g}, got {second:g}")

    def relaxed(self, factor: float) -> "Limits":
        """The limits that one must be within to have come back: 0.8 of those above, 1 / 0.8 of those below."""
        changed = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                value = value * factor if field.metadata["above"] else value / factor
                changed[field.name] = min(value, 1.0) if field.metadata["share"] else value
        return dataclasses.replace(self, **changed)

    def widened(self, name: str, worst: float, margin: float) -> "Limits":
        """With the limit `name` so far beyond `worst` that `margin` (2: twice, half, half of the way to 1) is left."""
        (field,) = (field for field in dataclasses.fields(self) if field.name == name)
        if not field.metadata["above"]:
            moved = worst / margin
        elif field.metadata["share"]:
            moved = 1 - (1 - worst) / margin
        else:
            moved = worst * margin
        changes = {name: min(moved, 1.0) if field.metadata["share"] else moved}
        if name == "max_logit" and self.max_logit and self.serious_max_logit is not None:
            changes["serious_max_logit"] = self.serious_max_logit * moved / self.max_logit
        return dataclasses.replace(self, **changes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes them as JSON. Raises a `RunError` where that cannot be."""
        path = pathlib.Path(path)
        record = {"format": FORMAT, "version": VERSION, "limits": dataclasses.asdict(self)}
        try:
            write_atomic(path, json.dumps(record, indent=2).encode() + b"\n")
        except OSError as error:
            raise refusal("the limits cannot be written to", path, error) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Limits":
        """Reads what `save` wrote; a limit that is not there has its starting value.

        Raises:
            LimitsError: in one line, if the file is not there, or is another, a newer or a broken one.
        """
        path = pathlib.Path(path)
        try:
            record = json.loads(path.read_bytes())
            if not isinstance(record, dict) or record.get("format") != FORMAT:
                raise ValueError("it is no file of limits")
            if record.get("version") != VERSION:
                raise ValueError(f"it has version {record.get('version')!r}, and this is version {VERSION}")
            limits, known = record.get("limits"), {field.name for field in dataclasses.fields(cls)}
            if not isinstance(limits, dict):
                raise ValueError("it holds no limits")
            if unknown := sorted(limits.keys() - known):
                raise ValueError(f"unknown limit {unknown[0]}; the limits are {', '.join(sorted(known))}")
            return cls(**limits)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            broken = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, RecursionError))
            raise LimitsError(str(refusal("no limits in", path, "it is no JSON" if broken else error))) from error

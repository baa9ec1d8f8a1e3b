"""Text from outside (tokens, names of files and models) and data on their way into a page: they stay text and data."""

import base64
import hashlib
import json
import unicodedata
from typing import Any

import numpy as np

from attn_jax.typing import ArrayLike, Float

_SPACES = {" ": "␣", "\n": "⏎", "\t": "⇥"}
_UNKNOWN = {"uint8": 2**8 - 1, "uint16": 2**16 - 1}


def visible(text: str) -> str:
    """A text whose letters are all to be seen: controls, bidi marks, separators and surrogates by their number."""
    return "".join(c if c == " " or unicodedata.category(c)[0] not in "CZ" else f"⟨U+{ord(c):04X}⟩" for c in text)


def visible_token(text: str) -> str:
    """The same of a token, where every space counts."""
    return visible("".join(_SPACES.get(c, c) for c in text)) or "∅"


def to_script(value: Any) -> str:
    """JSON that stands in a `<script>` and cannot end it: ASCII, without `<`, `>` and `&`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def rounded(values: Float[np.ndarray, "..."]) -> Any:
    """Nested lists of numbers to six digits; what is not finite is None."""
    if values.ndim:
        return [rounded(x) for x in values]
    return float(f"{values:.6g}") if np.isfinite(values) else None


def packed(values: Float[ArrayLike, "..."], kind: str) -> dict[str, Any]:
    """An array as base64: "float32" as it is; "uint8" and "uint16" hold the share of 0..1, the last code is unknown."""
    values = np.asarray(values)
    if kind == "float32":
        coded = values.astype("<f4")
    else:
        unknown = _UNKNOWN[kind]
        shares = np.where(np.isfinite(values), np.clip(values, 0, 1) * (unknown - 1), unknown)
        coded = np.rint(shares).astype(np.dtype(kind).newbyteorder("<"))
    return {"kind": kind, "shape": list(values.shape), "data": base64.b64encode(coded.tobytes()).decode()}


def digest(script: str) -> str:
    """What a content security policy calls a script, so that no other runs."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"

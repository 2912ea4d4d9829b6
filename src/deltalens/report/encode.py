"""Numbers and text packed for a page: two printable characters a number, JSON that can't leave its script element."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltalens.report.measures import Measure

# Printable ASCII without what HTML or JSON would have to escape: two of them hold 7,744 levels.
ALPHABET = "".join(chr(c) for c in range(33, 127) if chr(c) not in "\"'&<>\\")
BASE = len(ALPHABET)
LEVELS = BASE * BASE
NAN_LEVEL, ZERO_LEVEL, FIRST_LEVEL = 0, 1, 2
_DIGITS = np.frombuffer(ALPHABET.encode("ascii"), dtype=np.uint8)


@dataclass(frozen=True)
class Quantizer:
    """A scale from numbers to levels; level 0 is NaN and level 1 is a value at or under zero on a log scale."""

    log: bool
    low: float
    high: float

    def levels(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """The nearest level of each value."""
        finite = np.isfinite(values)
        usable = finite & (values > 0) if self.log else finite
        safe = np.where(usable, values, 1.0 if self.log else 0.0)
        scaled = np.log(safe) if self.log else safe
        span = self.high - self.low
        unit = np.clip((scaled - self.low) / span, 0, 1) if span > 0 else np.zeros_like(scaled)
        out = FIRST_LEVEL + np.rint(unit * (LEVELS - 1 - FIRST_LEVEL)).astype(np.int64)
        out[~usable] = NAN_LEVEL
        if self.log:
            out[finite & (values <= 0)] = ZERO_LEVEL
        levels: NDArray[np.int64] = out
        return levels

    def values(self, levels: NDArray[np.int64]) -> NDArray[np.float64]:
        """The value that each level stands for; what the page's own decoder computes."""
        unit = (levels - FIRST_LEVEL) / (LEVELS - 1 - FIRST_LEVEL)
        plain = self.low + unit * (self.high - self.low)
        out = np.exp(plain) if self.log else plain
        out = np.where(levels == NAN_LEVEL, np.nan, out)
        return np.where(levels == ZERO_LEVEL, 0.0, out)


def quantizer_for(measure: Measure, values: NDArray[np.float64]) -> Quantizer:
    """The scale that spans a measure's finite values."""
    log = measure.scale == "log"
    kept = values[np.isfinite(values)]
    if log:
        kept = np.log(kept[kept > 0])
    if not len(kept):
        return Quantizer(log, 0.0, 0.0)
    return Quantizer(log, float(kept.min()), float(kept.max()))


def pack(numbers: NDArray[np.int64], digits: int = 2) -> str:
    """Non-negative integers as fixed-width text of `digits` characters each, most significant first."""
    flat = np.asarray(numbers, dtype=np.int64).ravel()
    if len(flat) and (flat.min() < 0 or flat.max() >= BASE**digits):
        raise ValueError(f"{digits} characters hold 0 to {BASE**digits - 1}; got {flat.min()} to {flat.max()}")
    places = [flat // BASE**p % BASE for p in reversed(range(digits))]
    return bytes(_DIGITS[np.stack(places, axis=1)].ravel()).decode("ascii") if len(flat) else ""


def rounded(value: Any, digits: int = 5) -> Any:
    """A number with `digits` significant digits, None for what is not finite; other values as they are."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        number = float(value)
        return float(f"{number:.{digits}g}") if math.isfinite(number) else None
    return value


def plain(value: Any) -> Any:
    """A value that JSON can hold: containers walked, numpy unwrapped, the rest as text."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, str | bool | int | float | np.generic):
        return rounded(value, 9)
    return str(value)


def script_json(value: Any) -> str:
    """JSON for a script element: nothing in it can close the element, open a comment or break a line in JavaScript."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A lone surrogate can't be written as UTF-8, and a NUL would be replaced by the HTML parser.
    return (
        "".join(f"\\u{ord(c):04x}" if 0xD800 <= ord(c) < 0xE000 else c for c in text) if _has_surrogate(text) else text
    )


def _has_surrogate(text: str) -> bool:
    return any(0xD800 <= ord(c) < 0xE000 for c in text)

"""Three-valued logic over layers: a condition holds, fails, or can't be known because a figure is missing."""

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from deltalens.core.holm import holm as adjusted_p_values

Values = NDArray[np.float64]
"""One number per layer; as a truth value 1 holds, 0 fails, NaN is unknown."""

Z_95 = 1.959963984540054
ONE_SIDED = 0.025


def values_of(rows: pd.DataFrame | None, column: str, length: int) -> Values:
    """A column by layer, NaN throughout if the table or the column is missing."""
    if rows is None or column not in rows:
        return np.full(length, np.nan)
    return rows[column].to_numpy(dtype=float)


def truth(holds: NDArray[np.bool_], *inputs: Values) -> Values:
    """Truth values of a comparison, unknown wherever one of its inputs is NaN."""
    known = np.all([np.isfinite(v) for v in inputs], axis=0)
    return np.where(known, holds.astype(float), np.nan)


def above(values: Values, threshold: Values | float) -> Values:
    """Where ``values > threshold``."""
    limit = np.broadcast_to(np.asarray(threshold, dtype=float), values.shape)
    return truth(values > limit, values, limit)


def at_least(values: Values, threshold: Values | float) -> Values:
    """Where ``values >= threshold``."""
    limit = np.broadcast_to(np.asarray(threshold, dtype=float), values.shape)
    return truth(values >= limit, values, limit)


def both(a: Values, b: Values) -> Values:
    """Holds where both hold, fails where one fails, else unknown."""
    return np.where((a == 0) | (b == 0), 0.0, np.where(np.isnan(a) | np.isnan(b), np.nan, 1.0))


def either(a: Values, b: Values) -> Values:
    """Holds where one holds, fails where both fail, else unknown."""
    return np.where((a == 1) | (b == 1), 1.0, np.where(np.isnan(a) | np.isnan(b), np.nan, 0.0))


def in_share(flags: Values, share: float) -> bool | None:
    """Whether a condition holds in at least this share of the layers; None if the unknown layers would decide."""
    needed = math.ceil(share * len(flags) - 1e-9)
    holds = int((flags == 1).sum())
    if holds >= needed and len(flags):
        return True
    return False if holds + int(np.isnan(flags).sum()) < needed else None


def counted(flags: Values) -> str:
    """`12 of 30`, with the unknown layers named if there are any."""
    unknown = int(np.isnan(flags).sum())
    text = f"{int((flags == 1).sum())} of {len(flags)} layers"
    return text + (f" ({unknown} not measured)" if unknown else "")


def holm(values: Values, low: Values, threshold: float) -> Values:
    """`low >= threshold` after Holm's correction over the layers, from the interval's own width taken as normal."""
    error = (values - low) / Z_95
    known = np.isfinite(values) & np.isfinite(low)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(error > 0, (values - threshold) / error, np.where(values > threshold, np.inf, -np.inf))
    p = np.array([0.5 * math.erfc(v / math.sqrt(2)) for v in z])
    adjusted = adjusted_p_values(np.where(known, p, np.nan))
    return truth(adjusted <= ONE_SIDED, adjusted)


def middle(values: Values) -> float:
    """The median of the defined values, NaN if there are none."""
    kept = values[np.isfinite(values)]
    return float(np.median(kept)) if len(kept) else math.nan


def number(value: float) -> str:
    """A figure with the digits a reader needs."""
    if not math.isfinite(value):
        return "–"
    if value < 0:
        return "−" + number(-value)
    size = value
    if size >= 100:
        return f"{value:.0f}"
    if size >= 1:
        return f"{value:.2f}"
    if size >= 0.01 or size == 0:
        return f"{value:.3f}"
    if size >= 0.001:
        return f"{value:.4f}"
    return f"{value:.1e}"


def typical(rows: pd.DataFrame | None, column: str, length: int) -> str:
    """The value at the layer that is the median one, with that layer's interval."""
    values = values_of(rows, column, length)
    if not np.isfinite(values).any():
        return "–"
    at = int(np.nanargmin(np.abs(values - middle(values))))
    low, high = (values_of(rows, column + suffix, length)[at] for suffix in ("_lo", "_hi"))
    interval = f" [{number(low)}, {number(high)}]" if math.isfinite(low) and math.isfinite(high) else ""
    return number(float(values[at])) + interval


def middle_of(rows: pd.DataFrame | None, column: str, length: int) -> str:
    """The median over layers of a figure without interval."""
    value = middle(values_of(rows, column, length))
    return number(value) if math.isfinite(value) else "not measured"

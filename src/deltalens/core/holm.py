"""Holm's correction for several tests at once."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def holm(p_values: ArrayLike) -> Floats:
    """Holm's adjusted p-values, ``max_{i≤j} (m - i + 1) p_(i)``, NaN ones left out of m.

    Args:
        p_values: p-values (m,).

    Returns:
        Adjusted p-values, at most 1, in the given order.

    Source:
        Holm (1979).

    Example:
        >>> holm([0.01, 0.04]).tolist()
        [0.02, 0.04]
    """
    given = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full(given.shape, np.nan)
    known = np.flatnonzero(~np.isnan(given))
    order = known[np.argsort(given[known], kind="stable")]
    factors = np.arange(known.size, 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(given[order] * factors))
    return adjusted


def holm_levels(p_values: ArrayLike, level: float = 0.95) -> Floats:
    """The coverage each interval needs so that all hold together at ``level`` in Holm's order.

    Args:
        p_values: p-values (m,), which set the order; NaN ones get NaN.
        level: The joint coverage.

    Returns:
        ``1 - (1 - level) / (m - i + 1)`` for the i-th smallest p-value.

    Source:
        Holm (1979).

    Example:
        >>> holm_levels([0.5, 0.01], level=0.9).round(3).tolist()
        [0.9, 0.95]
    """
    given = np.asarray(p_values, dtype=np.float64)
    levels = np.full(given.shape, np.nan)
    known = np.flatnonzero(~np.isnan(given))
    order = known[np.argsort(given[known], kind="stable")]
    levels[order] = 1 - (1 - level) / np.arange(known.size, 0, -1)
    return levels

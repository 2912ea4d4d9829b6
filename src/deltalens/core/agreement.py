"""How far two ways to order layers agree: Kendall's and Spearman's rank correlations with bootstrap intervals."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltalens.core.association import spearman
from deltalens.errors import InputError

Floats = NDArray[np.float64]
Interval = tuple[float, float]

FEWEST_ITEMS = 3
"""Under this many items two orders agree or disagree by chance alone, and no correlation is given."""


@dataclass(frozen=True)
class Agreement:
    """Rank correlations of two scores over the same items, NaN where undefined.

    Attributes:
        kendall: Kendall's τ-b, from -1 to 1.
        kendall_interval: 95% of its resamples.
        spearman: Spearman's ρ, from -1 to 1.
        spearman_interval: 95% of its resamples.
        items: how many items have both scores.
    """

    kendall: float
    kendall_interval: Interval
    spearman: float
    spearman_interval: Interval
    items: int


def kendall(a: ArrayLike, b: ArrayLike) -> float:
    """Kendall's τ-b, ``Σ sign(a_i - a_j) sign(b_i - b_j) / √(n_a n_b)`` over pairs, n counting untied pairs.

    Args:
        a: Values (n,).
        b: Values (n,).

    Returns:
        The correlation, NaN rows left out; NaN with fewer than two rows, or a constant side.

    Raises:
        InputError: Lengths differ.

    Source:
        Kendall (1945).

    Example:
        >>> kendall([1, 2, 3, 4], [1, 2, 4, 3])
        0.6666666666666666
    """
    columns = [np.asarray(column, dtype=np.float64) for column in (a, b)]
    if columns[0].ndim != 1 or columns[0].shape != columns[1].shape:
        raise InputError(f"values must be vectors of one length, but their shapes are {[c.shape for c in columns]}")
    return float(_kendall(columns[0][None], columns[1][None])[0])


def rank_agreement(
    a: ArrayLike, b: ArrayLike, resampled_a: Floats | None = None, resampled_b: Floats | None = None
) -> Agreement:
    """Rank correlations of two scores over the same items, with intervals from the items' resampled scores.

    Args:
        a: A score of each item (n,).
        b: Another one (n,).
        resampled_a: The first score in each resample (resamples, n); itself, where it isn't resampled.
        resampled_b: The second one, from the same resamples.

    Returns:
        The agreement; NaN with fewer than three items that have both scores, and no interval without resamples.

    Raises:
        InputError: Lengths differ.

    Source:
        Kendall (1945), Spearman (1904); percentile intervals after Efron (1979).

    Example:
        >>> rank_agreement([1, 2, 3], [2, 4, 6]).kendall
        1.0
    """
    one, other = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    items = int((~np.isnan(one) & ~np.isnan(other)).sum())
    if items < FEWEST_ITEMS:
        return Agreement(np.nan, (np.nan, np.nan), np.nan, (np.nan, np.nan), items)
    ones, others = _resamples(one, resampled_a), _resamples(other, resampled_b)
    drawn = max(len(ones), len(others))
    if resampled_a is None and resampled_b is None:
        kendalls = spearmans = np.zeros(0)
    else:
        ones, others = (np.broadcast_to(sample, (drawn, len(one))) for sample in (ones, others))
        kendalls = _kendall(ones, others)
        spearmans = np.array([spearman(p, q) for p, q in zip(ones, others, strict=True)])
    return Agreement(kendall(one, other), _middle(kendalls), spearman(one, other), _middle(spearmans), items)


def _resamples(score: Floats, resampled: Floats | None) -> Floats:
    return score[None] if resampled is None else resampled


def _middle(sample: Floats) -> Interval:
    known = sample[~np.isnan(sample)]
    if known.size == 0:
        return np.nan, np.nan
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)


def _kendall(a: Floats, b: Floats) -> Floats:
    """τ-b of each row (w,) of two samples (w, n); pairs with a NaN count as tied on both sides."""
    first, second = np.triu_indices(a.shape[1], k=1)
    signs = [np.sign(side[:, first] - side[:, second]) for side in (a, b)]
    known = ~np.isnan(signs[0]) & ~np.isnan(signs[1])
    one, other = (np.where(known, sign, 0.0) for sign in signs)
    size = np.sqrt((one != 0).sum(1) * (other != 0).sum(1))
    tau: Floats = np.divide((one * other).sum(1), size, out=np.full(len(a), np.nan), where=size > 0)
    return tau

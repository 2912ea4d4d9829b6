"""Rank correlations, and bootstrap intervals over documents or windows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltalens.errors import InputError

Floats = NDArray[np.float64]
Interval = tuple[float, float]

_NONE = (float("nan"), float("nan"))

LEAST_CLUSTERS = 8
"""Under this many clusters an interval says too little (its coverage was 0.61 with two) and is NaN."""

BLOCK_ENTRIES = 2**21
"""Entries of one block of the resample-by-token weight matrix."""


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation, Pearson's of average ranks; rows with a NaN are left out.

    Args:
        a: Values (n,).
        b: Values (n,).

    Returns:
        The correlation; NaN with fewer than two rows, or a constant side.

    Raises:
        InputError: Lengths differ.

    Source:
        Spearman (1904).

    Example:
        >>> spearman([1, 2, 3, 4], [1, 4, 9, 16])
        1.0
    """
    return partial_spearman(a, b, [])


def partial_spearman(a: ArrayLike, b: ArrayLike, given: Sequence[ArrayLike]) -> float:
    """Spearman's correlation of a and b given others: the partial Pearson correlation of average ranks.

    Args:
        a: Values (n,).
        b: Values (n,).
        given: Values (n,) each, whose ranks' linear influence is removed from both sides.

    Returns:
        The correlation; NaN where nothing varies any more.

    Raises:
        InputError: Lengths differ.

    Source:
        Kendall (1942), with ranks in place of values.

    Example:
        >>> round(partial_spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], [[1, 3, 2, 5, 4]]), 3)
        0.978
    """
    columns = _finite_columns([a, b, *given])
    return float(_weighted_partial(columns, np.ones((1, columns.shape[1])))[0])


class ClusterBootstrap:
    """Percentile intervals from resampling whole clusters (documents or windows) with replacement.

    Every method gives exactly what writing out each resample and computing on it would, by weighting tokens with how
    often their cluster was drawn. Resamples are drawn once, so differences are taken on the same ones.
    """

    def __init__(self, clusters: ArrayLike, *, resamples: int = 1000, seed: int = 0) -> None:
        """Draw the resamples.

        Args:
            clusters: Each token's cluster (n,), any labels.
            resamples: How many resamples.
            seed: Seeds them.
        """
        labels = np.asarray(clusters)
        if labels.ndim != 1:
            raise InputError(f"clusters must be one label per token, but its shape is {labels.shape}")
        if resamples < 1:
            raise InputError(f"resamples must be at least 1, but {resamples} was given")
        names, self._of_token = np.unique(labels, return_inverse=True)
        self.clusters = int(names.size)
        draws = np.random.default_rng(seed).integers(max(1, self.clusters), size=(resamples, self.clusters))
        self._counts = np.stack([np.bincount(row, minlength=self.clusters) for row in draws]).astype(np.float64)

    def median(self, values: ArrayLike, *, level: float = 0.95) -> Interval:
        """The interval of the median of values (n,), NaN values left out."""
        return self.quantile(values, 0.5, level=level)

    def quantile(self, values: ArrayLike, q: float, *, level: float = 0.95) -> Interval:
        """The interval of the q-quantile (linear interpolation) of values (n,)."""
        columns, present = self._rows([values])
        return _percentiles(_quantiles(columns[0], present, self._counts, q), level) if present is not None else _NONE

    def mean(self, values: ArrayLike, *, level: float = 0.95) -> Interval:
        """The interval of the mean of values (n,), NaN values left out."""
        return self._interval([values], lambda columns, weights: _weighted_mean(columns[0], weights), level)

    def resampled_means(self, values: ArrayLike) -> Floats:
        """The mean of values (n,) in every resample (resamples,), NaN values left out; all NaN under 8 clusters."""
        columns, present = self._rows([values])
        if present is None:
            return np.full(self._counts.shape[0], np.nan)
        return self._over_resamples(columns, present, lambda c, w: _weighted_mean(c[0], w))

    def share_over(self, values: ArrayLike, threshold: float, *, level: float = 0.95) -> Interval:
        """The interval of the share of values (n,) above a threshold."""
        return self._interval([values], lambda columns, weights: _weighted_mean(columns[0] > threshold, weights), level)

    def ratio(self, a: ArrayLike, b: ArrayLike, *, level: float = 0.95) -> Interval:
        """The interval of ``Σ a / Σ b`` (n,); of a mean where b is 1."""
        return self._interval(
            [a, b], lambda columns, weights: _quotient(weights @ columns[0], weights @ columns[1]), level
        )

    def spearman(self, a: ArrayLike, b: ArrayLike, *, level: float = 0.95) -> Interval:
        """The interval of Spearman's correlation of a and b (n,)."""
        return self._interval([a, b], _weighted_partial, level)

    def partial_spearman(
        self, a: ArrayLike, b: ArrayLike, given: Sequence[ArrayLike], *, level: float = 0.95
    ) -> Interval:
        """The interval of the partial correlation of a and b given others (n,)."""
        return self._interval([a, b, *given], _weighted_partial, level)

    def spearman_difference(self, a: ArrayLike, b: ArrayLike, c: ArrayLike, *, level: float = 0.95) -> Interval:
        """The interval of ``spearman(a, b) - spearman(a, c)`` on the same resamples and rows."""
        return self._interval([a, b, c], _spearman_difference, level)

    def p_value(self, values: ArrayLike, threshold: float) -> float:
        """Two-sided bootstrap p-value of the median of values (n,) against a threshold, NaN under 8 clusters."""
        columns, present = self._rows([values])
        if present is None:
            return float("nan")
        medians = _quantiles(columns[0], present, self._counts, 0.5)
        known = medians[~np.isnan(medians)]
        below, above = np.sum(known <= threshold), np.sum(known >= threshold)
        return float(min(1.0, 2 * (min(below, above) + 1) / (known.size + 1)))

    def _rows(self, values: Sequence[ArrayLike]) -> tuple[Floats, NDArray[Any] | None]:
        """Columns without NaN rows and their tokens' clusters; no clusters where there are too few."""
        columns = _stacked(values)
        if columns.shape[1] != self._of_token.size:
            raise InputError(f"values have {columns.shape[1]} rows, but the clusters have {self._of_token.size}")
        finite = ~np.isnan(columns).any(axis=0)
        present = self._of_token[finite]
        if np.unique(present).size < LEAST_CLUSTERS:
            return columns[:, finite], None
        return columns[:, finite], present

    def _over_resamples(
        self, columns: Floats, present: NDArray[Any], statistic: Callable[[Floats, Floats], Floats]
    ) -> Floats:
        step = max(1, BLOCK_ENTRIES // max(1, columns.shape[1]))
        blocks = [self._counts[start : start + step] for start in range(0, self._counts.shape[0], step)]
        return np.concatenate([statistic(columns, block[:, present]) for block in blocks])

    def _interval(
        self, values: Sequence[ArrayLike], statistic: Callable[[Floats, Floats], Floats], level: float
    ) -> Interval:
        columns, present = self._rows(values)
        return _percentiles(self._over_resamples(columns, present, statistic), level) if present is not None else _NONE


def _percentiles(samples: Floats, level: float) -> Interval:
    known = samples[~np.isnan(samples)]
    if known.size == 0:
        return _NONE
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _stacked(values: Sequence[ArrayLike]) -> Floats:
    arrays = [np.asarray(column, dtype=np.float64) for column in values]
    if any(array.ndim != 1 or array.shape != arrays[0].shape for array in arrays):
        raise InputError(f"values must be vectors of one length, but their shapes are {[a.shape for a in arrays]}")
    return np.stack(arrays)


def _finite_columns(values: Sequence[ArrayLike]) -> Floats:
    columns = _stacked(values)
    return columns[:, ~np.isnan(columns).any(axis=0)]


def _weighted_ranks(values: Floats, weights: Floats) -> Floats:
    """Average ranks (w, n) in the sample where each value counts as often as its weight says."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    tied = np.add.reduceat(weights[:, order], starts, axis=1)
    ranks = np.cumsum(tied, axis=1) - (tied - 1) / 2
    out = np.empty_like(weights)
    out[:, order] = np.repeat(ranks, np.diff(np.r_[starts, values.size]), axis=1)
    return out


def _weighted_partial(columns: Floats, weights: Floats) -> Floats:
    """Partial rank correlations (w,) of the first two columns given the others."""
    if columns.shape[1] < 2:
        return np.full(weights.shape[0], np.nan)
    covariance = _rank_covariance(columns, weights)
    return _correlation(_given_the_rest(covariance))


def _rank_covariance(columns: Floats, weights: Floats) -> Floats:
    ranks = np.stack([_weighted_ranks(column, weights) for column in columns])
    total = weights.sum(axis=1)
    ranks -= ((ranks * weights).sum(axis=2) / total)[:, :, None]
    covariance: Floats = np.einsum("awn,bwn->wab", ranks * weights, ranks) / total[:, None, None]
    return covariance


def _given_the_rest(covariance: Floats) -> Floats:
    """The 2 × 2 covariance left of the first two variables (the Schur complement of the others)."""
    first, cross, rest = covariance[:, :2, :2], covariance[:, :2, 2:], covariance[:, 2:, 2:]
    if rest.shape[1] == 0:
        return first
    left = first - cross @ np.linalg.pinv(rest, hermitian=True) @ cross.swapaxes(1, 2)
    # What rounding leaves of a variable that the others determine is no variance.
    gone = np.diagonal(left, axis1=1, axis2=2) < 1e-9 * np.diagonal(first, axis1=1, axis2=2)
    left[gone.any(axis=1)] = 0
    return left


def _correlation(covariance: Floats) -> Floats:
    size = np.sqrt(covariance[:, 0, 0] * covariance[:, 1, 1])
    known = size > 0
    ratio: Floats = np.divide(covariance[:, 0, 1], size, out=np.full(size.shape, np.nan), where=known)
    return ratio.clip(-1, 1)


def _spearman_difference(columns: Floats, weights: Floats) -> Floats:
    return _weighted_partial(columns[:2], weights) - _weighted_partial(columns[[0, 2]], weights)


def _quantiles(values: Floats, clusters: NDArray[Any], counts: Floats, q: float) -> Floats:
    """Linear-interpolation quantiles (w,) of the written-out samples; ``counts`` (w, c) says how often each cluster."""
    order = np.argsort(values, kind="stable")
    ordered, clusters = values[order], clusters[order]
    total = counts @ np.bincount(clusters, minlength=counts.shape[1])
    position = (total - 1).clip(0) * q
    lower = np.floor(position)
    places = [_places(clusters, counts, index) for index in (lower, np.minimum(lower + 1, total - 1))]
    low, high = (ordered[np.minimum(place, values.size - 1)] for place in places)
    return np.where(total > 0, low + (high - low) * (position - lower), np.nan)


def _places(clusters: NDArray[Any], counts: Floats, index: Floats) -> NDArray[np.intp]:
    """How many of the ordered values' cumulative weights (w,) are at most an index.

    First by whole blocks of values, then inside the one block where the sum passes the index: n of each resample's
    weights are never written out.
    """
    n, c = clusters.size, counts.shape[1]
    size = math.isqrt(n - 1) + 1
    blocks = -(-n // size)
    of_block = np.bincount(np.arange(n) // size * c + clusters, minlength=blocks * c).reshape(blocks, c)
    until = np.cumsum(counts @ of_block.T, axis=1)
    block = (until <= index[:, None]).sum(axis=1)
    before = np.where(block > 0, np.take_along_axis(until, np.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    inside = block[:, None] * size + np.arange(size)
    weights = np.take_along_axis(counts, clusters[np.minimum(inside, n - 1)], axis=1)
    passed = (before[:, None] + np.cumsum(weights, axis=1) <= index[:, None]) & (inside < n)
    found: NDArray[np.intp] = np.minimum(block * size + passed.sum(axis=1), n)
    return found


def _weighted_mean(values: NDArray[Any], weights: Floats) -> Floats:
    return _quotient(weights @ values, weights.sum(axis=1))


def _quotient(numerator: Floats, denominator: Floats) -> Floats:
    quotient: Floats = np.divide(numerator, denominator, out=np.full(denominator.shape, np.nan), where=denominator > 0)
    return quotient

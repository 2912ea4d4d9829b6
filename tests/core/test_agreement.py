"""Rank agreement is scipy's, and its intervals those of written-out resamples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from deltalens.core.agreement import kendall, rank_agreement
from deltalens.core.association import LEAST_CLUSTERS, ClusterBootstrap
from deltalens.errors import InputError

pairs = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=12)


@given(pairs)
@settings(max_examples=80, deadline=None)
def test_kendall_is_scipys_with_ties(values: list[tuple[int, int]]) -> None:
    a, b = np.array(values, dtype=float).T
    expected = stats.kendalltau(a, b).statistic if np.ptp(a) and np.ptp(b) else np.nan
    assert kendall(a, b) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_rows_with_a_nan_are_left_out() -> None:
    a, b = [1.0, 2.0, np.nan, 4.0, 3.0], [2.0, 1.0, 5.0, 7.0, np.nan]
    assert kendall(a, b) == pytest.approx(stats.kendalltau([1, 2, 4], [2, 1, 7]).statistic)
    found = rank_agreement(a, b)
    assert found.items == 3
    assert found.spearman == pytest.approx(stats.spearmanr([1, 2, 4], [2, 1, 7]).statistic)


def test_intervals_are_those_of_written_out_resamples() -> None:
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(10), 7)
    tokens = rng.normal(size=(2, 5, 70)) + np.arange(5)[None, :, None] * 0.1
    tokens[0, 1, 3] = np.nan
    bootstrap = ClusterBootstrap(clusters, resamples=60, seed=3)
    samples = [np.stack([bootstrap.resampled_means(values) for values in side], axis=1) for side in tokens]
    found = rank_agreement(*np.nanmean(tokens, axis=2), *samples)
    draws = np.random.default_rng(3).integers(10, size=(60, 10))
    taus, rhos = [], []
    for draw in draws:
        rows = np.concatenate([np.flatnonzero(clusters == cluster) for cluster in draw])
        one, other = np.nanmean(tokens[:, :, rows], axis=2)
        taus.append(stats.kendalltau(one, other).statistic)
        rhos.append(stats.spearmanr(one, other).statistic)
    assert found.kendall_interval == pytest.approx(tuple(np.quantile(taus, [0.025, 0.975])))
    assert found.spearman_interval == pytest.approx(tuple(np.quantile(rhos, [0.025, 0.975])))
    assert found.kendall == pytest.approx(stats.kendalltau(*np.nanmean(tokens, axis=2)).statistic)


def test_one_side_may_have_no_resamples() -> None:
    resampled = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]] * 40)
    found = rank_agreement([1, 2, 3], [1, 2, 3], resampled, None)
    assert found.kendall == 1.0
    assert found.kendall_interval == (-1.0, 1.0)


def test_too_few_items_or_clusters_leave_it_undefined() -> None:
    few = rank_agreement([1, 2], [2, 1])
    assert np.isnan([few.kendall, few.spearman, *few.kendall_interval, *few.spearman_interval]).all()
    bootstrap = ClusterBootstrap(np.repeat(np.arange(LEAST_CLUSTERS - 1), 2))
    assert np.isnan(bootstrap.resampled_means(np.ones(2 * LEAST_CLUSTERS - 2))).all()
    assert np.isnan(rank_agreement([1, 2, 3], [1, 2, 3]).kendall_interval).all()


def test_lengths_must_agree() -> None:
    with pytest.raises(InputError, match="one length"):
        kendall([1, 2, 3], [1, 2])


def test_the_interval_of_a_mean_is_that_of_written_out_resamples() -> None:
    rng = np.random.default_rng(1)
    clusters, values = rng.integers(9, size=80), rng.normal(size=80)
    names = np.unique(clusters)
    draws = np.random.default_rng(5).integers(names.size, size=(50, names.size))
    means = [values[np.concatenate([np.flatnonzero(clusters == names[c]) for c in draw])].mean() for draw in draws]
    found = ClusterBootstrap(clusters, resamples=50, seed=5).mean(values)
    assert found == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))

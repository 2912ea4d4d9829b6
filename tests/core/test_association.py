"""Rank statistics agree with scipy, and intervals with writing every resample out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from deltalens.core.association import ClusterBootstrap, partial_spearman, spearman
from deltalens.core.holm import holm, holm_levels
from deltalens.errors import InputError


def sample(seed, n=120, clusters=12, ties=True):
    rng = np.random.default_rng(seed)
    a, b, c = rng.normal(size=(3, n))
    b, c = b + a, c - a
    if ties:
        a, b = np.round(a, 1), np.round(b)
    a[rng.integers(n, size=5)] = np.nan
    return a, b, c, rng.integers(clusters, size=n)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 60), st.booleans())
def test_spearman_is_scipys(seed, n, ties):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, n))
    if ties:
        a, b = np.round(a), np.round(b)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        assert np.isnan(spearman(a, b))
    else:
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


def test_spearman_leaves_out_rows_with_nan():
    a, b, _, _ = sample(0)
    keep = ~np.isnan(a)
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a[keep], b[keep]).statistic)
    assert np.isnan(spearman([1.0, np.nan], [1.0, 2.0]))


@pytest.mark.parametrize("seed", range(5))
def test_partial_spearman_is_the_correlation_of_rank_regression_residuals(seed):
    a, b, c, _ = sample(seed)
    keep = ~np.isnan(a)
    d = np.random.default_rng(seed).normal(size=len(a))
    ranks = [stats.rankdata(v[keep]) for v in (a, b, c, d)]
    design = np.column_stack([np.ones(keep.sum()), ranks[2], ranks[3]])
    left = [r - design @ np.linalg.lstsq(design, r, rcond=None)[0] for r in ranks[:2]]
    assert partial_spearman(a, b, [c, d]) == pytest.approx(np.corrcoef(*left)[0, 1], abs=1e-10)


def test_partial_spearman_given_one_side_itself_is_unknown():
    a, b, _, _ = sample(1)
    assert np.isnan(partial_spearman(a, b, [b]))


def written_out(clusters, resamples, seed, columns, statistic):
    names = np.unique(clusters)
    draws = np.random.default_rng(seed).integers(len(names), size=(resamples, len(names)))
    values = []
    for draw in draws:
        rows = np.concatenate([np.flatnonzero(clusters == names[j]) for j in draw])
        chosen = [column[rows] for column in columns]
        keep = ~np.isnan(chosen).any(0)
        values.append(statistic(*[column[keep] for column in chosen]))
    return np.nanquantile(values, [0.025, 0.975])


STATISTICS = {
    "median": (lambda boot, a, b, c: boot.median(a), (0,), np.median),
    "quantile": (lambda boot, a, b, c: boot.quantile(a, 0.3), (0,), lambda a: np.quantile(a, 0.3)),
    "share": (lambda boot, a, b, c: boot.share_over(a, 0.2), (0,), lambda a: np.mean(a > 0.2)),
    "ratio": (lambda boot, a, b, c: boot.ratio(a, b + 5), (0, 1), lambda a, b: np.sum(a) / np.sum(b + 5)),
    "spearman": (lambda boot, a, b, c: boot.spearman(a, b), (0, 1), lambda a, b: stats.spearmanr(a, b).statistic),
    "difference": (
        lambda boot, a, b, c: boot.spearman_difference(a, b, c),
        (0, 1, 2),
        lambda a, b, c: stats.spearmanr(a, b).statistic - stats.spearmanr(a, c).statistic,
    ),
    "partial": (
        lambda boot, a, b, c: boot.partial_spearman(a, b, [c]),
        (0, 1, 2),
        lambda a, b, c: partial_spearman(a, b, [c]),
    ),
}


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("ties", [True, False])
def test_intervals_equal_those_of_resamples_written_out(name, ties):
    a, b, c, clusters = sample(2, ties=ties)
    method, used, statistic = STATISTICS[name]
    boot = ClusterBootstrap(clusters, resamples=60, seed=5)
    wanted = written_out(clusters, 60, 5, [(a, b, c)[i] for i in used], statistic)
    np.testing.assert_allclose(method(boot, a, b, c), wanted, atol=1e-10)


def test_few_clusters_give_no_interval():
    a, b, c, clusters = sample(3, clusters=7)
    boot = ClusterBootstrap(clusters)
    assert boot.clusters == 7
    for method, _, _ in STATISTICS.values():
        assert np.isnan(method(boot, a, b, c)).all()
    assert np.isnan(boot.p_value(a, 0.0))
    lone = np.where(np.random.default_rng(0).integers(2, size=120) > 0, np.nan, b)
    many = sample(3, clusters=9)[3]
    lone[many < 3] = np.nan
    assert np.isnan(ClusterBootstrap(many).median(lone)).all()


def test_any_labels_serve_as_clusters_and_seeds_decide():
    a, _, _, clusters = sample(4, ties=False)
    names = np.array([f"document {i:02d}" for i in clusters])
    assert ClusterBootstrap(names, seed=1).median(a) == ClusterBootstrap(clusters, seed=1).median(a)
    assert ClusterBootstrap(clusters, seed=1).median(a) != ClusterBootstrap(clusters, seed=2).median(a)


def test_wider_levels_give_wider_intervals():
    a, _, _, clusters = sample(5)
    boot = ClusterBootstrap(clusters)
    low, high = boot.median(a)
    wide_low, wide_high = boot.median(a, level=0.999)
    assert wide_low <= low < high <= wide_high


def test_clustered_intervals_cover_the_truth_where_independent_ones_do_not():
    rng = np.random.default_rng(6)
    covered = {"clusters": 0, "tokens": 0}
    for trial in range(100):
        effects = np.repeat(rng.normal(size=20), 15)
        values = effects + 0.3 * rng.normal(size=300)
        for kind, labels in (("clusters", np.repeat(np.arange(20), 15)), ("tokens", np.arange(300))):
            low, high = ClusterBootstrap(labels, resamples=200, seed=trial).median(values)
            covered[kind] += low <= 0 <= high
    assert covered["clusters"] >= 85
    assert covered["tokens"] < 70


def test_p_values_are_small_far_from_the_threshold_only():
    a, _, _, clusters = sample(7)
    boot = ClusterBootstrap(clusters)
    assert boot.p_value(a, np.nanmedian(a) + 10) < 0.01
    assert boot.p_value(a, np.nanmedian(a)) > 0.2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_its_step_down_procedure_rejects(p_values):
    adjusted = holm(p_values)
    order = np.argsort(p_values, kind="stable")
    rejected = np.zeros(len(p_values), dtype=bool)
    for i, j in enumerate(order):
        if p_values[j] * (len(p_values) - i) > 0.05:
            break
        rejected[j] = True
    assert ((adjusted <= 0.05) == rejected).all()
    assert (holm_levels(p_values) >= 0.95 - 1e-12).all()


def test_holm_leaves_out_unknown_p_values():
    np.testing.assert_allclose(holm([0.02, np.nan, 0.01]), [0.02, np.nan, 0.02])
    np.testing.assert_allclose(holm_levels([0.02, np.nan, 0.01], level=0.9), [0.9, np.nan, 0.95])


def test_mismatched_lengths_are_refused():
    with pytest.raises(InputError, match="shapes"):
        spearman([1.0, 2.0], [1.0])
    with pytest.raises(InputError, match="clusters have 3"):
        ClusterBootstrap([0, 1, 2]).median([1.0, 2.0])
    with pytest.raises(InputError, match="one label"):
        ClusterBootstrap(np.zeros((2, 2)))
    with pytest.raises(InputError, match="resamples"):
        ClusterBootstrap([0, 1], resamples=0)

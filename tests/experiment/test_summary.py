"""Summary rows are what scipy and pandas make of the token rows, and undefined values are counted, never filled."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from deltalens.core.association import ClusterBootstrap
from deltalens.experiment.summary import Summarizer, clusters_of, share_over


def tokens(n: int = 240, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    error = rng.gamma(2.0, size=n)
    table = pd.DataFrame(
        {
            "state_norm": rng.gamma(5.0, size=n),
            "update_norm": rng.gamma(5.0, size=n),
            "residual_norm": error * 2,
            "relative_error": error,
            "angle_residual_tokenwise": rng.uniform(0, 90, n),
            "kl_single": error**2 * rng.gamma(2.0, size=n),
            "kl_all": rng.gamma(2.0, size=n),
            "kl_single_random": error * rng.gamma(2.0, size=n),
            "kl_single_shuffled": rng.gamma(2.0, size=n),
            "kl_residual_only": rng.gamma(2.0, size=n),
            "kl_tokenwise_matched": rng.gamma(2.0, size=n),
        }
    )
    table.loc[table.index % 17 == 0, "kl_single"] = np.nan
    return table


@pytest.fixture
def summarizer() -> Summarizer:
    return Summarizer(ClusterBootstrap(np.repeat(np.arange(12), 20), resamples=200, seed=3))


def test_medians_quartiles_and_counts(summarizer: Summarizer) -> None:
    table = tokens()
    row = summarizer.summarize(table)
    for name in ("relative_error", "kl_single", "kl_all"):
        assert row[name] == pytest.approx(table[name].median())
        assert row[f"{name}_q25"] == pytest.approx(table[name].quantile(0.25))
        assert row[f"{name}_q75"] == pytest.approx(table[name].quantile(0.75))
        assert row[f"{name}_n"] + row[f"{name}_nan"] == len(table)
        assert row[f"{name}_lo"] <= row[name] <= row[f"{name}_hi"]
    assert row["kl_single_nan"] == table["kl_single"].isna().sum() > 0


def test_correlations_agree_with_scipy(summarizer: Summarizer) -> None:
    table = tokens()
    row = summarizer.summarize(table)
    for name, column in {
        "spearman": "kl_single",
        "spearman_all": "kl_all",
        "spearman_random": "kl_single_random",
    }.items():
        kept = table[["relative_error", column]].dropna()
        assert row[name] == pytest.approx(stats.spearmanr(kept["relative_error"], kept[column])[0])
    assert row["spearman_minus_random"] == pytest.approx(row["spearman"] - row["spearman_random"])
    assert row["spearman_minus_random_lo"] < row["spearman_minus_random"] < row["spearman_minus_random_hi"]


def test_ratios_and_swaps_are_medians_over_tokens(summarizer: Summarizer) -> None:
    table = tokens()
    row = summarizer.summarize(table)
    assert row["kl_ratio_random"] == pytest.approx((table["kl_single"] / table["kl_single_random"]).median())
    swap = np.log(table["kl_single"]) - np.log(table["kl_residual_only"])
    assert row["swap_log_ratio"] == pytest.approx(swap.median())


def test_a_ratio_with_a_zero_control_is_undefined_and_not_infinite(summarizer: Summarizer) -> None:
    table = tokens()
    table.loc[:9, "kl_single_random"] = 0.0
    row = summarizer.summarize(table)
    assert np.isfinite(row["kl_ratio_random"])
    assert row["kl_ratio_random_n"] == (table["kl_single"].notna() & (table["kl_single_random"] > 0)).sum()


def test_nulls_and_chance_have_their_own_columns(summarizer: Summarizer) -> None:
    table, null = tokens(), tokens(seed=1)
    row = summarizer.summarize(table, null=null, chance=null)
    assert row["relative_error_null"] == row["relative_error_chance"] == pytest.approx(null["relative_error"].median())
    assert row["share_residual_over_60_null"] == pytest.approx((null["angle_residual_tokenwise"] > 60).mean())


def test_few_clusters_have_no_interval() -> None:
    row = Summarizer(ClusterBootstrap(np.repeat(np.arange(6), 40), resamples=200, seed=0)).summarize(tokens())
    assert np.isnan([row["kl_all_lo"], row["spearman_hi"], row["share_residual_over_60_lo"]]).all()


def test_clusters_are_documents_from_eight_on() -> None:
    windows = np.arange(16)
    assert clusters_of(np.repeat(np.arange(8), 2), windows).tolist() == np.repeat(np.arange(8), 2).tolist()
    assert clusters_of(np.repeat(np.arange(4), 4), windows) is windows


def test_a_share_of_nothing_is_undefined() -> None:
    assert np.isnan(share_over(np.array([np.nan]), 60.0))
    assert share_over(np.array([np.nan, 59.0, 61.0]), 60.0) == 0.5

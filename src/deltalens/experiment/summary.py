"""From the token rows of one unit to its summary row: medians, intervals, quartiles, correlations, ratios."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from deltalens.core.association import ClusterBootstrap, partial_spearman, spearman

#: Measures that are summarised by their median.
GEOMETRIC = (
    "state_norm", "next_norm", "update_norm", "tokenwise_norm", "residual_norm",
    "relative_error", "relative_update_error",
    "cos_full_tokenwise", "cos_full_tokenwise_signed", "cos_residual_tokenwise", "cos_residual_tokenwise_signed",
    "angle_full_tokenwise", "angle_residual_tokenwise",
    "proj_full", "proj_tokenwise", "proj_residual", "subspace_rank",
)  # fmt: skip
FIT = ("distinct_neighbors", "degrees_of_freedom")
FUNCTIONAL = (
    "kl_single", "kl_all", "kl_single_random", "kl_single_shuffled", "kl_single_covariance",
    "kl_residual_only", "kl_skip", "kl_in", "kl_out", "kl_tokenwise_matched",
    "nll", "nll_delta_single", "nll_delta_all", "top1_agrees_single", "top1_agrees_all",
)  # fmt: skip

WIDE_ANGLE = 60.0
_ANGLE = "angle_residual_tokenwise"
_RATIOS = {"kl_ratio_random": "kl_single_random", "kl_ratio_shuffled": "kl_single_shuffled"}
_SWAPS = {
    "swap_log_ratio": ("kl_single", "kl_residual_only"),
    "swap_log_ratio_matched": ("kl_single", "kl_tokenwise_matched"),
}


@dataclass(frozen=True)
class Summarizer:
    """Summarises units over the same tokens with the same bootstrap resamples.

    Args:
        bootstrap: over documents where there are at least 8, else over windows.
        error: the error that is correlated with the KL.
    """

    bootstrap: ClusterBootstrap
    error: str = "relative_error"

    def summarize(
        self,
        tokens: pd.DataFrame,
        *,
        null: pd.DataFrame | None = None,
        chance: pd.DataFrame | None = None,
    ) -> dict[str, float]:
        """The summary row of one unit.

        Args:
            tokens: included tokens only, in the order of the bootstrap's clusters.
            null: geometric measures of the same fit on permuted updates, or None.
            chance: geometric measures with the residual of another window's token, or None.
        """
        columns = {
            name: tokens[name].to_numpy(np.float64) for name in tokens.columns if tokens[name].dtype.kind in "bifu"
        }
        row: dict[str, float] = {"n_included": float(len(tokens))}
        for name in (*GEOMETRIC, *FIT, *FUNCTIONAL, *sorted(_extra_functional(columns))):
            if name in columns:
                row |= self._median(name, columns[name])
        if "neighbor_recall" in columns:
            row["neighbor_recall"] = float(np.nanmean(columns["neighbor_recall"]))
        row |= self._share_over_60(columns[_ANGLE])
        row |= self._references("_null", null) | self._references("_chance", chance)
        return row | self._associations(columns) | self._comparisons(columns)

    def _median(self, name: str, values: np.ndarray) -> dict[str, float]:
        kept = values[~np.isnan(values)]
        low, high = self.bootstrap.median(values)
        quartiles = np.quantile(kept, [0.25, 0.5, 0.75]) if len(kept) else np.full(3, np.nan)
        return {
            name: float(quartiles[1]),
            f"{name}_lo": low,
            f"{name}_hi": high,
            f"{name}_q25": float(quartiles[0]),
            f"{name}_q75": float(quartiles[2]),
            f"{name}_n": float(len(kept)),
            f"{name}_nan": float(len(values) - len(kept)),
        }

    def _share_over_60(self, angles: np.ndarray) -> dict[str, float]:
        low, high = self.bootstrap.share_over(angles, WIDE_ANGLE)
        return {
            "share_residual_over_60": share_over(angles, WIDE_ANGLE),
            "share_residual_over_60_lo": low,
            "share_residual_over_60_hi": high,
        }

    def _references(self, suffix: str, table: pd.DataFrame | None) -> dict[str, float]:
        if table is None:
            return {}
        medians = {
            f"{name}{suffix}": _nanmedian(table[name].to_numpy(np.float64)) for name in GEOMETRIC if name in table
        }
        angles = table[_ANGLE].to_numpy(np.float64)
        return medians | {f"share_residual_over_60{suffix}": share_over(angles, WIDE_ANGLE)}

    def _associations(self, columns: Mapping[str, np.ndarray]) -> dict[str, float]:
        error = columns[self.error]
        row: dict[str, float] = {}
        for name, kl in _SPEARMANS.items():
            if kl in columns:
                low, high = self.bootstrap.spearman(error, columns[kl])
                row |= {name: spearman(error, columns[kl]), f"{name}_lo": low, f"{name}_hi": high}
        if "kl_single" in columns:
            given = [columns["update_norm"], columns["state_norm"]]
            row["spearman_partial"] = partial_spearman(error, columns["kl_single"], given)
        if "kl_single_random" in columns:
            low, high = self.bootstrap.spearman_difference(error, columns["kl_single"], columns["kl_single_random"])
            difference = row["spearman"] - row["spearman_random"]
            row |= {
                "spearman_minus_random": difference,
                "spearman_minus_random_lo": low,
                "spearman_minus_random_hi": high,
            }
        return row

    def _comparisons(self, columns: Mapping[str, np.ndarray]) -> dict[str, float]:
        row: dict[str, float] = {}
        with np.errstate(divide="ignore", invalid="ignore"):
            for name, control in _RATIOS.items():
                if control in columns:
                    row |= self._interval(name, _finite(columns["kl_single"] / columns[control]))
            for name, (ours, other) in _SWAPS.items():
                if ours in columns and other in columns:
                    row |= self._interval(name, _finite(np.log(columns[ours]) - np.log(columns[other])))
        return row

    def _interval(self, name: str, values: np.ndarray) -> dict[str, float]:
        low, high = self.bootstrap.median(values)
        return {
            name: _nanmedian(values),
            f"{name}_lo": low,
            f"{name}_hi": high,
            f"{name}_n": float((~np.isnan(values)).sum()),
        }


_SPEARMANS = {
    "spearman": "kl_single",
    "spearman_all": "kl_all",
    "spearman_random": "kl_single_random",
    "spearman_shuffled": "kl_single_shuffled",
}


def share_over(values: np.ndarray, threshold: float) -> float:
    """Share of the defined values above a threshold; NaN where none is defined."""
    kept = values[~np.isnan(values)]
    return float((kept > threshold).mean()) if len(kept) else float("nan")


def clusters_of(documents: np.ndarray, windows: np.ndarray, least: int = 8) -> np.ndarray:
    """The bootstrap's clusters: documents where at least ``least`` have tokens, else windows."""
    return documents if len(np.unique(documents)) >= least else windows


def _extra_functional(columns: Mapping[str, np.ndarray]) -> list[str]:
    prefixes = ("kl_dose_", "reverse_kl_", "jensen_shannon_")
    return [name for name in columns if name.startswith(prefixes)]


def _nanmedian(values: np.ndarray) -> float:
    kept = values[~np.isnan(values)]
    return float(np.median(kept)) if len(kept) else float("nan")


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)

"""Error, alignment and correlation against expressivity: every point and map in one long table, with its knees."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from deltalens.experiment.sweep import swept_fields
from deltalens.report.protocol import RunLike

EXPRESSIVITY = "degrees_of_freedom"
ERROR = "relative_error"
MEASURES = (
    EXPRESSIVITY, ERROR, "relative_update_error", "cos_full_tokenwise", "cos_residual_tokenwise", "kl_single",
    "spearman",
)  # fmt: skip
REGIMES = ("low", "middle", "high")

#: What a curve needs to have a knee: points, how far it bends away from its chord, by what share the error falls.
FEWEST_POINTS = 3
LEAST_BEND = 0.1
LEAST_FALL = 0.05

_CURVE = ["layer", "family", "fit", "protocol"]


def sweep_table(run: RunLike) -> pd.DataFrame:
    """A run's units as one long table against effective degrees of freedom.

    Args:
        run: a finished run, whether it sweeps fields, sizes of maps, or nothing.

    Returns:
        One row per unit: ``layer, map, family, fit, protocol``, the swept fields, the medians of `MEASURES` with their
        intervals, ``error_regime`` (``low``, ``middle`` or ``high``: the third of the run's errors under the same fit
        and protocol), ``frontier`` (no unit of the same curve has a smaller error at as few degrees of freedom), and
        ``knee``. A curve is all units of one layer, family of maps (``low_rank`` of ``low_rank:8``), fit and protocol.

    Source:
        Claim 8 of arXiv 2604.02459, read against the expressivity of the fits.
    """
    summary = run.summary()
    table = summary[["layer", "map", "fit", "protocol"]].copy()
    table.insert(2, "family", table["map"].astype(str).str.partition(":")[0])
    for name in swept_fields(run.manifest.get("spec") or {}):
        table[name] = summary[name]
    for name in (measure + suffix for measure in MEASURES for suffix in ("", "_lo", "_hi")):
        if name in summary and not name.startswith(EXPRESSIVITY + "_"):
            table[name] = summary[name].astype(float)
    table["error_regime"] = error_regimes(table)
    table["frontier"], table["knee"] = False, False
    for _, curve in table.groupby(_CURVE, observed=True, sort=False):
        freedom, error = curve[EXPRESSIVITY].to_numpy(), curve[ERROR].to_numpy()
        best = frontier(freedom, error)
        table.loc[curve.index[best], "frontier"] = True
        bend = knee(freedom[best], error[best])
        if bend is not None:
            table.loc[curve.index[best[bend]], "knee"] = True
    return table


def error_regimes(table: pd.DataFrame) -> "pd.Series[Any]":
    """Which third of the errors under the same fit and protocol each row is in; empty where its error is undefined."""
    ranks = table.groupby(["fit", "protocol"], observed=True)[ERROR].rank(method="average", pct=True)
    thirds = np.select([ranks <= 1 / 3, ranks <= 2 / 3, ranks.notna()], REGIMES, default="")
    return pd.Series(thirds, index=table.index, dtype=object)


def frontier(freedom: NDArray[np.float64], error: NDArray[np.float64]) -> NDArray[np.intp]:
    """The units that have the least error at their degrees of freedom or fewer, by ascending degrees of freedom."""
    known = np.flatnonzero(np.isfinite(freedom) & np.isfinite(error) & (freedom > 0))
    order = known[np.lexsort((error[known], freedom[known]))]
    before = np.r_[np.inf, np.minimum.accumulate(error[order])[:-1]] if len(order) else np.empty(0)
    return order[error[order] < before]


def knee(
    freedom: NDArray[np.float64],
    error: NDArray[np.float64],
    *,
    least_bend: float = LEAST_BEND,
    least_fall: float = LEAST_FALL,
) -> int | None:
    """Where a falling curve stops paying: its farthest point below the chord, on a logarithmic horizontal axis.

    With ``u`` the logarithm of the degrees of freedom and ``v`` the error, both brought to 0-1 over the curve, the knee
    is at the largest ``1 - u - v``.

    Args:
        freedom: degrees of freedom, ascending and positive.
        error: errors, descending.
        least_bend: how large ``1 - u - v`` must be; a straight or bulging curve has no knee.
        least_fall: by what share of the largest error the error must fall; a flat curve has no knee.

    Returns:
        The index of the knee, None where there are fewer than three points, too small a bend or too small a fall.

    Source:
        Kneedle: Satopaa, Albrecht, Irwin and Raghavan, "Finding a 'Kneedle' in a Haystack" (2011), without its
        smoothing, since a sweep has few points and no noise between them.

    Example:
        >>> import numpy as np
        >>> knee(np.array([1.0, 2.0, 4.0, 8.0, 16.0]), np.array([1.0, 0.3, 0.25, 0.22, 0.2]))
        1
    """
    if len(freedom) < FEWEST_POINTS or error.min() > (1 - least_fall) * error.max():
        return None
    across = np.log(freedom)
    u, v = ((values - values.min()) / (values.max() - values.min()) for values in (across, error))
    bend = 1 - u - v
    at = int(np.argmax(bend))
    return at if bend[at] >= least_bend else None


def is_sweep(table: pd.DataFrame) -> bool:
    """Whether any curve has enough points to be one."""
    return bool(table[table[EXPRESSIVITY] > 0].groupby(_CURVE, observed=True)[EXPRESSIVITY].nunique().ge(3).any())


def point_columns(table: pd.DataFrame) -> list[str]:
    """The swept fields of a sweep table."""
    names = [str(name) for name in table]
    return names[names.index("protocol") + 1 : names.index(EXPRESSIVITY)]


def knees(table: pd.DataFrame, protocol: str) -> pd.DataFrame:
    """The knee of every curve under one protocol, with its place and its figures."""
    found = table[table["knee"] & (table["protocol"] == protocol)]
    kept = ["layer", "map", "fit", *point_columns(table), EXPRESSIVITY, ERROR, "cos_full_tokenwise", "spearman"]
    return found[[name for name in kept if name in found]].sort_values(["map", "layer"], kind="stable")

"""How much runs differ from the first of them: per token where the tokens are the same, else from their intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from deltalens.core.association import ClusterBootstrap
from deltalens.report.comparability import same_tokens
from deltalens.report.logic import middle
from deltalens.report.protocol import RunLike, judged_protocol, model_facts, sort_protocols

MEASURES = (
    "cos_full_tokenwise", "relative_update_error", "relative_error", "cos_residual_tokenwise", "proj_full",
    "proj_residual", "kl_single", "spearman",
)  # fmt: skip
KEY = ["map", "fit", "protocol"]
ENOUGH_CLUSTERS = 8
RESAMPLES = 300  # of each of a thousand or more medians

Figures = tuple[float, float, float]


@dataclass(frozen=True)
class Difference:
    """One measure at matched depth.

    Attributes:
        difference: the median over tokens of second - first where the tokens are the same (`paired`), else the
            difference of the medians.
        low: lower end of its 95% interval, NaN if there is none.
        high: upper end.
    """

    run: int
    layer: int
    matched_layer: int
    map: str
    fit: str
    protocol: str
    measure: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    paired: bool


def all_differences(runs: Sequence[RunLike]) -> list[Difference]:
    """Every other run against the first, measure by measure, layer by layer, under each common map and protocol."""
    return [d for i in range(1, len(runs)) for d in run_differences(runs[0], runs[i], i)]


def run_differences(first: RunLike, second: RunLike, index: int) -> list[Difference]:
    """The differences of one run from the first."""
    summaries = [run.summary() for run in (first, second)]
    pairs = matched_layers(first, second)
    judged = judged_protocol(sort_protocols({str(p) for s in summaries for p in s["protocol"]}))
    paired = _paired_differences(first, second, pairs, judged) if judged and same_tokens(first, second) else {}
    keyed = [_by_key(summary) for summary in summaries]
    out = []
    for layer, other in pairs:
        for key in [k[1:] for k in keyed[0] if k[0] == layer and (other, *k[1:]) in keyed[1]]:
            rows = keyed[0][(layer, *key)], keyed[1][(other, *key)]
            known = {m: paired.get((layer, *key, m)) for m in MEASURES}
            place = (index, layer, other, *key)
            out += [d for m in MEASURES if (d := row_difference(place, *rows, m, known[m])) is not None]
    return out


def _by_key(summary: pd.DataFrame) -> dict[tuple[int, str, str, str], pd.Series]:
    return {(int(r["layer"]), str(r["map"]), str(r["fit"]), str(r["protocol"])): r for _, r in summary.iterrows()}


def row_difference(
    place: tuple[int, int, int, str, str, str],
    first: pd.Series,
    second: pd.Series,
    measure: str,
    paired: Figures | None,
) -> Difference | None:
    """The difference of one measure between two summary rows; None if one of them lacks it."""
    a, b = float(first.get(measure, np.nan)), float(second.get(measure, np.nan))
    if np.isnan(a) or np.isnan(b):
        return None
    gap, low, high = paired or (b - a, *independent_interval(first, second, measure))
    return Difference(*place, measure, a, b, gap, low, high, paired is not None)


def matched_layers(first: RunLike, second: RunLike) -> list[tuple[int, int]]:
    """Each layer of the first run with the other's nearest in relative depth (l + 1/2) / L."""
    layers = [sorted({int(v) for v in run.summary()["layer"]}) for run in (first, second)]
    counts = [
        int(model_facts(run).get("layers") or max(own) + 1) for run, own in zip((first, second), layers, strict=True)
    ]
    depths = [[(layer + 0.5) / count for layer in own] for own, count in zip(layers, counts, strict=True)]
    # Rounded, so that of two layers at equal distance the shallower is taken.
    nearest = [int(np.argmin(np.abs(np.array(depths[1]) - depth).round(9))) for depth in depths[0]]
    return [(layer, layers[1][at]) for layer, at in zip(layers[0], nearest, strict=True)]


def independent_interval(a: pd.Series, b: pd.Series, measure: str) -> tuple[float, float]:
    """An interval of b - a from the two intervals, taken as independent: half-widths add in squares, side by side."""
    ends = [float(row.get(measure + suffix, np.nan)) for row in (a, b) for suffix in ("", "_lo", "_hi")]
    if not np.isfinite(ends).all():
        return float("nan"), float("nan")
    value_a, low_a, high_a, value_b, low_b, high_b = ends
    down = np.hypot(value_b - low_b, high_a - value_a)
    up = np.hypot(high_b - value_b, value_a - low_a)
    return float(value_b - value_a - down), float(value_b - value_a + up)


def _paired_differences(
    first: RunLike, second: RunLike, pairs: list[tuple[int, int]], protocol: str
) -> dict[tuple[object, ...], Figures]:
    tables = [run.tokens(protocol=protocol) for run in (first, second)]
    columns = [m for m in MEASURES if all(m in t for t in tables)]
    keys = ["window", "position", "token_id", "document", "excluded"]
    if not columns or any(k not in t for t in tables for k in keys):
        return {}
    left, right = (dict(list(t.groupby(["layer", *KEY], observed=True))) for t in tables)
    out: dict[tuple[object, ...], Figures] = {}
    bootstraps: dict[bytes, ClusterBootstrap] = {}
    for layer, other in pairs:
        for key in {k[1:] for k in left if k[0] == layer} & {k[1:] for k in right if k[0] == other}:
            both = left[(layer, *key)].merge(right[(other, *key)], on=keys[:3], suffixes=("", "_second"))
            both = both[~(both["excluded"].astype(bool) | both["excluded_second"].astype(bool))]
            if both.empty:
                continue
            clusters = _clusters(both)
            bootstrap = bootstraps.setdefault(clusters.tobytes(), ClusterBootstrap(clusters, resamples=RESAMPLES))
            for measure in columns:
                gaps = both[f"{measure}_second"].to_numpy(dtype=float) - both[measure].to_numpy(dtype=float)
                figures = _paired(bootstrap, gaps)
                if figures is not None:
                    out[(layer, *key, measure)] = figures
    return out


def _paired(bootstrap: ClusterBootstrap, differences: NDArray[np.float64]) -> Figures | None:
    if np.isnan(differences).all():
        return None
    return middle(differences), *bootstrap.median(differences)


def _clusters(tokens: pd.DataFrame) -> NDArray[np.int64]:
    documents = pd.factorize(tokens["document"])[0]
    enough = len(np.unique(documents)) >= ENOUGH_CLUSTERS
    return np.asarray(documents if enough else tokens["window"], dtype=np.int64)

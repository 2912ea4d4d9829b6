"""What a study's figures are worth: the same maps under each protocol, and beside what nulls and controls give."""

from collections.abc import Sequence

import pandas as pd

from deltalens.report.evidence import BestRows, best_rows
from deltalens.report.logic import above, middle, number, values_of
from deltalens.report.protocol import RunLike, sort_protocols
from deltalens.study.markdown import markdown_table

#: Figures that over-fitting flatters, with their names for a reader.
FITTED = {
    "cos_full_tokenwise": "alignment", "relative_update_error": "residual size", "proj_full": "projection, update",
    "proj_residual": "projection, residual", "spearman": "Spearman of error and KL",
}  # fmt: skip

_PROTOCOLS_NOTE = (
    "Medians over layers, of the map with the least held-out error at each layer. `leave one out` differs from `in "
    "sample` by the anchor's own pair alone; the pool of `held out` is another and a larger one. Nulls are the same "
    "fits on shuffled updates."
)
_CONTROLS_NOTE = (
    "Held out, medians over layers, of the same maps. Counts are of layers whose 95% interval lies above. `chance` has "
    "the residual r of another window's token, the random vector r's own norm."
)


def protocol_contrast(names: Sequence[str], runs: Sequence[RunLike]) -> pd.DataFrame:
    """The best maps' figures under every protocol, each the median over layers.

    Args:
        names: of the runs.
        runs: finished runs.

    Returns:
        One row per run and figure, a column per protocol, and ``KIND null`` where a null was made. The maps are each
        layer's best one by the error outside the sample, the same under every protocol.
    """
    rows: list[dict[str, object]] = []
    for name, run in zip(names, runs, strict=True):
        summary = run.summary()
        best = best_rows(summary)
        if best is None:
            continue
        keys = pd.DataFrame({"layer": best.layers, "map": best.maps})
        tables = {
            protocol: keys.merge(summary[summary["protocol"] == protocol], on=["layer", "map"], how="left")
            for protocol in sort_protocols(set(summary["protocol"].astype(str)))
        }
        for column, title in FITTED.items():
            row: dict[str, object] = {"run": name, "figure": title}
            for protocol, table in tables.items():
                row[protocol.replace("_", " ")] = middle(values_of(table, column, len(keys)))
                row[f"{protocol.replace('_', ' ')}, null"] = middle(values_of(table, f"{column}_null", len(keys)))
            rows.append(row)
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def control_contrast(names: Sequence[str], runs: Sequence[RunLike]) -> pd.DataFrame:
    """The best maps' held-out figures beside chance and size-matched controls, medians over layers.

    Args:
        names: of the runs.
        runs: finished runs.

    Returns:
        One row per run. Columns that count layers are text, such as `3 of 10`: where the 95% interval is above what
        the control gives.
    """
    rows = []
    for name, run in zip(names, runs, strict=True):
        best = best_rows(run.summary())
        if best is not None and best.protocol is not None:
            rows.append({"run": name} | _controls(best))
    return pd.DataFrame(rows)


def _controls(best: BestRows) -> dict[str, object]:
    return {
        "over 60°": middle(best.held("share_residual_over_60")),
        "over 60°, chance": middle(best.held("share_residual_over_60_chance")),
        "projection of r": middle(best.held("proj_residual")),
        "projection of r, chance": middle(best.held("proj_residual_chance")),
        "Spearman": middle(best.held("spearman")),
        "Spearman, random vector": middle(best.held("spearman_random")),
        "layers above random": _share(best, "spearman_minus_random_lo", 0.0),
        "KL, r / another token's r": middle(best.held("kl_ratio_shuffled")),
        "layers above 1": _share(best, "kl_ratio_shuffled_lo", 1.0),
        "log KL(T(x)) − log KL(x + r)": middle(best.held("swap_log_ratio")),
        "layers above 0": _share(best, "swap_log_ratio_lo", 0.0),
    }


def _share(best: BestRows, column: str, threshold: float) -> str:
    flags = above(best.held(column), threshold)
    return f"{int((flags == 1).sum())} of {len(flags)}"


def contrast_markdown(names: Sequence[str], runs: Sequence[RunLike]) -> dict[str, str]:
    """Both contrasts as sections of the index."""
    sections = {}
    protocols, controls = protocol_contrast(names, runs), control_contrast(names, runs)
    if not protocols.empty:
        table = markdown_table(protocols.columns, [_shown(row) for row in protocols.itertuples(index=False)])
        sections["The same maps inside and outside their sample"] = f"{_PROTOCOLS_NOTE}\n\n{table}"
    if not controls.empty:
        turned = controls.set_index("run").T
        table = markdown_table(["figure", *controls["run"]], [_shown(row) for row in turned.itertuples()])
        sections["Beside chance and size-matched controls"] = f"{_CONTROLS_NOTE}\n\n{table}"
    return sections


def _shown(row: Sequence[object]) -> list[str]:
    return [number(value) if isinstance(value, float) else str(value) for value in row]

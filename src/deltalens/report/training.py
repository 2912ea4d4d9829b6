"""Depth against training: what each layer does at each revision of a model, as heat maps for print."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deltalens.errors import StoreError
from deltalens.report.figures import PAGE_WIDTH, new_figure, paper_style, save_figure
from deltalens.report.measures import by_name
from deltalens.report.protocol import RunLike, judged_protocol, sort_protocols

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Panel
    from matplotlib.figure import Figure

#: Panels, row by row, with the range of their colours; None where the figures decide it.
PANELS: tuple[tuple[str, tuple[float, float] | None], ...] = (
    ("cos_full_tokenwise", (0.0, 1.0)),
    ("relative_update_error", None),
    ("proj_full", (0.0, 1.0)),
    ("proj_residual", (0.0, 1.0)),
    ("spearman", (-1.0, 1.0)),
    ("kl_single", None),
)
COLUMNS = 3


def write_training_figures(runs: Sequence[RunLike], labels: Sequence[str], folder: Path) -> list[Path]:
    """Write one figure of heat maps per map, layers against revisions, as PDF, SVG and PNG.

    Args:
        runs: one finished run per revision, in the order of training, with the same maps.
        labels: of the revisions.
        folder: where the files go; made if it doesn't exist.

    Returns:
        The paths written.

    Raises:
        StoreError: the folder can't be written.
    """
    paths: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in dict.fromkeys(str(m) for run in runs for m in run.summary()["map"]):
            with paper_style():
                stem = folder / f"training_{name.replace(':', '-')}"
                paths += save_figure(training_figure(runs, labels, name), stem)
    except OSError as error:
        raise StoreError(f"{folder}: figures can't be written ({error.strerror}); choose another folder") from error
    return paths


def depth_by_training(runs: Sequence[RunLike], map: str, measure: str) -> tuple[list[int], NDArray[np.float64]]:
    """A measure of one map, under the protocol that verdicts rest on.

    Args:
        runs: in the order of training.
        map: canonical name.
        measure: column of the summaries.

    Returns:
        The layers of any run, and the figures (layers, runs); NaN where a run lacks the layer or the measure.
    """
    tables = [_judged(run, map) for run in runs]
    layers = sorted({int(layer) for table in tables for layer in table.index})
    columns = [
        table[measure].reindex(layers).to_numpy(dtype=float) if measure in table else np.full(len(layers), np.nan)
        for table in tables
    ]
    return layers, np.stack(columns, axis=1)


def training_figure(runs: Sequence[RunLike], labels: Sequence[str], map: str) -> "Figure":
    """Six heat maps of one map: alignment, residual size, projections, correlation, effect."""
    rows = -(-len(PANELS) // COLUMNS)
    figure = new_figure(PAGE_WIDTH, 2.0 * rows + 0.3)
    panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
    for number, (measure, limits) in enumerate(PANELS):
        panel = panels[number // COLUMNS][number % COLUMNS]
        layers, values = depth_by_training(runs, map, measure)
        _draw(figure, panel, measure, values, limits)
        panel.set_yticks(*_thinned([str(layer) for layer in layers], most=12))
        panel.set_xticks(*_thinned(list(labels), most=10), rotation=45, ha="right", rotation_mode="anchor")
    for panel in panels[:, 0]:
        panel.set_ylabel("layer")
    figure.suptitle(f"{map}: layers against training", fontsize=9, x=0.01, ha="left")
    return figure


def _draw(
    figure: "Figure", panel: "Panel", measure: str, values: NDArray[np.float64], limits: tuple[float, float] | None
) -> None:
    import matplotlib
    from matplotlib.colors import LogNorm, Normalize

    facts = by_name(measure)
    known = values[np.isfinite(values) & (values > 0)] if facts.scale == "log" else values[np.isfinite(values)]
    low, high = limits or ((float(known.min()), float(known.max())) if len(known) else (0.0, 1.0))
    norm: Any = LogNorm(low, high) if facts.scale == "log" and len(known) and low < high else Normalize(low, high)
    colours = matplotlib.colormaps["RdBu_r" if measure == "spearman" else "viridis"].with_extremes(bad="#d8dbe0")
    image = panel.imshow(values, origin="lower", aspect="auto", cmap=colours, norm=norm, interpolation="nearest")
    panel.set_title(f"{facts.title}" + (f" ({facts.unit})" if facts.unit else ""))
    panel.grid(visible=False)
    figure.colorbar(image, ax=panel, fraction=0.05, pad=0.02)


def _judged(run: RunLike, map: str) -> Any:
    summary = run.summary()
    protocols = sort_protocols(set(summary["protocol"].astype(str)))
    kept = summary[(summary["protocol"] == (judged_protocol(protocols) or protocols[0])) & (summary["map"] == map)]
    return kept.drop_duplicates("layer").set_index("layer")


def _thinned(labels: list[str], most: int) -> tuple[list[int], list[str]]:
    step = -(-len(labels) // most)
    at = list(range(0, len(labels), step))
    return at, [labels[i] for i in at]

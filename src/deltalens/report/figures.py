"""Static figures for papers: vector and bitmap files with legible fonts at column width."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from deltalens.errors import StoreError
from deltalens.report.measures import Measure, by_name
from deltalens.report.payload import Axes, axes_of
from deltalens.report.points import at_point
from deltalens.report.protocol import RunLike, judged_protocol

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Panel
    from matplotlib.figure import Figure

COLUMN_WIDTH = 3.35  # inches, one column of a two-column paper
PAGE_WIDTH = 6.9
FORMATS = ("pdf", "svg", "png")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0569a", "#b58900", "#3c9ed0", "#4b3f9e", "#882255", "#6b7280", "#1b1b1b")
STYLES = ("-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.2, 2)))
MARKERS = "os^DP"
PROFILES = (
    "cos_full_tokenwise", "relative_update_error", "share_residual_over_60", "proj_full", "proj_residual", "kl_single",
    "spearman", "kl_ratio_random",
)  # fmt: skip
_STYLE: Any = {
    "font.family": "sans-serif", "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "legend.fontsize": 7,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "lines.linewidth": 1.2,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#e4e6ea", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "legend.frameon": False, "svg.fonttype": "none", "pdf.fonttype": 42, "figure.dpi": 100, "savefig.dpi": 300,
    "axes.titleweight": "bold", "axes.titlelocation": "left",
}  # fmt: skip


def write_figures(run: RunLike, folder: str | Path) -> list[Path]:
    """Writes depth profiles, angle distributions and error against KL as PDF, SVG and PNG.

    Args:
        run: a finished run.
        folder: where the files go; made if it doesn't exist.

    Returns:
        The paths written.

    Raises:
        StoreError: the run has no rows, or the folder can't be written.
    """
    target = Path(folder)
    run = at_point(run)
    summary = run.summary()
    if summary.empty:
        raise StoreError(f"{run.folder}: the run has no finished unit to draw; finish it with --resume")
    try:
        target.mkdir(parents=True, exist_ok=True)
        return [path for name, figure in paper_figures(run, summary) for path in save_figure(figure, target / name)]
    except OSError as error:
        raise StoreError(f"{target}: figures can't be written ({error.strerror}); choose another folder") from error


def paper_figures(run: RunLike, summary: pd.DataFrame) -> Iterator[tuple[str, "Figure"]]:
    """Name and figure, one by one."""
    axes = axes_of(summary, run.manifest)
    with paper_style():
        for name in PROFILES:
            if name in summary and summary[name].notna().any():
                yield f"profile_{name}", profile_figure(summary, axes, by_name(name))
        tokens = included_tokens(run, judged_protocol(axes.protocols) or axes.protocols[0])
        if "angle_residual_tokenwise" in tokens:
            yield "angles", angle_figure(tokens, axes)
        if {"relative_error", "kl_single"} <= set(tokens):
            yield "error_against_kl", scatter_figure(tokens, summary, axes)


def included_tokens(run: RunLike, protocol: str) -> pd.DataFrame:
    """The per-token rows that statistics rest on, under one protocol."""
    tokens = run.tokens(protocol=protocol)
    return tokens[~tokens["excluded"].astype(bool)] if "excluded" in tokens else tokens


@contextmanager
def paper_style() -> Iterator[None]:
    """Matplotlib's settings for print, undone afterwards."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches, whose parts find their own places."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", stem: Path) -> list[Path]:
    """Write a figure as PDF, SVG and PNG, equal figures byte for byte; return the paths."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, not once per format
    paths = [stem.with_suffix(f".{kind}") for kind in FORMATS]
    for path in paths:
        # Dates would make equal figures differ byte by byte.
        stamp = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(path.suffix[1:])
        figure.savefig(path, metadata=stamp)
    return paths


def profile_figure(summary: pd.DataFrame, axes: Axes, measure: Measure) -> "Figure":
    """One measure against depth, protocols side by side, with intervals, null and chance."""
    count = len(axes.protocols)
    figure = new_figure(COLUMN_WIDTH if count == 1 else PAGE_WIDTH, 2.1)
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for panel, protocol in zip(panels, axes.protocols, strict=True):
        panel.set_title(protocol.replace("_", " "))
        panel.set_xlabel("layer")
        if measure.scale == "log":
            panel.set_yscale("log")
        if measure.reference is not None:
            panel.axhline(measure.reference, color="#5d6470", linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
        rows = summary[summary["protocol"] == protocol]
        for i, (pair, label) in enumerate(zip(axes.series, axes.labels, strict=True)):
            own = rows[(rows["map"] == pair[0]) & (rows["fit"] == pair[1])].sort_values("layer")
            draw_profile(panel, own, measure.name, i, label)
    panels[0].set_ylabel(f"{measure.title}" + (f" ({measure.unit})" if measure.unit else ""))
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", handlelength=2.6)
    return figure


def draw_profile(panel: "Panel", rows: pd.DataFrame, name: str, index: int, label: str) -> None:
    """One map's line with its band, its null (dotted) and its chance level (dash-dotted)."""
    colour, layers = COLOURS[index % len(COLOURS)], rows["layer"].to_numpy()

    def values(suffix: str) -> Any:
        column = name + suffix
        return rows[column].to_numpy(dtype=float) if column in rows else np.full(len(rows), np.nan)

    if np.isfinite(values("_lo")).any():
        panel.fill_between(layers, values("_lo"), values("_hi"), color=colour, alpha=0.13, linewidth=0)
    for suffix, style in (("_null", (0, (0.8, 1.6))), ("_chance", (0, (5, 2, 1, 2)))):
        if np.isfinite(values(suffix)).any():
            panel.plot(layers, values(suffix), color=colour, linewidth=0.8, linestyle=style, alpha=0.8)
    every = max(1, len(layers) // 8)
    panel.plot(
        layers, values(""), color=colour, label=label, linestyle=STYLES[index % len(STYLES)],
        marker=MARKERS[index % len(MARKERS)], markersize=2.6, markevery=every,
    )  # fmt: skip


def angle_figure(tokens: pd.DataFrame, axes: Axes) -> "Figure":
    """Angles to the tokenwise update by layer as a heat map: residual above, full update below, one column per map."""
    kinds = [
        (n, t)
        for n, t in (("angle_residual_tokenwise", "residual"), ("angle_full_tokenwise", "full update"))
        if n in tokens
    ]
    count = len(axes.series)
    figure = new_figure(max(COLUMN_WIDTH, min(PAGE_WIDTH, 1.75 * count)), 1.9 * len(kinds))
    panels = figure.subplots(len(kinds), count, squeeze=False, sharex=True, sharey=True)
    image = None
    for row, (name, title) in enumerate(kinds):
        for column, (pair, label) in enumerate(zip(axes.series, axes.labels, strict=True)):
            panel = panels[row][column]
            own = tokens[(tokens["map"] == pair[0]) & (tokens["fit"] == pair[1])]
            grid = np.array([_density(own.loc[own["layer"] == layer, name]) for layer in axes.layers])
            image = panel.imshow(
                grid, origin="lower", aspect="auto", cmap="magma_r", vmin=0, vmax=0.25,
                extent=(0, 90, -0.5, len(axes.layers) - 0.5),
            )  # fmt: skip
            panel.axvline(60, color="#5d6470", linewidth=0.7, linestyle=(0, (4, 3)))
            panel.grid(False)
            panel.set_xticks([0, 30, 60, 90], ["0°", "30°", "60°", "90°"])
            ticks = np.unique(np.linspace(0, len(axes.layers) - 1, min(6, len(axes.layers))).round().astype(int))
            panel.set_yticks(ticks, [str(axes.layers[t]) for t in ticks])
            if row == 0:
                panel.set_title(label)
            if column == 0:
                panel.set_ylabel(f"{title}\nlayer")
    if image is not None:
        figure.colorbar(image, ax=panels, label="share of tokens per 5°", shrink=0.7)
    return figure


def _density(angles: pd.Series) -> Any:
    values = angles.to_numpy(dtype=float)
    counts, _ = np.histogram(values[np.isfinite(values)], bins=18, range=(0, 90))
    return counts / max(counts.sum(), 1)


def scatter_figure(tokens: pd.DataFrame, summary: pd.DataFrame, axes: Axes) -> "Figure":
    """Relative error against KL at four depths (rows: maps), the random control in grey."""
    depths = sorted({axes.layers[i] for i in np.linspace(0, len(axes.layers) - 1, 4).round().astype(int)})
    count = len(axes.series)
    figure = new_figure(PAGE_WIDTH, 1.55 * count)
    panels = figure.subplots(count, len(depths), squeeze=False, sharex=True, sharey=True)
    protocol = str(tokens["protocol"].iloc[0])
    for row, (pair, label) in enumerate(zip(axes.series, axes.labels, strict=True)):
        for column, layer in enumerate(depths):
            panel = panels[row][column]
            own = tokens[(tokens["map"] == pair[0]) & (tokens["fit"] == pair[1]) & (tokens["layer"] == layer)]
            panel.set_xscale("log")
            panel.set_yscale("log")
            if "kl_single_random" in own:
                panel.scatter(
                    own["relative_error"],
                    own["kl_single_random"],
                    s=1.6,
                    color="#b8bcc4",
                    linewidths=0,
                    rasterized=True,
                )
            panel.scatter(
                own["relative_error"], own["kl_single"], s=1.8, color=COLOURS[row % len(COLOURS)], linewidths=0,
                alpha=0.7, rasterized=True,
            )  # fmt: skip
            key = (summary["map"] == pair[0]) & (summary["fit"] == pair[1])
            found = summary[key & (summary["layer"] == layer) & (summary["protocol"] == protocol)]
            if len(found) and "spearman" in found and np.isfinite(found["spearman"].iloc[0]):
                panel.text(
                    0.04, 0.93, f"ρ = {found['spearman'].iloc[0]:.2f}", transform=panel.transAxes, va="top", fontsize=7
                )
            if row == 0:
                panel.set_title(f"layer {layer}→{layer + 1}")
            if row == count - 1:
                panel.set_xlabel("relative error")
            if column == 0:
                panel.set_ylabel(f"{label}\nKL (nats)")
    return figure

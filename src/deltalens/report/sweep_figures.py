"""Static figures of a sweep: error, alignment and correlation against effective degrees of freedom."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from deltalens.errors import StoreError
from deltalens.report.figures import COLOURS, PAGE_WIDTH, new_figure, paper_style, save_figure
from deltalens.report.protocol import RunLike
from deltalens.report.sweep import ERROR, EXPRESSIVITY, REGIMES, is_sweep, sweep_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Panel
    from matplotlib.figure import Figure

MOST_FAMILIES = 4
ROWS = (
    (ERROR, "relative error"),
    ("cos_full_tokenwise", "alignment, |cos|"),
    ("spearman", "Spearman of error\nand KL"),
)
MARKERS = {"low": "o", "middle": "s", "high": "^"}
RING = "#1b1b1b"


def write_sweep_figures(run: RunLike, folder: str | Path) -> list[Path]:
    """Writes the figures of a sweep as PDF, SVG and PNG; none for a run without one.

    Args:
        run: a finished run.
        folder: where the files go; made if it doesn't exist.

    Returns:
        The paths written.

    Raises:
        StoreError: the folder can't be written.
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        with paper_style():
            drawn = sweep_figures(sweep_table(run))
            return [path for name, figure in drawn for path in save_figure(figure, target / name)]
    except OSError as error:
        raise StoreError(f"{target}: figures can't be written ({error.strerror}); choose another folder") from error


def sweep_figures(table: pd.DataFrame) -> Iterator[tuple[str, "Figure"]]:
    """Name and figure, two per protocol that has a curve: by layer and map, and by error regime.

    Args:
        table: what `sweep_table` returned.
    """
    for protocol in dict.fromkeys(table["protocol"].astype(str)):
        rows = table[table["protocol"] == protocol]
        if is_sweep(rows):
            yield f"sweep_{protocol}", expressivity_figure(rows)
            yield f"sweep_regimes_{protocol}", regime_figure(rows)


def expressivity_figure(rows: pd.DataFrame) -> "Figure":
    """Measures (rows) of every map family (columns) against degrees of freedom, by layer; the frontier is a line."""
    families, measures = _families(rows), _measured(rows)
    figure = new_figure(PAGE_WIDTH, 1.55 * len(measures) + 0.5)
    panels = figure.subplots(len(measures), len(families), squeeze=False, sharex="col", sharey="row")
    layers = sorted(int(layer) for layer in rows["layer"].unique())
    colours = _layer_colours(layers)
    for column, family in enumerate(families):
        own = rows[(rows["family"] == family) & (rows[EXPRESSIVITY] > 0)]
        for row, (name, _) in enumerate(measures):
            for layer in layers:
                _draw_curve(panels[row][column], own[own["layer"] == layer], name, colours[layer])
        panels[0][column].set_title(family)
        panels[-1][column].set_xlabel("effective degrees of freedom")
    _dress(panels, measures)
    _legend_of_regimes(figure)
    _legend_of_layers(figure, panels, layers, colours)
    return figure


def regime_figure(rows: pd.DataFrame) -> "Figure":
    """Alignment and correlation against degrees of freedom, a column per third of the errors, by map family."""
    families, measures = _families(rows), _measured(rows)[1:]
    figure = new_figure(PAGE_WIDTH, 1.7 * len(measures) + 0.4)
    panels = figure.subplots(len(measures), len(REGIMES), squeeze=False, sharex=True, sharey="row")
    for column, regime in enumerate(REGIMES):
        own = rows[(rows["error_regime"] == regime) & (rows[EXPRESSIVITY] > 0)]
        panels[0][column].set_title(f"{regime} error{_range(own)}")
        panels[-1][column].set_xlabel("effective degrees of freedom")
        for row, (name, _) in enumerate(measures):
            for number, family in enumerate(families):
                _draw_family(panels[row][column], own[own["family"] == family], name, number, family)
    _dress(panels, measures)
    handles: dict[str, Any] = {}
    for panel in panels.flat:
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper right", ncols=len(families), handletextpad=0.3)
    return figure


def _draw_curve(panel: "Panel", rows: pd.DataFrame, name: str, colour: Any) -> None:
    best = rows[rows["frontier"]].sort_values(EXPRESSIVITY)
    panel.plot(best[EXPRESSIVITY], best[name], color=colour, linewidth=1.0, alpha=0.9, zorder=2)
    for regime, marker in MARKERS.items():
        own = rows[rows["error_regime"] == regime]
        panel.scatter(own[EXPRESSIVITY], own[name], s=11, marker=marker, color=colour, linewidths=0, zorder=3)
    bend = rows[rows["knee"]]
    panel.scatter(bend[EXPRESSIVITY], bend[name], s=46, facecolors="none", edgecolors=RING, linewidths=0.9, zorder=4)


def _draw_family(panel: "Panel", rows: pd.DataFrame, name: str, number: int, family: str) -> None:
    colour = COLOURS[number % len(COLOURS)]
    if f"{name}_lo" in rows:
        panel.vlines(
            rows[EXPRESSIVITY], rows[f"{name}_lo"], rows[f"{name}_hi"], color=colour, linewidth=0.5, alpha=0.35
        )
    marker = "os^DP"[number % 5]
    panel.scatter(
        rows[EXPRESSIVITY], rows[name], s=11, marker=marker, color=colour, linewidths=0, label=family, zorder=3
    )


def _families(rows: pd.DataFrame) -> list[str]:
    """The families with a curve, and of those the ones with the most units; all families where few are there."""
    present = rows[rows[EXPRESSIVITY] > 0]["family"].astype(str)
    counts = present.value_counts(sort=False)
    kept = set(counts.sort_values(ascending=False, kind="stable").index[:MOST_FAMILIES])
    return [family for family in dict.fromkeys(present) if family in kept]


def _measured(rows: pd.DataFrame) -> list[tuple[str, str]]:
    return [(name, title) for name, title in ROWS if name in rows and rows[name].notna().any()]


def _range(rows: pd.DataFrame) -> str:
    error = rows[ERROR].dropna()
    return f" ({error.min():.2g}–{error.max():.2g})" if len(error) else ""


def _layer_colours(layers: list[int]) -> dict[int, Any]:
    from matplotlib import colormaps

    places = np.linspace(0.05, 0.85, len(layers)) if len(layers) > 2 else [0.15, 0.65]
    return {layer: colormaps["viridis"](place) for layer, place in zip(layers, places, strict=False)}


def _dress(panels: Any, measures: list[tuple[str, str]]) -> None:
    for row, (name, title) in enumerate(measures):
        panels[row][0].set_ylabel(title)
        for panel in panels[row]:
            panel.set_xscale("log")
            _plain_ticks(panel.xaxis, panel.get_xlim())
            if name == ERROR:
                panel.set_yscale("log")
                _plain_ticks(panel.yaxis, panel.get_ylim())


def _plain_ticks(axis: Any, limits: tuple[float, float]) -> None:
    """Numbers as a reader writes them on a logarithmic axis, which is seldom as long as a few powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = np.log10(limits[1] / limits[0])
    subs = (
        (1.0,) if decades > 3 else (1.0, 3.0) if decades > 1.8 else (1.0, 2.0, 5.0) if decades > 0.7 else range(1, 10)
    )
    axis.set_major_locator(LogLocator(subs=tuple(subs), numticks=30))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend_of_regimes(figure: "Figure") -> None:
    from matplotlib.lines import Line2D

    grey = "#5d6470"
    handles = [
        Line2D([], [], marker=marker, linestyle="", color=grey, markersize=3.6, label=f"{regime} error")
        for regime, marker in MARKERS.items()
    ]
    ring = {"marker": "o", "linestyle": "", "markersize": 7, "markerfacecolor": "none", "markeredgecolor": RING}
    handles += [
        Line2D([], [], color=grey, linewidth=1, label="least error at no more freedom"),
        Line2D([], [], label="knee", **ring),  # type: ignore[arg-type]
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=5, handletextpad=0.4, columnspacing=1.2)


def _legend_of_layers(figure: "Figure", panels: Any, layers: list[int], colours: dict[int, Any]) -> None:
    from matplotlib.colorbar import ColorbarBase
    from matplotlib.colors import BoundaryNorm, ListedColormap

    bounds = np.arange(len(layers) + 1) - 0.5
    shades = ListedColormap([colours[layer] for layer in layers])
    bar = figure.colorbar(
        _mappable(BoundaryNorm(bounds, len(layers)), shades), ax=panels, shrink=0.7, aspect=30, label="layer"
    )
    assert isinstance(bar, ColorbarBase)
    ticks = np.unique(np.linspace(0, len(layers) - 1, min(8, len(layers))).round().astype(int))
    bar.set_ticks(list(ticks), labels=[str(layers[tick]) for tick in ticks])
    bar.ax.minorticks_off()
    bar.ax.tick_params(length=0)
    bar.outline.set_visible(False)


def _mappable(norm: Any, shades: Any) -> Any:
    from matplotlib.cm import ScalarMappable

    return ScalarMappable(norm=norm, cmap=shades)

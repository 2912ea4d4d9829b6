"""A ranking of layers for the terminal, and as a figure of its profiles over depth."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from deltalens.errors import InputError
from deltalens.experiment.commit import require_file_place, write_file
from deltalens.experiment.ranking import CRITERIA, LayerRanking
from deltalens.report.figures import COLOURS, FORMATS, MARKERS, PAGE_WIDTH, STYLES, paper_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES: Mapping[str, str] = {
    "skip": "skip", "global": "global", "local": "local", "block_influence": "Block Influence",
    "nonlinearity": "1 - linearity",
}  # fmt: skip
_SHORT = {"skip": "sk", "global": "gl", "local": "lo", "block_influence": "BI", "nonlinearity": "li"}


def ranking_table(ranking: LayerRanking) -> Group:
    """A ranking in 80 columns: layers by depth, each with its scores and its place in every removal order.

    Args:
        ranking: what `rank_layers` returned.

    Returns:
        Something `rich` prints.
    """
    facts, frame = ranking.manifest, ranking.to_frame()
    title = f"{Path(facts['model']['name']).name}: loss {facts['original_loss']:.3f} nats, and what is added to it"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(title), title_justify="left", width=80)
    table.add_column("layer", no_wrap=True)
    table.add_column("by\nskip", justify="right", no_wrap=True)
    for heading in (f"by global\n{facts['global_map']}", f"by local\n{facts['local_map']}"):
        # Long names of maps fold, so that no figure is cut.
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("Block\nInfl.", justify="right", no_wrap=True)
    table.add_column("line-\narity", justify="right", no_wrap=True)
    table.add_column("goes\n" + _places(_SHORT.values()), no_wrap=True)
    for _, row in frame.iterrows():
        layer = int(row["layer"])
        cells = [_increase(row, CRITERIA[name]) for name in ("skip", "global", "local")]
        scores = [_figure(row["block_influence"]), _figure(row["linearity"])]
        places = _places(_place(row[f"order_{name}"]) for name in CRITERIA)
        table.add_row(f"{layer}→{layer + 1}", *cells, *scores, places)
    return Group(table, Text(_footer(ranking)))


def _increase(row: pd.Series, column: str) -> str:
    value, low, high = (float(row[column + suffix]) for suffix in ("", "_lo", "_hi"))
    shown = _figure(value)
    return shown if math.isnan(low) else f"{shown} ±{_half(high - low)}"


def _half(width: float) -> str:
    return f"{width / 2:.3f}".removeprefix("0")


def _figure(value: object) -> str:
    number = math.nan if value is None else float(str(value))
    return "–" if math.isnan(number) else f"{number:.3f}"


def _place(value: object) -> str:
    return "–" if value is None or value != value else f"{float(str(value)):.0f}"


def _places(cells: Iterable[str]) -> str:
    return " ".join(f"{cell:>2}" for cell in cells)


def _footer(ranking: LayerRanking) -> str:
    facts = ranking.manifest
    lines = [
        f"Nats per token over {facts['tokens']:,} tokens, all replaced at once; ± half of the 95% interval over "
        f"{facts['clusters']} clusters. 'goes': place in the order of removal by skip, global map, local map, Block "
        "Influence and 1 - linearity, 1 first."
    ]
    lines += [f"Goes first by {_NAMES[name]}: {_first(ranking, name)}." for name in ("skip", "global", "local")]
    pairs = ranking.agreement()
    with_skip = pairs[pairs["a"] == "skip"] if len(pairs) else pairs
    shown = [f"{_NAMES[row['b']]} {_correlation(row)}" for _, row in with_skip.iterrows()]
    lines.append("Kendall's τ of the order by skip with: " + ", ".join(shown) + ".")
    return "\n".join(lines + [f"Warning: {warning}." for warning in facts["warnings"]])


def _first(ranking: LayerRanking, criterion: str) -> str:
    layers = ranking.removal_order(criterion)
    return ", ".join(f"{layer}→{layer + 1}" for layer in layers[:5]) + (", …" if len(layers) > 5 else "")


def _correlation(row: pd.Series) -> str:
    value, low, high = (
        float("nan") if row[k] is None else float(row[k]) for k in ("kendall", "kendall_lo", "kendall_hi")
    )
    if math.isnan(value):
        return "undefined"
    return f"{value:.2f}" if math.isnan(low) else f"{value:.2f} ({low:.2f} to {high:.2f})"


def ranking_figure(ranking: LayerRanking) -> "Figure":
    """Scores over depth, above, and each layer's place in the removal orders, below.

    Args:
        ranking: what `rank_layers` returned.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.figure import Figure

    frame, facts = ranking.to_frame(), ranking.manifest
    with paper_style():
        figure = Figure(figsize=(PAGE_WIDTH, 3.6), layout="constrained")
        increases, scores, orders, legend = figure.subplots(2, 2, sharex=True).flat
        labels = dict(_NAMES) | {key: f"{key} {facts[f'{key}_map']}" for key in ("global", "local")}
        for number, name in enumerate(CRITERIA):
            panel = scores if name in ("block_influence", "nonlinearity") else increases
            _draw(panel, frame, CRITERIA[name], number, labels[name])
            _draw(orders, frame, f"order_{name}", number, labels[name])
        increases.set_title("Loss added (nats per token)")
        _scale(increases, frame, ("skip", "global", "local"))
        scores.set_title("Scores without intervention")
        _scale(scores, frame, ("block_influence", "nonlinearity"))
        scores.xaxis.set_tick_params(labelbottom=True)
        scores.set_xlabel("layer")
        orders.set_title("Place in the order of removal, 1 first")
        orders.set_xlabel("layer")
        legend.axis("off")
        legend.legend(*orders.get_legend_handles_labels(), loc="upper left")
    return figure


def _scale(panel: "Axes", frame: pd.DataFrame, criteria: tuple[str, ...]) -> None:
    """A logarithmic axis where all that is drawn is above zero; else one that is linear around zero."""
    columns = [CRITERIA[name] + suffix for name in criteria for suffix in ("", "_lo")]
    values = frame[[column for column in columns if column in frame]].to_numpy(dtype=float)
    drawn = values[np.isfinite(values)]
    if len(drawn) and (drawn > 0).all():
        panel.set_yscale("log")
    elif len(drawn):
        panel.set_yscale("symlog", linthresh=0.01)
        panel.set_ylim(bottom=1.3 * drawn.min() - 0.001)


def _draw(panel: "Axes", frame: pd.DataFrame, column: str, number: int, label: str) -> None:
    layers = frame["layer"].to_numpy()

    def values(suffix: str) -> Any:
        name = column + suffix
        return frame[name].to_numpy(dtype=float) if name in frame else np.full(len(frame), np.nan)

    colour = COLOURS[number]
    if np.isfinite(values("_lo")).any():
        panel.fill_between(layers, values("_lo"), values("_hi"), color=colour, alpha=0.15, linewidth=0)
    style, marker = STYLES[number % len(STYLES)], MARKERS[number % len(MARKERS)]
    panel.plot(layers, values(""), color=colour, linestyle=style, marker=marker, markersize=2.8, label=label)


def write_ranking_figure(ranking: LayerRanking, path: str | Path) -> Path:
    """Write the figure as PDF, SVG or PNG, by the name's suffix.

    Args:
        ranking: what `rank_layers` returned.
        path: the file.

    Returns:
        The path.

    Raises:
        InputError: the suffix is none of these.
        StoreError: the file can't be written.
    """
    target = require_figure_path(path)
    with paper_style():
        figure = ranking_figure(ranking)
        write_file(target, lambda temporary: figure.savefig(temporary))
    return target


def require_figure_path(path: str | Path) -> Path:
    """The path of a figure that can be written, and whose suffix says how; others are refused."""
    target = Path(path)
    if target.suffix.removeprefix(".") not in FORMATS:
        raise InputError(f"the figure {target} has no suffix of {', '.join('.' + kind for kind in FORMATS)}; add one")
    return require_file_place(target)

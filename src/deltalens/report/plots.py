"""Figures for notebooks: plotly objects that hover, zoom and can be changed by their reader."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from deltalens.errors import InputError
from deltalens.report.figures import COLOURS, included_tokens
from deltalens.report.measures import by_name
from deltalens.report.payload import Axes, axes_of
from deltalens.report.points import at_point
from deltalens.report.protocol import RunLike, judged_protocol

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross")


def profile_plot(run: RunLike, measure: str = "cos_full_tokenwise") -> "Figure":
    """A summary measure against depth, protocols side by side, with intervals and nulls.

    Args:
        run: a finished run.
        measure: a column of its summary.

    Returns:
        A plotly figure.

    Raises:
        InputError: the summary has no such column.
    """
    from plotly.subplots import make_subplots

    run = at_point(run)
    summary = run.summary()
    if measure not in summary:
        raise InputError(f"no measure '{measure}' in the summary of {run.folder}; see run.summary().columns")
    axes, facts = axes_of(summary, run.manifest), by_name(measure)
    titles = [p.replace("_", " ") for p in axes.protocols]
    figure = make_subplots(rows=1, cols=len(axes.protocols), shared_yaxes=True, subplot_titles=titles)
    for column, protocol in enumerate(axes.protocols, start=1):
        for i in range(len(axes.series)):
            for trace in _profile_traces(summary, axes, measure, protocol, i):
                trace.showlegend = trace.showlegend and column == 1
                figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text="layer", row=1, col=column)
    unit = f" ({facts.unit})" if facts.unit else ""
    figure.update_yaxes(title_text=f"{facts.title}{unit}", type=facts.scale, row=1, col=1)
    return _dressed(figure, facts.definition)


def scatter_plot(run: RunLike, layer: int, map: str) -> "Figure":
    """Relative error against single-position KL at one layer, with the random control.

    Args:
        run: a finished run.
        layer: the transition, counted from 0.
        map: a canonical name such as `low_rank:8`.

    Returns:
        A plotly figure.

    Raises:
        InputError: the run has no such tokens, or no single-position KL.
    """
    from plotly import graph_objects

    run = at_point(run)
    axes = axes_of(run.summary(), run.manifest)
    tokens = included_tokens(run, judged_protocol(axes.protocols) or axes.protocols[0])
    own = tokens[(tokens["layer"] == layer) & (tokens["map"] == map)]
    if own.empty or "kl_single" not in own:
        known = ", ".join(sorted({m for m, _ in axes.series}))
        raise InputError(f"no single-position KL for map '{map}' at layer {layer}; layers {axes.layers}, maps {known}")
    figure = graph_objects.Figure()
    clouds = (("kl_single_random", "random control", "#9aa2ae"), ("kl_single", map, COLOURS[0]))
    for column, name, colour in clouds:
        if column in own and own[column].notna().any():
            figure.add_scattergl(
                x=own["relative_error"], y=own[column], mode="markers", name=name, text=own["token"].map(repr),
                marker={"size": 4, "color": colour, "opacity": 0.6},
            )  # fmt: skip
    figure.update_xaxes(title_text="relative error", type="log")
    figure.update_yaxes(title_text="KL (nats)", type="log")
    return _dressed(figure, f"{map}, layer {layer}→{layer + 1}")


def angle_plot(run: RunLike, map: str) -> "Figure":
    """Angles between residual and tokenwise update, a column of tokens per layer, as a heat map.

    Args:
        run: a finished run.
        map: a canonical name such as `low_rank:8`.

    Returns:
        A plotly figure.

    Raises:
        InputError: the run has no such map.
    """
    from plotly import graph_objects

    run = at_point(run)
    axes = axes_of(run.summary(), run.manifest)
    tokens = included_tokens(run, judged_protocol(axes.protocols) or axes.protocols[0])
    own = tokens[tokens["map"] == map]
    if own.empty:
        raise InputError(f"no map '{map}' in {run.folder}; maps: {', '.join(sorted({m for m, _ in axes.series}))}")
    grid = [_shares(own.loc[own["layer"] == layer, "angle_residual_tokenwise"]) for layer in axes.layers]
    centres = np.arange(2.5, 90, 5)
    heat = graph_objects.Heatmap(
        z=grid, x=centres, y=axes.layers, colorscale="Magma_r", colorbar={"title": "share per 5°"}
    )
    figure = graph_objects.Figure(heat)
    figure.add_vline(x=60, line={"dash": "dash", "width": 1})
    figure.update_xaxes(title_text="angle of the residual to the tokenwise update (°)")
    figure.update_yaxes(title_text="layer")
    return _dressed(figure, map)


def _shares(angles: pd.Series) -> Any:
    values = angles.to_numpy(dtype=float)
    counts, _ = np.histogram(values[np.isfinite(values)], bins=18, range=(0, 90))
    return counts / max(counts.sum(), 1)


def _profile_traces(summary: pd.DataFrame, axes: Axes, measure: str, protocol: str, index: int) -> list[Any]:
    from plotly.graph_objects import Scatter

    (name, fit), label, colour = axes.series[index], axes.labels[index], COLOURS[index % len(COLOURS)]
    key = (summary["protocol"] == protocol) & (summary["map"] == name) & (summary["fit"] == fit)
    rows = summary[key].sort_values("layer")

    def line(column: str, **more: Any) -> Any:
        return Scatter(x=rows["layer"], y=rows[column], legendgroup=label, **{"showlegend": False, **more})

    traces = []
    if f"{measure}_lo" in rows and rows[f"{measure}_lo"].notna().any():
        invisible = {"width": 0}
        traces.append(line(f"{measure}_lo", line=invisible, hoverinfo="skip"))
        traces.append(line(f"{measure}_hi", line=invisible, hoverinfo="skip", fill="tonexty", fillcolor=_faint(colour)))
    dash, symbol = DASHES[index % len(DASHES)], SYMBOLS[index % len(SYMBOLS)]
    style = {"line": {"color": colour, "dash": dash, "width": 2}, "marker": {"symbol": symbol, "size": 6}}
    traces.append(line(measure, name=label, mode="lines+markers", showlegend=True, **style))
    if f"{measure}_null" in rows and rows[f"{measure}_null"].notna().any():
        dotted = {"color": colour, "dash": "dot", "width": 1}
        traces.append(line(f"{measure}_null", name=f"{label}, null", mode="lines", line=dotted))
    return traces


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.14)"


def _dressed(figure: "Figure", title: str) -> "Figure":
    figure.update_layout(template="plotly_white", title=title, height=420, margin={"t": 70, "r": 20, "b": 50, "l": 60})
    return figure

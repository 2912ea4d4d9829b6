"""What a look inside the residual shows: a table for the terminal, a figure for papers."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deltalens.experiment.commit import write_file
from deltalens.report.figures import COLOURS, PAGE_WIDTH, STYLES, paper_style
from deltalens.report.frame import percent, study_table
from deltalens.report.logic import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Panel
    from matplotlib.figure import Figure

FORMATS = ("pdf", "png")


@runtime_checkable
class InsideLike(Protocol):
    """The tables of a look inside the residual."""

    @property
    def layers(self) -> pd.DataFrame:
        """One row per layer × map × fit × protocol."""

    @property
    def spectra(self) -> pd.DataFrame:
        """The share of each leading direction."""

    @property
    def local_maps(self) -> pd.DataFrame:
        """The layer's own local map beside the fitted one."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What couldn't be measured, and why."""


_COLUMNS = (
    ("layer", "left"), ("map", "left"), ("rank\n(update)", "right"), ("top 8\ndirect.", "right"),
    ("cos²\n/ null", "right"), ("mixer\nmlp", "right"), ("context\naverage", "right"),
    ("in V\nKL of it", "right"), ("KL\nnats", "right"),
)  # fmt: skip


def inside_tables(model: str, found: InsideLike) -> RenderableType:
    """The study for the terminal, at most 80 columns wide: one table per protocol, then the local maps, then notes."""
    parts: list[RenderableType] = [
        _layers_table(f"{model}, {protocol.replace('_', ' ')}: inside the residual", found, protocol)
        for protocol in dict.fromkeys(found.layers["protocol"])
    ]
    parts.append(Text(_LEGEND, style="dim"))
    if len(found.local_maps):
        of_protocol = found.local_maps.groupby("protocol", sort=False)
        parts += [Text(""), *(_local_table(str(name), rows) for name, rows in of_protocol)]
        parts.append(Text(_LOCAL_LEGEND, style="dim"))
    parts += [Text(f"note: {note}", style="yellow") for note in found.notes]
    return Group(*parts)


_LEGEND = (
    "rank: effective rank of the residuals' directions (of the updates'); top 8 dir.: share of the first eight; "
    "cos²/null: agreement of residuals across windows over that of permuted components; mixer, mlp: share of the "
    "residual's energy; context: ‖y - T_isolated(x)‖ / ‖update‖; average: the share of it that the map captures; in "
    "V: share of the residual in the tokenwise subspace; KL of it: share of the KL that restoring that part undoes."
)
_LOCAL_LEGEND = (
    "The layer's exact local map J - I at sampled tokens beside the fitted affine one (medians). found: 1 - "
    "‖(J - I - B)X‖²/‖(J - I)X‖² over the neighbours X; overlap: of leading output and input directions (chance in "
    "brackets); angle: the smallest; degree: of homogeneity; linearised: share of the affine residual that J explains."
)


def _layers_table(title: str, found: InsideLike, protocol: str) -> Table:
    table = study_table(title, _COLUMNS)
    rows = found.layers[found.layers["protocol"] == protocol]
    before = None
    for _, row in rows.iterrows():
        layer = int(row["layer"])
        cells = [
            "" if layer == before else f"{layer}→{layer + 1}",
            str(row["map"]),
            f"{_short(row['effective_rank'])}\n({_short(row['effective_rank_update'])})",
            percent(row["share_top_8"]),
            _ratio(row["shared_cosine_squared"], row["shared_cosine_squared_null"]),
            f"{percent(row['explained_mixer'])}\n{percent(row['explained_mlp'])}",
            f"{_two(row['context_size'])}\n{percent(row['context_average'])}",
            f"{percent(row['energy_in'])}\n{percent(row.get('recovered_in', math.nan))}",
            number(float(row.get("kl_single", math.nan))),
        ]
        table.add_row(*[Text(cell) for cell in cells])
        before = layer
    return table


_LOCAL_COLUMNS = (
    ("layer", "left"), ("found", "right"), ("gain\nlayer", "right"), ("gain\nfit", "right"),
    ("overlap\nout, in", "right"), ("angle\nout, in", "right"), ("degree", "right"), ("linear-\nised", "right"),
)  # fmt: skip


def _local_table(protocol: str, local_maps: pd.DataFrame) -> Table:
    table = study_table(f"The layer's own local map, {protocol.replace('_', ' ')}", _LOCAL_COLUMNS)
    for layer in dict.fromkeys(local_maps["layer"]):
        middle = local_maps[local_maps["layer"] == layer].median(numeric_only=True)
        table.add_row(
            f"{layer}→{layer + 1}", _two(middle["agreement"]), number(middle["gain_layer"]),
            number(middle["gain_fit"]),
            f"{_two(middle['overlap_output'])}, {_two(middle['overlap_input'])} ({_two(middle['overlap_chance'])})",
            f"{middle['angle_output']:.0f}°, {middle['angle_input']:.0f}°", _two(middle["homogeneity"]),
            percent(middle["linearised_share"]),
        )  # fmt: skip
    return table


def _two(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _short(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0f}"


def _ratio(value: float, level: float) -> str:
    return "–" if math.isnan(value) or not level > 0 else f"{value / level:.1f}"


def write_inside_figure(figure: "Figure", folder: Path) -> list[Path]:
    """Write the figure as ``inside.pdf`` and ``inside.png``; return their paths.

    Raises:
        StoreError: the folder can't be written.
    """
    paths = [folder / f"inside.{kind}" for kind in FORMATS]
    with paper_style():
        for path in paths:
            dated = {"CreationDate": None} if path.suffix == ".pdf" else None
            write_file(path, lambda temporary, m=dated: figure.savefig(temporary, metadata=m))  # type: ignore[misc]
    return paths


def inside_figure(model: str, found: InsideLike) -> "Figure":
    """Spectrum, effective rank, sub-layers, context, the subspace's part and local maps over depth."""
    from matplotlib.figure import Figure

    protocol = str(found.layers["protocol"].iloc[0])
    rows = found.layers[found.layers["protocol"] == protocol]
    maps = list(dict.fromkeys(rows["map"]))
    with paper_style():
        figure = Figure(figsize=(PAGE_WIDTH, 5.4), layout="constrained")
        figure.suptitle(f"Inside the residual: {model}, {protocol.replace('_', ' ')}", fontsize=9)
        panels = figure.subplots(2, 3)
        _draw_spectrum(panels[0][0], found.spectra, protocol, maps[0])
        _draw_ranks(panels[0][1], rows, maps)
        _draw_parts(panels[0][2], rows, maps[0])
        _draw_context(panels[1][0], rows, maps)
        _draw_subspace(panels[1][1], rows, maps)
        _draw_local(panels[1][2], found.local_maps, protocol)
        figure.draw_without_rendering()
    return figure


def _draw_spectrum(panel: "Panel", spectra: pd.DataFrame, protocol: str, name: str) -> None:
    from matplotlib import colormaps

    own = spectra[(spectra["protocol"] == protocol) & (spectra["map"] == name)]
    layers = sorted(set(own["layer"]))
    for index, layer in enumerate(layers):
        rows = own[own["layer"] == layer]
        shade = colormaps["viridis"](0.9 * index / max(1, len(layers) - 1))
        label = f"layer {layer}" if layer in (layers[0], layers[-1]) else None
        panel.plot(rows["rank"], rows["share"].cumsum(), color=shade, label=label)
    panel.set(title=f"Spectrum ({name})", xlabel="leading directions", ylabel="share of directions", ylim=(0, 1))
    _legend(panel)


def _draw_ranks(panel: "Panel", rows: pd.DataFrame, maps: list[str]) -> None:
    for index, name in enumerate(maps):
        own = rows[rows["map"] == name]
        _curve(panel, own["layer"], own["effective_rank"], index, f"residual, {name}")
    first = rows[rows["map"] == maps[0]]
    panel.plot(first["layer"], first["effective_rank_update"], color="#1b1b1b", linestyle=STYLES[1], label="update")
    panel.plot(first["layer"], first["effective_rank_random"], color="#8a909c", linestyle=STYLES[2], label="random")
    panel.set(title="Effective rank", xlabel="layer", ylim=(0, None))
    _legend(panel)


def _draw_parts(panel: "Panel", rows: pd.DataFrame, name: str) -> None:
    own = rows[rows["map"] == name]
    for index, part in enumerate(("mixer", "mlp")):
        _curve(panel, own["layer"], own[f"explained_{part}"], index, f"residual, {part}")
        _beside(panel, own["layer"], own[f"update_{part}"], index, f"update, {part}")
    panel.set(title=f"Sub-layers ({name})", xlabel="layer", ylabel="share of energy")
    _note_if_empty(panel, own["explained_mixer"])
    _legend(panel)


def _draw_context(panel: "Panel", rows: pd.DataFrame, maps: list[str]) -> None:
    first = rows[rows["map"] == maps[0]]
    panel.plot(first["layer"], first["context_size"], color="#1b1b1b", linestyle=STYLES[1], label="size / update")
    for index, name in enumerate(maps):
        own = rows[rows["map"] == name]
        _curve(panel, own["layer"], own["context_average"], index, f"average, {name}")
    low = float(np.nanmin([0.0, *rows["context_average"]]))
    panel.set(title="Context's effect", xlabel="layer", ylabel="share", ylim=(max(-1.0, low), None))
    _legend(panel)


def _draw_subspace(panel: "Panel", rows: pd.DataFrame, maps: list[str]) -> None:
    for index, name in enumerate(maps):
        own = rows[rows["map"] == name]
        _beside(panel, own["layer"], own["energy_in"], index, f"energy, {name}")
        if "recovered_in" in own:
            _curve(panel, own["layer"], own["recovered_in"], index, f"KL, {name}")
    panel.set(title="Tokenwise subspace", xlabel="layer", ylabel="share of the residual")
    _legend(panel)


def _draw_local(panel: "Panel", local_maps: pd.DataFrame, protocol: str) -> None:
    panel.set(title="Layer's own local map", xlabel="layer", ylabel="angle to the fit (°)", ylim=(0, 90))
    if not len(local_maps):
        _note_if_empty(panel, pd.Series(dtype=float))
        return
    own = local_maps[local_maps["protocol"] == protocol].groupby("layer").median(numeric_only=True)
    for index, side in enumerate(("output", "input")):
        _curve(panel, own.index, own[f"angle_{side}"], index, f"{side} directions")
    _legend(panel)


def _curve(panel: "Panel", layers: "pd.Index | pd.Series", values: pd.Series, index: int, label: str) -> None:
    panel.plot(layers, values, color=COLOURS[index % len(COLOURS)], label=label, marker="o", ms=3)


def _beside(panel: "Panel", layers: pd.Series, values: pd.Series, index: int, label: str) -> None:
    """What a curve of the same colour is compared with."""
    panel.plot(layers, values, color=COLOURS[index % len(COLOURS)], linestyle=STYLES[1], label=label)


def _legend(panel: "Panel") -> None:
    """Below the panel, where it hides no line."""
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2, columnspacing=1.0, handlelength=1.6)


def _note_if_empty(panel: "Panel", values: pd.Series) -> None:
    if not np.isfinite(values.to_numpy(dtype=float)).any():
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", va="center", color="#5d6470")

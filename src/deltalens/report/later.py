"""What replaced states do to later tokens, as tables for the terminal."""

import math
from typing import Protocol, runtime_checkable

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deltalens.report.frame import percent, study_table
from deltalens.report.logic import number


@runtime_checkable
class LaterLike(Protocol):
    """The tables of the study."""

    @property
    def layers(self) -> pd.DataFrame:
        """One row per layer × map × fit × protocol."""

    @property
    def distances(self) -> pd.DataFrame:
        """Mean KL by distance."""


_COLUMNS = (
    ("layer", "left"), ("map", "left"), ("own KL\n(95%)", "right"), ("later KL, sum\n(95%)", "right"),
    ("later\nshare", "right"), ("random\nown", "right"), ("random\nlater", "right"),
)  # fmt: skip
_LEGEND = (
    "Mean KL in nats over the sampled positions when that position's state alone becomes T(x): at the position itself, "
    "summed over the later tokens of its window, and the later part of both. random: y - ‖r‖u instead."
)
_MOST_RANGES = 8


def later_tables(model: str, found: LaterLike) -> RenderableType:
    """The study for the terminal, at most 80 columns wide: effects per layer, then mean KL by distance."""
    parts: list[RenderableType] = []
    for protocol in dict.fromkeys(found.layers["protocol"]):
        name = str(protocol).replace("_", " ")
        layers = found.layers[found.layers["protocol"] == protocol]
        count, after = int(layers["positions"].iloc[0]), layers["later_tokens"].iloc[0]
        title = f"{model}, {name}: effects on later tokens ({count} positions, {after:.0f} later tokens on average)"
        parts.append(_layersstudy_table(title, layers))
        parts.append(_distances_table(found.distances[found.distances["protocol"] == protocol]))
    floor = float(found.layers["noise_floor"].iloc[0])
    return Group(*parts, Text(f"{_LEGEND} Noise floor: {number(floor)} nats per token.", style="dim"))


def _layersstudy_table(title: str, rows: pd.DataFrame) -> Table:
    table = study_table(title, _COLUMNS)
    for _, row in rows.iterrows():
        table.add_row(
            f"{int(row['layer'])}→{int(row['layer']) + 1}", Text(str(row["map"])), _interval(row, "kl_own"),
            _interval(row, "kl_later"), percent(row["later_share"]), f"{row['kl_own_random']:.2g}",
            f"{row['kl_later_random']:.2g}",
        )  # fmt: skip
    return table


def _distances_table(rows: pd.DataFrame) -> Table:
    ranges = sorted(set(zip(rows["distance_from"], rows["distance_to"], strict=True)))[:_MOST_RANGES]
    headings = [(f"{a}" if a == b else f"{a}-{b}", "right") for a, b in ranges]
    title = "Mean KL of one later token by its distance, thousandths of a nat"
    table = study_table(title, (("layer", "left"), ("map", "left"), *headings))
    for layer, name in dict.fromkeys(zip(rows["layer"].astype(int), rows["map"], strict=True)):
        own = rows[(rows["layer"] == layer) & (rows["map"] == name)].set_index("distance_from")["kl"]
        table.add_row(f"{layer}→{layer + 1}", Text(str(name)), *(_thousandths(float(own[a])) for a, _ in ranges))
    return table


def _interval(row: pd.Series, name: str) -> str:
    low, high = float(row[f"{name}_lo"]), float(row[f"{name}_hi"])
    value = f"{row[name]:.2g}"
    return value if math.isnan(low) else f"{value}\n{low:.2g}–{high:.2g}"


def _thousandths(value: float) -> str:
    if math.isnan(value):
        return "–"
    if value >= 0.0995:  # no exponent, which takes more room than it says
        return f"{1000 * value:.0f}"
    return f"{1000 * value:.2g}" if value == 0 or value >= 1e-6 else "<.001"

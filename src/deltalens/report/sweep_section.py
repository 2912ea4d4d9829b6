"""What a page shows of a whole sweep: its figures as images, and its knees as a table."""

import base64
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltalens.experiment.sweep import SWEPT_FIELDS
from deltalens.report.figures import paper_style
from deltalens.report.logic import number
from deltalens.report.protocol import RunLike, judged_protocol, sort_protocols
from deltalens.report.sweep import is_sweep, knees, sweep_table
from deltalens.report.sweep_figures import expressivity_figure, regime_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SweepSection:
    """Images as data, and the rows of the table of knees with its headings."""

    protocol: str
    images: tuple[tuple[str, str], ...]
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sweep_section(run: RunLike) -> SweepSection | None:
    """The section on a run's sweep, under the protocol that verdicts rest on; None where no curve has enough points."""
    table = sweep_table(run)
    protocols = sort_protocols(set(table["protocol"].astype(str)))
    protocol = judged_protocol(protocols) or protocols[0]
    rows = table[table["protocol"] == protocol]
    if not is_sweep(rows):
        return None
    with paper_style():
        images = (
            ("Error, alignment and correlation against effective degrees of freedom", _data(expressivity_figure(rows))),
            ("Alignment and correlation by error regime", _data(regime_figure(rows))),
        )
    found = knees(table, protocol).drop(columns="fit")
    shown = tuple(tuple(_cell(name, value) for name, value in row.items()) for _, row in found.iterrows())
    return SweepSection(protocol.replace("_", " "), images, tuple(str(n).replace("_", " ") for n in found), shown)


def _data(figure: "Figure") -> str:
    target = io.BytesIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(target.getvalue()).decode("ascii")


def _cell(name: object, value: object) -> str:
    if name == "layer":
        return f"{value}→{int(str(value)) + 1}"
    if name in SWEPT_FIELDS:
        return str(value)
    if isinstance(value, float):
        return number(value) if math.isfinite(value) else "–"
    return str(value)

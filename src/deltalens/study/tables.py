"""What the terminal shows of a study, in 80 columns: its plan, its verdicts, its spread and its failures."""

from collections.abc import Sequence

import pandas as pd
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from deltalens.report.claims import TITLES
from deltalens.report.logic import number
from deltalens.report.tables import MARKS, STYLES
from deltalens.study.forecast import Forecast
from deltalens.study.record import Outcome
from deltalens.study.verdicts import TOGETHER, Verdicts

WIDTH = 80


def plan_table(forecasts: Sequence[Forecast]) -> Table:
    """The runs that a study is about to make."""
    table = _table("Plan")
    for heading, justify in (
        ("run", "left"), ("model", "left"), ("weights from", "left"), ("MB", "right"), ("layers", "right"),
        ("units", "right"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in forecasts:
        model = row.model if row.revision is None else f"{row.model} @ {row.revision}"
        source = row.source + ("" if row.here else ", to fetch" if row.source != "nowhere" else "")
        counts = map(_count, (row.megabytes, row.layers, row.units))
        table.add_row(*map(Text, (row.name, model, source, *counts)))
    return table


def verdict_table(verdicts: Verdicts) -> Group:
    """A row per run and a column per claim, with the claims named below."""
    table = _table("Verdicts by claim")
    table.add_column("run", overflow="fold")
    for claim in TITLES:
        table.add_column(str(claim), justify="center", no_wrap=True)
    matrix = verdicts.matrix()
    shown = [name for name in matrix if name != TOGETHER or len(verdicts.names) > 1]
    for name in shown:
        table.add_row(Text(str(name)), *(_mark(str(verdict)) for verdict in matrix[name]))
    key = Text("  ".join(f"{sign} {verdict}" for verdict, sign in MARKS.items()), style="dim")
    claims = [Text(f"{claim}  {title}", style="dim") for claim, title in TITLES.items()]
    return Group(table, key, *claims)


def spread_table(figures: pd.DataFrame) -> Table:
    """Smallest, median and largest of each key figure of each map's median layer."""
    table = _table("Key figures of the median layer: smallest, median and largest over seeds")
    for heading, justify in (
        ("model", "left"), ("map", "left"), ("figure", "left"), ("smallest", "right"), ("median", "right"),
        ("largest", "right"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    before: tuple[str, str] | None = None
    for row in figures.sort_values(["group", "map"], kind="stable").to_dict("records"):
        key = (str(row["group"]), str(row["map"]))
        shown = ("", "") if key == before else key
        ends = (number(float(row[end])) for end in ("min", "median", "max"))
        table.add_row(*map(Text, (*shown, str(row["measure"]), *ends)))
        before = key
    return table


def failure_lines(failures: Sequence[Outcome]) -> Group:
    """Each run that failed with its reason."""
    lines = [Text(f"✕ {outcome.member.name}: {outcome.reason}", style="red") for outcome in failures]
    return Group(*lines)


def _table(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(title), title_justify="left", width=WIDTH)


def _mark(verdict: str) -> Text:
    return Text(MARKS[verdict], style=STYLES[verdict]) if verdict else Text("")


def _count(value: float | int | None) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"

"""The frame and the figures that tables of studies share in the terminal."""

import math

from rich import box
from rich.table import Table
from rich.text import Text


def study_table(title: str, columns: tuple[tuple[str, str], ...]) -> Table:
    """An empty table of at most 80 columns, from headings and how each column is justified."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(title), title_justify="left", width=80)
    for heading, justify in columns:
        # Long names of maps fold, so that no figure is cut.
        table.add_column(heading, justify=justify, no_wrap=heading != "map", overflow="fold")  # type: ignore[arg-type]
    return table


def percent(value: float) -> str:
    """A share as a whole percentage; a dash where it is undefined."""
    return "–" if math.isnan(value) else f"{value:.0%}"

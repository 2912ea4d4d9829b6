"""Replacements for the terminal: the model's loss as it is, without a layer, and with each map in its place."""

import math
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from deltalens.experiment.replacing import Replacements


def replacements_table(found: Replacements) -> Group:
    """Losses in nats in 80 columns, layer by layer, with what each replacement adds to the original loss.

    Args:
        found: what `fit_replacements` returned.

    Returns:
        Something `rich` prints.
    """
    facts, frame = found.manifest, found.to_frame()
    title = f"{Path(facts['model']['name']).name}: the loss with each file in place of its layer, at every token"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(title), title_justify="left", width=80)
    for heading, justify in (("layer", "left"), ("map", "left"), ("original", "right"), ("skipped", "right"),
                             ("replaced", "right"), ("added", "right"), ("of skip", "right")):  # fmt: skip
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    before = None
    for _, row in frame.iterrows():
        layer, first = int(row["layer"]), row["layer"] != before
        before = row["layer"]
        skip = [f"{facts['original_loss']:.3f}", f"{row['skip_loss']:.3f}"] if first else ["", ""]
        table.add_row(
            f"{layer}→{layer + 1}" if first else "", Text(str(row["map"])), *skip, f"{row['replaced_loss']:.3f}",
            _added(row["replaced_increase"], row["replaced_increase_lo"], row["replaced_increase_hi"]),
            _share(row["replaced_increase"], row["skip_increase"]),
        )  # fmt: skip
    tokens, clusters = facts["tokens"], facts["clusters"]
    note = (
        f"Nats per token over {tokens:,} tokens, measured through the saved files; ± half of the 95% interval over "
        f"{clusters} clusters."
    )
    return Group(table, Text("\n".join([note, *(f"Warning: {warning}." for warning in facts["warnings"])])))


def _added(value: float, low: float | None, high: float | None) -> str:
    if low is None or high is None or math.isnan(low):
        return f"{value:+.3f}"
    return f"{value:+.3f} ±{(high - low) / 2:.3f}".replace("±0", "±")


def _share(replaced: float, skipped: float) -> str:
    return f"{replaced / skipped:.0%}" if skipped > 0 else "–"

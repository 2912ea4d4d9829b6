"""What the terminal shows: one row per layer and map in 80 columns, and the claims with their evidence."""

import math
from collections.abc import Sequence

import pandas as pd
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from deltalens.report.claims import SHARED_RULE, Claim
from deltalens.report.logic import number
from deltalens.report.payload import axes_of
from deltalens.report.points import at_point, point_name
from deltalens.report.protocol import RunLike, judged_protocol, run_name

STYLES = {"supported": "green", "partly": "yellow", "not supported": "red", "not measured": "dim"}
MARKS = {"supported": "✓", "partly": "◐", "not supported": "✕", "not measured": "–"}
_HEADINGS = (
    ("layer", "left"), ("map", "left"), ("error", "right"), ("cos\nfull", "right"), ("cos\nres.", "right"),
    ("over\n60°", "right"), ("proj\nfull", "right"), ("proj\nres.", "right"), ("KL\nnats", "right"),
    ("Spearman\n(95%)", "right"),
)  # fmt: skip


def summary_table(run: RunLike) -> Table:
    """The run's medians as a table for the terminal, at most 80 columns wide.

    Args:
        run: a finished run.

    Returns:
        A table for `rich`, under the protocol that verdicts rest on.
    """
    run = at_point(run)
    summary = run.summary()
    axes = axes_of(summary, run.manifest)
    protocol = judged_protocol(axes.protocols) or axes.protocols[0]
    point = point_name(run.manifest.get("point") or {})
    title = f"{run_name(run)}, {protocol.replace('_', ' ')}{point and f', {point}'}: medians over tokens"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(title), title_justify="left", width=80)
    for heading, justify in _HEADINGS:
        table.add_column(heading, justify=justify, no_wrap=heading != "map", overflow="fold")  # type: ignore[arg-type]
    rows = summary[summary["protocol"] == protocol]
    keyed = {(int(r["layer"]), str(r["map"]), str(r["fit"])): r for _, r in rows.iterrows()}
    for layer in axes.layers:
        cells = [
            _cells(keyed[(layer, *pair)], label)
            for pair, label in zip(axes.series, axes.labels, strict=True)
            if (layer, *pair) in keyed
        ]
        for i, row in enumerate(cells):
            table.add_row(f"{layer}→{layer + 1}" if i == 0 else "", *row)
    return table


def _cells(row: pd.Series, label: str) -> list[Text]:
    def two(name: str) -> str:
        value = _value(row, name)
        return "–" if math.isnan(value) else f"{value:.2f}"

    share = _value(row, "share_residual_over_60")
    kl = "kl_single" if not math.isnan(_value(row, "kl_single")) else "kl_all"
    cells = [
        label, number(_value(row, "relative_error")), two("cos_full_tokenwise"), two("cos_residual_tokenwise"),
        "–" if math.isnan(share) else f"{share:.0%}", two("proj_full"), two("proj_residual"), number(_value(row, kl)),
        _spearman(row),
    ]  # fmt: skip
    return [Text(cell) for cell in cells]


def _value(row: pd.Series, name: str) -> float:
    return float(row[name]) if name in row and row[name] is not None else math.nan


def _spearman(row: pd.Series) -> str:
    value, low, high = (_value(row, "spearman" + suffix) for suffix in ("", "_lo", "_hi"))
    if math.isnan(value):
        return "–"
    return f"{value:.2f}" if math.isnan(low) else f"{value:.2f} {_short(low)}–{_short(high)}"


def _short(value: float) -> str:
    """Two decimals without the leading zero."""
    return f"{value:.2f}".replace("0.", ".", 1)


def claims_table(claims: Sequence[Claim]) -> Group:
    """The claims for the terminal: verdict, claim, evidence, and the rules below.

    Args:
        claims: what `claims_for` returned.

    Returns:
        Something `rich` prints.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_lines=False)
    table.add_column("", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("claim and evidence")
    for claim in claims:
        style = STYLES[claim.verdict]
        body = Text.assemble((claim.title, "bold"), "\n", claim.evidence, "\n", (f"Rule: {claim.rule}", "dim"), "\n")
        table.add_row(str(claim.id), Text(f"{MARKS[claim.verdict]} {claim.verdict}", style=style), body)
    return Group(table, Text(SHARED_RULE, style="dim"))

"""What `deltalens models` lists: built-in and named models, and every architecture row with what is verified of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltalens.models.architectures import ARCHITECTURES
from deltalens.models.builtin_models import builtin_models
from deltalens.models.named import NAMED

_VERIFIED = Path(__file__).parent / "verified.json"


@dataclass(frozen=True)
class Verification:
    """What the test matrix found about one family on one version of transformers.

    Attributes:
        family: Title, such as `Gemma 2`.
        model_type: Of its row.
        transformers: Version.
        holds: Whether everything that a run needs holds.
        scheme: How single positions are patched.
        parity: Of that scheme with patch-and-rerun, in float32.
        kinds: Token mixing of the blocks, in short.
        advice: Checks that a run doesn't need and that don't hold.
    """

    family: str
    model_type: str
    transformers: str
    holds: bool
    scheme: str
    parity: float | None
    kinds: str
    advice: tuple[str, ...]


def verifications() -> tuple[Verification, ...]:
    """Return what the test matrix found, by family and version; written by `tests/models/coverage_table.py`."""
    found: Mapping[str, list[dict[str, Any]]] = json.loads(_VERIFIED.read_text(encoding="utf8"))
    return tuple(
        Verification(**{**row, "transformers": version, "advice": tuple(row["advice"])})
        for version, rows in found.items()
        for row in rows
    )


def models_table() -> Any:
    """Return everything that can be named, as tables for the terminal (a rich renderable)."""
    from rich.console import Group

    refused = [f"{row.model_type} is refused: {row.refused}." for row in ARCHITECTURES.values() if row.refused]
    rest = "Any other type is found by its forward pass, and accepted if the checks hold: deltalens doctor MODEL"
    return Group(_ready_models(), "", _architectures(), "", *refused, "", rest)


def _ready_models() -> Any:
    from rich.table import Table

    table = Table("model", "what it is", title="Models that need no Hub", title_justify="left", box=None)
    for name, card in builtin_models().items():
        table.add_row(name, f"built in: {_card_line(card)}")
    for named in NAMED.values():
        table.add_row(named.name, f"{named.description}; {named.megabytes} MB, fetched once")
    return table


def _card_line(card: Mapping[str, Any]) -> str:
    if not card:
        return "no card"
    return f"{card['parameters']:,} parameters, {card['cross_entropy']:.2f} nats per token on the built-in text"


def _architectures() -> Any:
    from rich.table import Table

    table = Table("model type", "blocks", "single positions", "verified on transformers", box=None)
    table.title, table.title_justify = "Architectures", "left"
    found = verifications()
    for row in (row for row in ARCHITECTURES.values() if not row.refused):
        mine = [v for v in found if v.model_type == row.model_type]
        versions = ", ".join(dict.fromkeys(v.transformers for v in mine if v.holds)) or "not yet"
        schemes = ", ".join(dict.fromkeys(v.scheme for v in mine))
        table.add_row(row.model_type, row.blocks, schemes or "-", versions)
    return table

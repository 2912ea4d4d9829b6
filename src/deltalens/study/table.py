"""Tables of a study beside a run: written whole or not at all, and shown as plain records."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from deltalens.errors import StoreError
from deltalens.experiment.commit import write_file


def check_writable(folder: Path | None) -> None:
    """Refuse, before long work, a folder that tables can't go into."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{folder} can't be used as a folder: {reason}; choose another --out") from None
    if not os.access(folder, os.W_OK):
        raise StoreError(f"{folder} takes no files; choose another --out")


def write_tables(tables: Mapping[str, pd.DataFrame], folder: Path) -> list[Path]:
    """Write each table as ``NAME.parquet``; return the paths."""
    paths = []
    for name, table in tables.items():
        path = folder / f"{name}.parquet"
        write_file(path, lambda temporary, t=table: t.to_parquet(temporary, index=False))  # type: ignore[misc]
        paths.append(path)
    return paths


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A table's rows as JSON holds them, NaN as null."""
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records"))
    return rows

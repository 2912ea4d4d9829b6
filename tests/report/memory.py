"""Runs that exist in memory only: summaries written by hand for the claims, and large token tables for the budget."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from synthetic import Recipe, layout, manifest, unit_summary, unit_tokens


@dataclass(frozen=True)
class MemoryRun:
    """What the report needs of a run, without a folder behind it."""

    table: pd.DataFrame
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    manifest: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path("runs/memory")

    def summary(self) -> pd.DataFrame:
        return self.table

    def tokens(
        self, layer: int | None = None, map: str | None = None, fit: str | None = None, protocol: str | None = None
    ) -> pd.DataFrame:
        return self.rows if protocol is None else self.rows[self.rows["protocol"] == protocol]

    def neighbors(self) -> pd.DataFrame:
        return pd.DataFrame()

    def pool(self) -> pd.DataFrame:
        return pd.DataFrame()


def large_run(layers: int, windows: int, window: int, maps: tuple[str, ...]) -> MemoryRun:
    """A run of this size whose units are copies of one unit, so that it is made in a moment."""
    recipe = Recipe(layers=tuple(range(layers)), n_layers=layers, windows=windows, window=window, maps=maps)
    rng = np.random.default_rng(0)
    base = layout(recipe, windows, rng)
    hard = rng.standard_normal(len(base))
    unit = unit_tokens(recipe, base, (layers // 2, maps[0], "local", "held_out"), hard)
    row = unit_summary(unit, recipe)
    keys = [(layer, m, "local", p) for layer in recipe.layers for m in maps for p in recipe.protocols]
    names = ["layer", "map", "fit", "protocol"]
    tokens = pd.concat([unit.assign(**dict(zip(names, key, strict=True))) for key in keys], ignore_index=True)
    table = pd.DataFrame([row | dict(zip(names, key, strict=True)) for key in keys])
    return MemoryRun(table, tokens, manifest(recipe, base))


def summary_rows(protocol: str, layers: int, map: str = "low_rank:8", **columns: object) -> pd.DataFrame:
    """Summary rows of one map: a scalar holds at every layer, a list goes layer by layer."""
    defaults: dict[str, object] = {"relative_update_error": 0.3}
    keys = {"layer": range(layers), "map": map, "fit": "local", "protocol": protocol}
    return pd.DataFrame(keys | defaults | columns)


def around(name: str, value: object, half: float = 0.01) -> dict[str, object]:
    """A figure with an interval around it."""
    middle = np.asarray(value, dtype=float)
    return {name: middle, f"{name}_lo": middle - half, f"{name}_hi": middle + half}


def run_of(*tables: pd.DataFrame, **model: object) -> MemoryRun:
    """A run that holds these summary rows."""
    facts = {"name": "memory", "parameters": 1000, "block_kinds": ["attention"]} | model
    return MemoryRun(pd.concat(tables, ignore_index=True), manifest={"model": facts})

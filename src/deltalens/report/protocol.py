"""What the report needs of a run: a folder, a manifest and two tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pandas as pd

PROTOCOL_ORDER = ("held_out", "leave_one_out", "in_sample")


@runtime_checkable
class RunLike(Protocol):
    """A finished run folder, opened for reading."""

    @property
    def folder(self) -> Path:
        """Where the run lies."""

    @property
    def manifest(self) -> dict[str, Any]:
        """The content of run.json."""

    def summary(self) -> pd.DataFrame:
        """One row per layer, map, fit and protocol."""

    def tokens(
        self,
        layer: int | None = None,
        map: str | None = None,
        fit: str | None = None,
        protocol: str | None = None,
        **point: object,
    ) -> pd.DataFrame:
        """One row per token and key, filtered by what is given; ``point`` holds fields that the run sweeps."""

    def neighbors(self) -> pd.DataFrame:
        """The nearest pool tokens of each token, per layer and protocol; empty if the run kept none."""

    def pool(self) -> pd.DataFrame:
        """The pool's tokens with their text; empty if the run kept none."""


def model_facts(run: RunLike) -> dict[str, Any]:
    """The manifest's model identity, empty if the manifest has none."""
    facts: dict[str, Any] = run.manifest.get("model") or {}
    return facts


def run_name(run: RunLike) -> str:
    """The name by which a reader knows the run: its model's name, else its folder's."""
    return str(model_facts(run).get("name") or run.folder.name)


def distinct_names(runs: Sequence[RunLike]) -> list[str]:
    """A name per run: the model's, with the folder's where models repeat, numbered if even that repeats."""
    models = [run_name(run) for run in runs]
    names = [
        model if models.count(model) == 1 else f"{model} ({run.folder.name})"
        for model, run in zip(models, runs, strict=True)
    ]
    return [name if names.count(name) == 1 else f"{name} #{i + 1}" for i, name in enumerate(names)]


def sort_protocols(present: set[str]) -> list[str]:
    """Protocols in the order in which they should be trusted."""
    known = [p for p in PROTOCOL_ORDER if p in present]
    return known + sorted(present - set(known))


def judged_protocol(protocols: list[str]) -> str | None:
    """The protocol that verdicts rest on: held out, else the anchor left out, else none."""
    return next((p for p in ("held_out", "leave_one_out") if p in protocols), None)


def series_order(summary: pd.DataFrame, manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """(map, fit) pairs of a run in the order of its spec, the rest in order of appearance."""
    present = list(dict.fromkeys(zip(summary["map"].astype(str), summary["fit"].astype(str), strict=True)))
    wanted = [str(m) for m in (manifest.get("spec") or {}).get("maps") or []]
    rank = {name: i for i, name in enumerate(wanted)}
    return sorted(present, key=lambda pair: rank.get(pair[0], len(rank)))


def series_labels(series: list[tuple[str, str]]) -> list[str]:
    """Names of the series for a reader: the map, with its fit only where several fits occur."""
    several = len({fit for _, fit in series}) > 1
    return [f"{name} · {fit}" if several else name for name, fit in series]

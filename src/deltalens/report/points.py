"""One point of a sweep as a run of its own, so that no page, claim or comparison ever mixes points."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from deltalens.errors import InputError
from deltalens.experiment.sweep import first_point, swept_fields, values_of
from deltalens.report.protocol import RunLike


@dataclass(frozen=True)
class PointRun:
    """A run's rows at one point of its sweep, without the columns that say so."""

    run: RunLike
    point: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Where the run lies."""
        return self.run.folder

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The run's manifest with the point's values in its spec, the point itself, and a warning."""
        whole = self.run.manifest
        note = f"{sweep_line(whole)} Here {point_name(self.point)} is shown, but for the section on the sweep."
        return whole | {
            "spec": whole["spec"] | dict(self.point),
            "point": dict(self.point),
            "warnings": [*(whole.get("warnings") or []), note],
        }

    def summary(self) -> pd.DataFrame:
        """One row per layer, map, fit and protocol."""
        return self._rows(self.run.summary())

    def tokens(
        self,
        layer: int | None = None,
        map: str | None = None,
        fit: str | None = None,
        protocol: str | None = None,
        **point: object,
    ) -> pd.DataFrame:
        """One row per token and key."""
        return self._rows(self.run.tokens(layer, map, fit, protocol, **{**point, **self.point}))

    def neighbors(self) -> pd.DataFrame:
        """The nearest pool tokens of each token."""
        return self._rows(self.run.neighbors())

    def pool(self) -> pd.DataFrame:
        """The pool's tokens; a swept pool's largest."""
        return self.run.pool()

    def _rows(self, table: pd.DataFrame) -> pd.DataFrame:
        here = [name for name in self.point if name in table]
        for name in here:
            table = table[table[name] == self.point[name]]
        return table.drop(columns=here).reset_index(drop=True)


def at_point(run: RunLike, point: Mapping[str, Any] | None = None) -> RunLike:
    """A run at one point of its sweep, by default the first; the run itself where it sweeps nothing.

    Args:
        run: a finished run.
        point: values of swept fields, or their text; what isn't named is at its first value.

    Raises:
        InputError: the run has no such point.
    """
    spec = run.manifest.get("spec") or {}
    chosen = first_point(spec)
    for name, value in (point or {}).items():
        if name not in chosen:
            raise InputError(f"{run.folder} doesn't sweep {name!r}; it sweeps {', '.join(chosen) or 'nothing'}")
        known = values_of(spec[name])
        same = [each for each in known if _same(each, value)]
        if not same:
            raise InputError(f"{run.folder} has no point with {name} {value}; it has {', '.join(map(str, known))}")
        chosen[name] = same[0]
    return PointRun(run, chosen) if chosen else run


def _same(value: Any, asked: Any) -> bool:
    """Whether a value is the one asked for, which may be its text."""
    try:
        return bool(type(value)(asked) == value)
    except (TypeError, ValueError):
        return False


def parse_point(text: str | None) -> dict[str, str]:
    """A point from the command line, ``neighbors=16,ridge=0.1``.

    Raises:
        InputError: it isn't written like that.
    """
    pairs = [part.partition("=") for part in (text or "").split(",") if part.strip()]
    for name, sign, value in pairs:
        if not (name.strip() and sign and value.strip()):
            raise InputError(f"the point {text!r} can't be read; write it as neighbors=16,ridge=0.1")
    return {name.strip(): value.strip() for name, _, value in pairs}


def point_name(point: Mapping[str, Any]) -> str:
    """A point for a reader: ``neighbors 16, ridge 0.1``."""
    return ", ".join(f"{name} {value}" for name, value in point.items())


def sweep_line(manifest: Mapping[str, Any]) -> str:
    """What a run sweeps, in a sentence."""
    spec = manifest["spec"]
    fields = swept_fields(spec)
    count = 1
    for name in fields:
        count *= len(values_of(spec[name]))
    return f"The run sweeps {' and '.join(fields)}, {count} points."

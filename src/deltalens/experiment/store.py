"""The run folder: its sole reader and writer. Nothing else in the package knows where a file of a run lies."""

import json
import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from deltalens.errors import InputError, ModelError, StoreError
from deltalens.experiment.commit import (
    MARKER,
    commit_folder,
    damage,
    file_identity,
    read_json,
    remove_temporaries,
    write_file,
    write_json,
)
from deltalens.experiment.sweep import swept_fields

SCHEMA_VERSION = 1
KEY = ("layer", "map", "fit", "protocol")
COMPLETE = "complete"
RUNNING = "running"

_MANIFEST, _LOCK = "run.json", ".lock"
_TABLES = {name: f"{name}.parquet" for name in ("tokens", "summary", "neighbors", "pool")}


@dataclass(frozen=True, order=True)
class UnitKey:
    """What a unit of work measured: one layer, one map, one way to fit, one protocol, and a sweep's varied fields."""

    layer: int
    map: str
    fit: str
    protocol: str
    point: tuple[tuple[str, Any], ...] = ()

    @property
    def folder_name(self) -> str:
        """Such as ``03.low_rank-8.local.held_out``, followed in a sweep by its point: ``.neighbors-16.ridge-0.1``."""
        swept = "".join(f".{name}-{value}" for name, value in self.point)
        return f"{self.layer:02d}.{self.map.replace(':', '-')}.{self.fit}.{self.protocol}{swept}"

    @property
    def columns(self) -> dict[str, Any]:
        """The key as columns of a table."""
        own = {"layer": self.layer, "map": self.map, "fit": self.fit, "protocol": self.protocol}
        return own | dict(self.point)


def by_layer(keys: Iterable[UnitKey]) -> list[list[UnitKey]]:
    """Units that share a layer, in their order."""
    layers: dict[int, list[UnitKey]] = {}
    for key in keys:
        layers.setdefault(key.layer, []).append(key)
    return [layers[layer] for layer in sorted(layers)]


class RunFolder:
    """Writes a run: units one by one, the manifest around them, the merged tables last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def states(self) -> Path:
        """Where captured states lie while a run needs them."""
        return self.folder / "states"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one writer; the lock of a dead process does not count."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / _LOCK)
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreError(f"another process is writing {self.folder}; wait for it or choose another --out") from None
        except OSError as error:
            raise StoreError(f"{self.folder} can't be written: {error.strerror}; choose another --out") from None
        try:
            remove_temporaries(self.folder)
            yield
        finally:
            remove_temporaries(self.folder)  # of workers that died
            lock.release()

    @contextmanager
    def left_empty_on_refusal(self) -> Iterator[None]:
        """Take back a folder in which nothing was committed when a run is refused, so that it can be used again."""
        try:
            yield
        except (InputError, ModelError):
            if not any((self.folder / "units").glob(f"*/{MARKER}")):
                shutil.rmtree(self.folder / "units", ignore_errors=True)
                self.drop_states()
                (self.folder / _MANIFEST).unlink(missing_ok=True)
            raise

    def exists(self) -> bool:
        """Whether the folder holds a run, finished or not."""
        return (self.folder / _MANIFEST).exists()

    def read_manifest(self) -> dict[str, Any]:
        """The manifest as it was last written."""
        return read_json(self.folder / _MANIFEST)

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Put a manifest in place in one step."""
        write_json(self.folder / _MANIFEST, plain(manifest))

    def has_unit(self, key: UnitKey, fingerprint: str) -> bool:
        """Whether a unit was committed whole, by this very run, and is undamaged."""
        folder = self._unit(key)
        if not (folder / MARKER).exists() or damage(folder) is not None:
            return False
        return bool(read_json(folder / MARKER).get("fingerprint") == fingerprint)

    def write_unit(
        self,
        key: UnitKey,
        fingerprint: str,
        tokens: pd.DataFrame,
        summary: dict[str, float],
        neighbors: pd.DataFrame | None = None,
    ) -> None:
        """Commit a unit: its token table, its summary, and the neighbours where it carries them; all or none."""

        def write(folder: Path) -> None:
            keyed = pd.concat([pd.DataFrame([key.columns] * len(tokens), index=tokens.index), tokens], axis=1)
            keyed.to_parquet(folder / "tokens.parquet", index=False)
            write_json(folder / "summary.json", plain(summary))
            if neighbors is not None:
                neighbors.to_parquet(folder / _TABLES["neighbors"], index=False)

        commit_folder(self._unit(key), {"fingerprint": fingerprint}, write)

    def write_table(self, name: str, table: pd.DataFrame) -> None:
        """Write one of the run's tables in one step."""
        write_file(self.folder / _TABLES[name], lambda path: table.to_parquet(path, index=False))

    def merge_units(self, keys: list[UnitKey]) -> dict[str, dict[str, Any]]:
        """Write ``tokens.parquet`` and ``summary.parquet`` from the units; return the tables' sizes and hashes."""
        for name in ("tokens", "neighbors"):
            parts = [self._unit(key) / _TABLES[name] for key in keys]
            present = [part for part in parts if part.exists()]
            if present:
                write_file(self.folder / _TABLES[name], lambda path, p=present: _concatenate(p, path))  # type: ignore[misc]
        self.write_table("summary", self.summaries(keys))
        written = [self.folder / file for file in _TABLES.values() if (self.folder / file).exists()]
        return {path.name: file_identity(path) for path in written}

    def summaries(self, keys: list[UnitKey]) -> pd.DataFrame:
        """The summary rows of committed units."""
        return pd.DataFrame([key.columns | _floats(read_json(self._unit(key) / "summary.json")) for key in keys])

    def drop_states(self) -> None:
        """Remove the captured states."""
        shutil.rmtree(self.states, ignore_errors=True)

    def _unit(self, key: UnitKey) -> Path:
        return self.folder / "units" / key.folder_name


class StoredRun:
    """A finished run, read from its folder. Tables are checked against the manifest before they are read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            found = self.folder.is_dir()
        except (OSError, ValueError):
            found = False
        if not found:
            raise StoreError(f"{self.folder} is no folder; give the folder of a run")
        if self.manifest.get("schema") != SCHEMA_VERSION:
            raise StoreError(
                f"{self.folder} has run folder schema {self.manifest.get('schema')!r}, "
                f"this version reads {SCHEMA_VERSION}; use the version of deltalens that wrote it"
            )
        if self.manifest.get("status") != COMPLETE:
            raise StoreError(
                f"{self.folder} isn't finished; continue it with: deltalens run --resume --out {self.folder}"
            )

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """What ``run.json`` says: spec, identities, versions, checks, noise floor, warnings."""
        return read_json(self.folder / _MANIFEST)

    def summary(self) -> pd.DataFrame:
        """One row per layer, map, fit and protocol, and per point of a sweep."""
        return self._read("summary")

    def tokens(
        self,
        layer: int | None = None,
        map: str | None = None,
        fit: str | None = None,
        protocol: str | None = None,
        **point: object,
    ) -> pd.DataFrame:
        """Per-token measures, one row per token and key; each argument keeps only the rows that have it.

        Raises:
            InputError: ``point`` names a field that this run doesn't sweep.
        """
        swept = swept_fields(self.manifest.get("spec") or {})
        for name in point:
            if name not in swept:
                raise InputError(f"this run doesn't sweep {name!r}; it sweeps {', '.join(swept) or 'nothing'}")
        wanted = {"layer": layer, "map": map, "fit": fit, "protocol": protocol, **point}
        filters = [(column, "==", value) for column, value in wanted.items() if value is not None]
        return self._read("tokens", filters or None)

    def neighbors(self) -> pd.DataFrame:
        """Each evaluation token's nearest pool tokens, per layer and protocol; empty where it wasn't recorded."""
        return self._read_optional("neighbors")

    def pool(self) -> pd.DataFrame:
        """The pool's tokens with their text; empty where it wasn't recorded."""
        return self._read_optional("pool")

    def _read_optional(self, name: str) -> pd.DataFrame:
        return self._read(name) if _TABLES[name] in self._tables else pd.DataFrame()

    def _read(self, name: str, filters: list[tuple[str, str, Any]] | None = None) -> pd.DataFrame:
        path = self.folder / _TABLES[name]
        self._verify(path)
        try:
            return pd.read_parquet(path, filters=filters)
        except (OSError, ValueError, KeyError) as error:
            raise StoreError(f"{path} can't be read as a table of a run ({type(error).__name__})") from None

    def _verify(self, path: Path) -> None:
        if path.name in self._verified:
            return
        recorded = self._tables.get(path.name)
        if recorded is None or not path.is_file() or path.is_symlink() or file_identity(path) != recorded:
            raise StoreError(
                f"{path} isn't what the run wrote; repair it with: deltalens run --resume --out {self.folder}"
            )
        self._verified.add(path.name)

    @property
    def _tables(self) -> dict[str, Any]:
        tables = self.manifest.get("tables")
        return tables if isinstance(tables, dict) else {}

    @cached_property
    def _verified(self) -> set[str]:
        return set()


def _concatenate(parts: list[Path], path: Path) -> None:
    """Join tables row by row, one in memory at a time; a column that a part lacks is null there."""
    schema = pa.unify_schemas([pq.read_schema(part).remove_metadata() for part in parts])
    with pq.ParquetWriter(path, schema) as writer:
        for part in parts:
            writer.write_table(_with_schema(pq.read_table(part), schema))


def _with_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _floats(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in summary.items()}


def plain(content: Any) -> Any:
    """The same content with NaN and infinities as null, and numpy scalars as Python's."""
    return json.loads(json.dumps(content, default=_scalar), parse_constant=lambda _: None)


def table_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The table of rows that `plain` made: null is NaN again."""
    table = pd.DataFrame(rows)
    unknown = [name for name in table if table[name].isna().all()]
    return table.astype(dict.fromkeys(unknown, float))


def _scalar(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{type(value).__name__} can't be written as JSON")
    return item()

"""A run folder holds whole files or none; what isn't as it was written is named and never read as data."""

import math
from pathlib import Path

import pandas as pd
import pytest
from spoiling import HARMS, spoil

from deltalens.errors import StoreError
from deltalens.experiment.commit import MARKER, commit_folder, damage, write_file
from deltalens.experiment.store import RunFolder, StoredRun, UnitKey

KEYS = [UnitKey(0, "mean", "local", "held_out"), UnitKey(1, "low_rank:8", "local", "held_out")]


def frame(**columns: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"window": [0, 1], **columns})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    with run.locked():
        for key in KEYS:
            extra = {"kl_skip": [0.5, 0.25]} if key.layer else {}
            tokens = frame(relative_error=[1.0, math.nan], **extra)
            run.write_unit(key, "print", tokens, {"a": 1.0, "b": math.nan})
        tables = run.merge_units(KEYS)
        run.write_manifest({"schema": 1, "status": "complete", "tables": tables, "value": math.nan})
    return run


def test_the_file_tree_is_the_documented_one(folder: RunFolder) -> None:
    files = sorted(str(p.relative_to(folder.folder)) for p in folder.folder.rglob("*") if p.is_file())
    unit_files = [MARKER, "summary.json", "tokens.parquet"]
    assert files == sorted(
        [".lock", "run.json", "summary.parquet", "tokens.parquet"]
        + [f"units/00.mean.local.held_out/{name}" for name in unit_files]
        + [f"units/01.low_rank-8.local.held_out/{name}" for name in unit_files]
    )


def test_merged_tables_hold_every_unit_and_nan_where_a_column_is_missing(folder: RunFolder) -> None:
    run = StoredRun(folder.folder)
    tokens = run.tokens()
    assert tokens["layer"].tolist() == [0, 0, 1, 1]
    assert tokens["kl_skip"].isna().tolist() == [True, True, False, False]
    assert run.tokens(layer=1, map="low_rank:8")["kl_skip"].tolist() == [0.5, 0.25]
    assert run.summary()["b"].isna().all()
    assert run.manifest["value"] is None


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["tokens.parquet", "summary.json", MARKER])
def test_a_damaged_unit_counts_as_not_committed(folder: RunFolder, harm: str, name: str) -> None:
    path = folder.folder / "units" / KEYS[0].folder_name / name
    spoil(path, harm)
    assert not folder.has_unit(KEYS[0], "print")
    assert folder.has_unit(KEYS[1], "print")


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_table_is_never_read_as_data(folder: RunFolder, harm: str) -> None:
    spoil(folder.folder / "tokens.parquet", harm)
    with pytest.raises(StoreError, match="--resume"):
        StoredRun(folder.folder).tokens()


def test_a_unit_of_another_run_is_not_reused(folder: RunFolder) -> None:
    assert not folder.has_unit(KEYS[0], "another print")


def test_one_writer_at_a_time(folder: RunFolder) -> None:
    with folder.locked(), pytest.raises(StoreError, match="another process"), RunFolder(folder.folder).locked():
        pass
    with folder.locked():
        pass


def test_half_written_files_of_a_dead_writer_are_removed(folder: RunFolder) -> None:
    left = folder.folder / "units" / ".writing-abc"
    left.mkdir()
    (left / "tokens.parquet").write_bytes(b"half")
    with folder.locked():
        assert not left.exists()


def test_a_failing_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_file(path, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_a_link_out_of_the_folder_is_damage(tmp_path: Path) -> None:
    folder = tmp_path / "unit"
    commit_folder(folder, {}, lambda path: (path / "a").write_text("x") and None)
    assert damage(folder) is None
    (tmp_path / "b").write_text("x")
    (folder / "a").unlink()
    (folder / "a").symlink_to(tmp_path / "b")
    assert damage(folder) is not None


@pytest.mark.parametrize(
    ("manifest", "says"),
    [(None, "does not exist"), ("{", "damaged"), ('{"schema": 99}', "schema"), ('{"schema": 1}', "isn't finished")],
)
def test_a_folder_that_is_no_finished_run_is_one_line(tmp_path: Path, manifest: str | None, says: str) -> None:
    if manifest is not None:
        (tmp_path / "run.json").write_text(manifest)
    with pytest.raises(StoreError) as caught:
        StoredRun(tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)

"""A study runs what it can, says why the rest failed, survives a kill, and writes one table per claim."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import deltalens as dl
from deltalens import cli
from deltalens.report.claims import TITLES
from deltalens.study.series import is_finished

TINY: dict[str, Any] = {
    "maps": "diagonal", "layers": "2", "tokens": 128, "pool_tokens": 256, "window": 64, "neighbors": 16,
    "resamples": 100,
}  # fmt: skip


def write_study(folder: Path, *models: str, **shared: object) -> Path:
    path = folder / "study.yaml"
    content = {"title": "Tiny", "shared": TINY | shared, "entries": [{"run": {"model": m}} for m in models]}
    path.write_text(yaml.safe_dump(content), encoding="utf8")
    return path


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["deltalens", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> dl.Study:
    """Two models that run, one that isn't anywhere, one whose layers don't exist."""
    folder = tmp_path_factory.mktemp("study")
    path = write_study(folder, "tiny-gpt2", "nowhere/none", "tiny-mamba")
    return dl.reproduce(study=path, out=folder / "out")


def test_a_model_that_cannot_be_had_is_listed_and_the_rest_run(study: dl.Study) -> None:
    assert [(o.member.name, o.state) for o in study.outcomes] == [
        ("tiny-gpt2", "done"), ("none", "failed"), ("tiny-mamba", "done"),
    ]  # fmt: skip
    assert [run.folder.name for run in study.runs] == ["tiny-gpt2", "tiny-mamba"]
    reason = study.failures[0].reason
    assert "nowhere/none" in str(reason)
    assert "\n" not in str(reason)
    assert str(reason) in (study.folder / "README.md").read_text(encoding="utf8")


def test_what_no_one_foresaw_fails_one_run_and_not_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltalens.study import series

    def broken(spec: dl.RunSpec, *rest: object, **more: object) -> None:
        raise RuntimeError(f"two\nlines about {spec.model}")

    monkeypatch.setattr(series, "run_spec", broken)
    found = dl.reproduce(study=write_study(tmp_path, "tiny-gpt2", "tiny-neox"), out=tmp_path / "out")
    assert [o.reason for o in found.failures] == [
        "RuntimeError: two lines about tiny-gpt2", "RuntimeError: two lines about tiny-neox",
    ]  # fmt: skip
    with pytest.raises(dl.StoreError, match="no finished run"):
        found.claims()


def test_every_claim_has_a_table_with_each_runs_verdict_and_all_together(study: dl.Study) -> None:
    tables = sorted((study.folder / "claims").glob("*.csv"))
    assert len(tables) == len(list((study.folder / "claims").glob("*.md"))) == len(TITLES)
    for number, path in enumerate(tables, start=1):
        table = pd.read_csv(path, keep_default_na=False)
        alone = [] if number in (7, 9) else ["tiny-gpt2", "tiny-mamba"]
        assert list(table["run"]) == [*alone, "all together"]
        for name, verdict in zip(table["run"], table["verdict"], strict=True):
            runs = [run for run in study.runs if run.folder.name == name] or list(study.runs)
            from deltalens.report import claims_for

            assert claims_for(runs)[number - 1].verdict == verdict
    content = json.loads((study.folder / "claims.json").read_text(encoding="utf8"))
    assert [claim["verdict"] for claim in content["claims"]] == [claim.verdict for claim in study.claims()]
    assert content["claims"][0]["each"].keys() == {"tiny-gpt2", "tiny-mamba"}


def test_the_index_links_to_files_that_exist(study: dl.Study) -> None:
    import re

    links = re.findall(r"\]\(([^)]+)\)", (study.folder / "README.md").read_text(encoding="utf8"))
    assert {"compare.html", "tiny-gpt2/report.html", "claims/09-architecture.md"} <= set(links)
    assert all((study.folder / link).is_file() for link in links)


def test_resuming_keeps_finished_runs_and_tries_failed_ones_again(
    study: dl.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltalens.study import series

    tried: list[str] = []

    def counted(spec: dl.RunSpec, *rest: object, **more: object) -> None:
        tried.append(spec.model)
        raise dl.ModelError("still not there")

    monkeypatch.setattr(series, "run_spec", counted)
    again = dl.reproduce(study=study.folder.parent / "study.yaml", out=study.folder, resume=True)
    assert tried == ["nowhere/none"]
    assert again.failures[0].reason == "still not there"
    assert [run.folder.name for run in again.runs] == ["tiny-gpt2", "tiny-mamba"]


@pytest.mark.parametrize("name", ["report.html", "tokens.parquet", "summary.parquet", "run.json"])
def test_a_run_that_lost_a_file_is_not_finished(study: dl.Study, tmp_path: Path, name: str) -> None:
    member = study.outcomes[0].member
    copy = Path(shutil.copytree(study.runs[0].folder, tmp_path / "copy"))
    assert is_finished(member, copy)
    assert not is_finished(dataclasses.replace(member, spec=member.spec.model_copy(update={"seed": 9})), copy)
    (copy / name).unlink()
    assert not is_finished(member, copy)


@pytest.mark.parametrize(
    ("models", "shared", "says"),
    [
        (("tiny-gpt2", "nowhere/none", "tiny-mamba"), {"neighbors": 8}, "neighbors of the run tiny-gpt2 was 16, is 8"),
        (("tiny-gpt2",), {}, "the run none was part of it"),
        (("tiny-gpt2", "nowhere/none", "tiny-mamba", "tiny-neox"), {}, "the run tiny-neox wasn't part of it"),
    ],
)
def test_a_folder_of_another_study_is_refused(
    study: dl.Study, tmp_path: Path, models: tuple[str, ...], shared: dict[str, object], says: str
) -> None:
    path = write_study(tmp_path, *models, **shared)
    with pytest.raises(dl.StoreError, match=says):
        dl.reproduce(study=path, out=study.folder, resume=True)
    with pytest.raises(dl.StoreError, match="--resume"):
        dl.reproduce(study=path, out=study.folder)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "kind": "x", "title": "", "runs": [], '
                '"warnings": []}', '{"schema": 1, "kind": "repeat", "title": "", "warnings": [], "runs": '
                '[{"name": "../x", "group": "x", "state": "done", "spec": {}}]}'],
)  # fmt: skip
def test_a_damaged_record_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "study.json").write_text(content, encoding="utf8")
    with pytest.raises(dl.StoreError, match=r"study\.json") as caught:
        dl.Study(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_killed_study_goes_on_where_it_was(tmp_path: Path) -> None:
    path = write_study(tmp_path, "tiny-gpt2", "tiny-neox", layers="1,3")
    out = tmp_path / "out"
    program = f"import deltalens as dl; dl.reproduce(study={str(path)!r}, out={str(out)!r})"
    child = subprocess.Popen([sys.executable, "-c", program])
    unit = out / "tiny-neox" / "units"
    while child.poll() is None and not (unit.is_dir() and any(unit.iterdir())):
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    first = (out / "tiny-gpt2" / "summary.parquet").stat().st_mtime_ns
    with pytest.raises(dl.StoreError, match="isn't finished"):
        dl.open(out / "tiny-neox")
    resumed = dl.reproduce(study=path, out=out, resume=True)
    assert (out / "tiny-gpt2" / "summary.parquet").stat().st_mtime_ns == first
    whole = dl.run("tiny-neox", out=tmp_path / "whole", **TINY | {"layers": "1,3"})
    pd.testing.assert_frame_equal(resumed.runs[1].summary(), whole.summary(), check_exact=True)


def test_the_command_line_says_what_failed_and_ends_with_one(
    study: dl.Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = call(monkeypatch, capsys, "reproduce", "--resume", "--out", str(study.folder))
    assert code == 1
    assert "nowhere/none isn't here" in " ".join(out.split())
    assert "tiny-mamba (3 of 3)" in err
    shown = [line for line in out.splitlines() if not line.startswith("index: ")]
    assert max(map(len, shown)) <= 80
    code, out, err = call(monkeypatch, capsys, "reproduce", "--resume", "--out", str(study.folder), "--json")
    assert (code, err) == (1, "")
    answer = json.loads(out)
    assert [run["state"] for run in answer["runs"]] == ["done", "failed", "done"]
    assert [claim["id"] for claim in answer["claims"]] == list(range(1, 10))


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(monkeypatch, capsys, "reproduce", "--small", "--seeds", "0,1", "--dry-run")
    assert code == 0
    assert "smollm2-135m-seed-1" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = call(monkeypatch, capsys, "reproduce", "--models", "tiny-gpt2,me/mine", "--dry-run", "--json")
    assert code == 0
    plan = json.loads(out)["plan"]
    assert [(row["model"], row["layers"], row["units"]) for row in plan] == [
        ("tiny-gpt2", 6, 72), ("me/mine", None, None),
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--small", "--study", "x.yaml"], "both small and study"),
        (["--study", "missing.yaml"], "missing.yaml"),
        (["--models", ","], "models is empty"),
        (["--seeds", "a"], "whole numbers"),
        (["--seeds", "1,1"], "twice"),
        (["--resume"], "--out"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, "reproduce", "--quiet", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

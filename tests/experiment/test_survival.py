"""Runs survive what ends them: a kill at any moment, a full disk, damage, memory that doesn't suffice."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from spoiling import HARMS, spoil

import deltalens as dl
from deltalens.experiment import states
from deltalens.experiment.captured import _non_finite
from deltalens.experiment.corpus import Windows
from deltalens.experiment.progress import Silent

SMALL: dict[str, Any] = {
    "layers": [1, 3],
    "maps": ["diagonal", "linear"],
    "tokens": 128,
    "pool_tokens": 256,
    "window": 64,
    "neighbors": 16,
    "resamples": 100,
    "batch_size": 2,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dl.Run:
    return dl.run("tiny-gpt2", out=tmp_path_factory.mktemp("run") / "r", keep_states=True, **SMALL)


@pytest.fixture
def copy(run: dl.Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run.folder, tmp_path / "copy"))


def test_twenty_of_twenty_killed_runs_equal_the_uninterrupted_one() -> None:
    script = Path(__file__).with_name("kill_and_resume.py")
    done = subprocess.run([sys.executable, str(script), "--kills", "20"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("20 of 20 equal")
    assert int(last.split(", ")[1].split()[0]) >= 10


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(
    "name",
    [
        "units/01.linear.local.held_out/tokens.parquet",
        "units/03.diagonal.local.in_sample/summary.json",
        "tokens.parquet",
        "states/evaluation-00000000/states.safetensors",
    ],
)
def test_damage_is_recomputed_on_resume(run: dl.Run, copy: Path, name: str, harm: str) -> None:
    spoil(copy / name, harm)
    resumed = dl.run("tiny-gpt2", out=copy, resume=True, keep_states=True, **SMALL)
    pd.testing.assert_frame_equal(run.tokens(), resumed.tokens(), check_exact=True)
    pd.testing.assert_frame_equal(run.summary(), resumed.summary(), check_exact=True)


def test_a_damaged_manifest_is_named(copy: Path) -> None:
    spoil(copy / "run.json", "zero")
    with pytest.raises(dl.StoreError, match=r"run\.json"):
        dl.run("tiny-gpt2", out=copy, resume=True, **SMALL)
    with pytest.raises(dl.StoreError, match=r"run\.json"):
        dl.open(copy)


def test_a_batch_that_does_not_fit_is_halved_and_recorded(run: dl.Run, tmp_path: Path, monkeypatch: Any) -> None:
    real = states._captured

    def too_large(model: Any, batch: Any, streams: Any) -> Any:
        if len(batch) > 1:
            raise torch.OutOfMemoryError("made up")
        return real(model, batch, streams)

    monkeypatch.setattr(states, "_captured", too_large)
    made = dl.run("tiny-gpt2", out=tmp_path / "r", **SMALL)
    assert any("halved" in warning or "batch" in warning for warning in made.manifest["warnings"])
    difference = (made.tokens()["relative_error"] - run.tokens()["relative_error"]).abs().dropna()
    assert difference.quantile(0.99) < 1e-4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MB, too small for the run's states."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_disk_that_fills_up_stops_in_one_line_and_resume_goes_on(
    run: dl.Run, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small_disk / "ballast").write_bytes(bytes(900_000))
    monkeypatch.setattr("deltalens.experiment.plan._check_disk", lambda plan: None)  # it fills up later, not before
    with pytest.raises(dl.StoreError, match="No space left") as caught:
        dl.run("tiny-gpt2", out=small_disk / "r", **SMALL)
    assert "\n" not in str(caught.value)
    assert not list(small_disk.rglob(".writing-*"))
    (small_disk / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    resumed = dl.run("tiny-gpt2", out=small_disk / "r", resume=True, **SMALL)
    pd.testing.assert_frame_equal(run.tokens(), resumed.tokens(), check_exact=True)


def test_a_disk_that_is_too_small_from_the_start_is_said_before_the_run(small_disk: Path) -> None:
    with pytest.raises(dl.StoreError, match="GB are free"):
        dl.run("tiny-gpt2", out=small_disk / "r", **(SMALL | {"tokens": 2048, "pool_tokens": 4096}))
    assert not list(small_disk.iterdir())


class Notes(Silent):
    """What a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, message: str) -> None:
        self.said.append(message)


def test_the_disk_that_a_sweep_needs_is_said_before_it_starts(tmp_path: Path) -> None:
    notes, sweep = Notes(), {"layers": [1], "maps": "mean", "neighbors": [4, 8, 12, 16], "scope": "single"}
    dl.run("tiny-gpt2", out=tmp_path / "r", keep_states=True, progress=notes, **(SMALL | sweep))
    said = re.search(r"needs about ([\d.]+) GB of disk in .*, [\d.]+ GB are free", notes.said[0])
    assert said is not None
    assert 0.5 < sum(file.stat().st_size for file in tmp_path.rglob("*")) / (float(said[1]) * 1e9) < 1


def test_disk_that_a_resumed_run_holds_already_is_not_asked_for_again(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearly_full = shutil.disk_usage(copy)._replace(free=1_000_000)
    monkeypatch.setattr("deltalens.experiment.plan.shutil.disk_usage", lambda _: nearly_full)
    with pytest.raises(dl.StoreError, match="GB are free"):
        dl.run("tiny-gpt2", out=copy.parent / "new", **SMALL)
    dl.run("tiny-gpt2", out=copy, resume=True, keep_states=True, **SMALL)


def test_memory_does_not_grow_with_layers() -> None:
    """Peak resident memory of a run in a process of its own: one layer against all six."""
    program = (
        "import resource, sys, tempfile, torch, deltalens as dl; torch.set_num_threads(1);"
        "dl.run('tiny-gpt2', layers=sys.argv[1], out=tempfile.mkdtemp() + '/r', maps='mean,diagonal', tokens=512,"
        "pool_tokens=1024, resamples=100); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = [
        int(subprocess.run([sys.executable, "-c", program, layers], capture_output=True, text=True, check=True).stdout)
        for layers in ("2", "0:6")
    ]
    assert peaks[1] <= 1.1 * peaks[0]


def test_non_finite_weights_are_located(tmp_path: Path) -> None:
    model = dl.load("tiny-gpt2")
    with torch.no_grad():
        model.hf.transformer.h[3].mlp.c_fc.bias[0] = torch.nan
    with pytest.raises(dl.ModelError) as caught:
        dl.run(model, out=tmp_path / "r", **SMALL)
    assert "\n" not in str(caught.value)
    assert "transformer.h.3.mlp.c_fc.bias" in str(caught.value)


def test_non_finite_states_are_located() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    windows = Windows(ids, torch.tensor([4, 3]), torch.tensor([0, 1]), ids.bool())
    norms = torch.ones(2, 4, 7)
    assert _non_finite([windows], [norms]) is None
    norms[1, 3] = torch.nan  # padding
    assert _non_finite([windows], [norms]) is None
    norms[0, 2, 4:] = torch.inf
    norms[1, 0, 5:] = torch.nan
    assert _non_finite([windows], [norms]) == "2 of 7 tokens have NaN or infinite states, first after layer 3"


def test_ctrl_c_ends_with_a_clean_line_and_exit_code_130(run: dl.Run, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    flags = [f"--{name.replace('_', '-')}={_flag(value)}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "deltalens.cli", "run", "tiny-gpt2", "--out", str(folder), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(folder.glob("units/*/complete.json")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.strip().splitlines()[-1].startswith("error: interrupted")
    resumed = dl.run("tiny-gpt2", out=folder, resume=True, **SMALL)
    assert len(resumed.summary()) == len(run.summary())


def _flag(value: Any) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, list) else str(value)

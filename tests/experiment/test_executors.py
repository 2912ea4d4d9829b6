"""Whoever measures the units, the numbers are the same; workers may die, and what can't work is refused in one line."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pool_executor
import psutil
import pytest

import deltalens as dl
from deltalens.experiment import executors
from deltalens.experiment.executors.ray_cluster import Share, import_ray, require_answer, worker_share
from deltalens.experiment.progress import Silent
from deltalens.experiment.resume import resumed_fields
from deltalens.experiment.spec import RunSpec

SMALL: dict[str, Any] = {
    "layers": [1, 3],
    "maps": ["diagonal", "linear"],
    "tokens": 128,
    "pool_tokens": 256,
    "window": 64,
    "neighbors": 16,
    "resamples": 100,
}
TABLES = ("tokens.parquet", "summary.parquet", "neighbors.parquet", "pool.parquet")
UNITS = 8

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' isn't installed")


class Watched(Silent):
    """Calls ``then`` with the number of units committed so far, after each one."""

    def __init__(self, then: Callable[[int], None]) -> None:
        self._then, self.units, self.notes = then, 0, list[str]()

    @contextmanager
    def step(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        def advance(done: int) -> None:
            if name == "fit and measure":
                self.units += done
                self._then(self.units)

        yield advance

    def note(self, message: str) -> None:
        self.notes.append(message)


class StoppedError(Exception):
    pass


def stop_after(units: int) -> Watched:
    def stop(done: int) -> None:
        if done == units:
            raise StoppedError

    return Watched(stop)


def ray_workers() -> list[psutil.Process]:
    """The processes of this test's workers, by the title that Ray gives them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Worker"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def kill_workers(_: int = 0) -> None:
    for process in ray_workers():
        process.kill()


def written(run: dl.Run | Path) -> dict[str, bytes]:
    folder = run if isinstance(run, Path) else run.folder
    return {name: (folder / name).read_bytes() for name in TABLES}


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob(".writing-*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dl.Run:
    return dl.run("tiny-gpt2", out=tmp_path_factory.mktemp("run") / "local", **SMALL)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = import_ray()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    yield ray
    ray.shutdown()


@needs_ray
def test_two_ray_workers_give_the_same_tables_byte_for_byte(ray: Any, whole: dl.Run, tmp_path: Path) -> None:
    progress = Watched(lambda _: None)
    run = dl.run("tiny-gpt2", out=tmp_path / "r", executor="ray", workers=2, progress=progress, **SMALL)
    assert written(run) == written(whole)
    assert run.manifest["fingerprint"] == whole.manifest["fingerprint"]
    assert progress.units == UNITS
    assert "2 Ray workers, each with 1 CPU and 0 GPUs" in progress.notes


@needs_ray
def test_workers_killed_mid_run_change_nothing(ray: Any, whole: dl.Run, tmp_path: Path) -> None:
    killed = []

    def kill_first(units: int) -> None:
        if units == 1:
            killed.extend(ray_workers())
            kill_workers()

    progress = Watched(kill_first)
    run = dl.run("tiny-gpt2", out=tmp_path / "r", executor="ray", workers=2, progress=progress, **SMALL)
    assert killed
    assert any("died" in note for note in progress.notes)
    assert progress.units == UNITS
    assert written(run) == written(whole)
    assert leftovers(tmp_path) == []


@needs_ray
def test_workers_that_keep_dying_end_the_run_in_one_line_and_it_goes_on_without_them(
    ray: Any, whole: dl.Run, tmp_path: Path
) -> None:
    over = threading.Event()

    def keep_killing() -> None:
        while not over.wait(0.05):
            kill_workers()

    killer = threading.Thread(target=keep_killing)
    killer.start()
    try:
        with pytest.raises(dl.ExecutorError, match=r"3 workers died .*--resume") as caught:
            dl.run("tiny-gpt2", out=tmp_path / "r", executor="ray", workers=1, **SMALL)
    finally:
        over.set()
        killer.join()
    assert "\n" not in str(caught.value)
    assert written(dl.run("tiny-gpt2", out=tmp_path / "r", resume=True, **SMALL)) == written(whole)


@needs_ray
@pytest.mark.parametrize("first", ["local", "ray"])
def test_what_one_executor_began_the_other_finishes(ray: Any, whole: dl.Run, tmp_path: Path, first: str) -> None:
    by = {"local": {}, "ray": {"executor": "ray", "workers": 1}}
    began, finishes = (by[first], by["local" if first == "ray" else "ray"])
    with pytest.raises(StoppedError):
        dl.run("tiny-gpt2", out=tmp_path / "r", progress=stop_after(3), **began, **SMALL)
    progress = Watched(lambda _: None)
    run = dl.run("tiny-gpt2", out=tmp_path / "r", resume=True, progress=progress, **finishes, **SMALL)
    assert 0 < progress.units <= UNITS - 3
    assert written(run) == written(whole)


@needs_ray
def test_a_worker_with_other_weights_is_refused(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = executors.Assignment.of
    monkeypatch.setattr(executors.Assignment, "of", lambda *given: replace(real(*given), model="tiny-neox"))
    with pytest.raises(dl.ExecutorError, match="differ from the driver's"):
        dl.run("tiny-gpt2", out=tmp_path / "r", executor="ray", workers=1, **SMALL)


@needs_ray
def test_more_than_the_nodes_have_is_refused_before_anything_is_written(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(dl.InputError, match=r"64 CPUs and 0 GPUs, but the nodes have 2 CPUs and 0 GPUs"):
        dl.run("tiny-gpt2", out=tmp_path / "r", executor="ray", cpus_per_worker=64, **SMALL)
    assert not (tmp_path / "r").exists()


@needs_ray
def test_ctrl_c_ends_a_ray_run_with_130_and_leaves_no_process(tmp_path: Path) -> None:
    fields = {name: ",".join(map(str, value)) if isinstance(value, list) else value for name, value in SMALL.items()}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
    out = tmp_path / "r"
    command = ["-m", "deltalens.cli", "run", "--executor=ray", "--workers=1", f"--out={out}", *options]
    process = subprocess.Popen(
        [sys.executable, *command], stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "80"}
    )
    tree: list[psutil.Process] = []
    while not list(out.glob("units/*/complete.json")) and process.poll() is None:
        time.sleep(0.1)
        tree = psutil.Process(process.pid).children(recursive=True) or tree
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=120)
    assert process.returncode == 130, shown
    assert shown.strip().splitlines()[-1].startswith("error: interrupted")
    assert len(tree) > 1
    assert psutil.wait_procs(tree, timeout=30)[1] == []
    assert leftovers(tmp_path) == []


@needs_ray
def test_another_executor_takes_less_than_fifty_lines(
    whole: dl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(executors.EXECUTORS, "ray", pool_executor.PoolExecutor)
    run = dl.run("tiny-gpt2", out=tmp_path / "r", executor="ray", workers=1, **SMALL)
    assert written(run) == written(whole)
    assert len(Path(pool_executor.__file__).read_text().splitlines()) < 50


def test_every_executor_can_be_named_in_a_spec_and_none_changes_the_fingerprint() -> None:
    assert set(get_args(RunSpec.model_fields["executor"].annotation)) == set(executors.EXECUTORS)
    plain = RunSpec.parse()
    other = RunSpec.parse(executor="ray", ray_address="auto", workers=3, gpus_per_worker=0.5, cpus_per_worker=2)
    assert other.canonical_json() == plain.canonical_json()


def test_options_of_workers_without_workers_are_refused() -> None:
    for field, value in {"ray_address": "auto", "workers": 2, "gpus_per_worker": 0, "cpus_per_worker": 2}.items():
        with pytest.raises(dl.InputError, match=f"{field} is for workers"):
            RunSpec.parse(**{field: value})


def test_resuming_with_another_executor_forgets_the_workers_of_the_first(tmp_path: Path) -> None:
    spec = RunSpec.parse(executor="ray", workers=3, tokens=64)
    (tmp_path / "run.json").write_text(json.dumps({"spec": spec.model_dump(mode="json")}))
    assert RunSpec.parse(**resumed_fields(tmp_path, {"executor": "local"})) == RunSpec.parse(tokens=64)
    assert RunSpec.parse(**resumed_fields(tmp_path, {})) == spec
    assert RunSpec.parse(**resumed_fields(tmp_path, {"executor": "ray", "workers": 2})).workers == 2


def test_a_model_in_memory_is_refused_before_long_work() -> None:
    with pytest.raises(dl.InputError, match="give its name or path"):
        dl.run(dl.load("tiny-gpt2"), executor="ray")


def test_ray_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(dl.InputError, match=r"pip install 'deltalens\[ray\]'"):
        dl.run("no-such-model", executor="ray", out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("address", ["ray://somewhere:10001", "somewhere", "somewhere:port", ":6379"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(dl.InputError, match="HOST:PORT"):
        require_answer(address)


def test_an_address_where_nothing_answers_is_refused_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        with pytest.raises(dl.ExecutorError, match="ray start --head"):
            require_answer(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize(
    ("asked", "on_gpu", "share"),
    [
        ({}, False, Share(1, 0.0, "cpu")),
        ({}, True, Share(1, 1.0, None)),
        ({"gpus_per_worker": 0}, True, Share(1, 0.0, "cpu")),
        ({"gpus_per_worker": 0.5}, False, Share(1, 0.5, None)),
        ({"gpus_per_worker": 2, "cpus_per_worker": 4}, False, Share(4, 2.0, "auto")),
    ],
)
def test_a_worker_gets_the_device_of_its_share(asked: dict[str, Any], on_gpu: bool, share: Share) -> None:
    assert worker_share(RunSpec.parse(executor="ray", **asked), on_gpu=on_gpu) == share


@pytest.mark.parametrize(
    ("share", "resources", "workers"),
    [
        (Share(1, 0.0, "cpu"), {"CPU": 3.0}, 3),
        (Share(2, 0.0, "cpu"), {"CPU": 3.0, "GPU": 8.0}, 1),
        (Share(1, 1.0, None), {"CPU": 3.0, "GPU": 2.0}, 2),
        (Share(1, 0.5, None), {"CPU": 8.0, "GPU": 2.0}, 4),
        (Share(1, 1.0, None), {"CPU": 8.0}, 0),
        (Share(1, 0.0, "cpu"), {}, 0),
    ],
)
def test_a_node_holds_whole_workers_only(share: Share, resources: dict[str, float], workers: int) -> None:
    assert share.fits(resources) == workers

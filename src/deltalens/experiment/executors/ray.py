"""Units on the workers of a Ray cluster: one actor per worker, one layer at a time each, retried when a worker dies."""

import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deltalens.errors import DeltalensError, ExecutorError
from deltalens.experiment.captured import Captured
from deltalens.experiment.executors.assignment import Assignment
from deltalens.experiment.executors.ray_cluster import RayCluster, Share, import_ray, worker_share
from deltalens.experiment.gate import Gate
from deltalens.experiment.layer import LayerUnits
from deltalens.experiment.plan import Plan
from deltalens.experiment.progress import Progress
from deltalens.experiment.store import UnitKey, by_layer

#: How often a layer is given to a worker before its deaths are taken for the layer's fault.
TRIES = 3

#: Seconds after which a run that waits for its first worker says so, again and again.
_PATIENCE = 60.0

#: Seconds that a shared file system may take to show here what a worker elsewhere committed.
_DYING = 1.0
_VISIBLE_WITHIN = 90.0


class Worker:
    """What each actor is: it takes up the run once, then measures whatever layers it is given."""

    def __init__(self, assignment: Assignment, device: str | None, threads: int) -> None:
        self._assignment, self._device, self._threads = assignment, device, threads
        self._units: LayerUnits | None = None

    def commit(self, keys: Sequence[UnitKey]) -> Iterator[UnitKey]:
        """Measure and commit units of one layer; with none, only load the model and the states."""
        if self._units is None:
            torch.set_num_threads(self._threads)
            self._units = self._assignment.take_up(self._device)
        if keys:
            yield from self._units.commit(keys)


@dataclass(frozen=True)
class _Job:
    """A worker at one layer, or taking up the run while it has no units; ``stream`` yields what it commits."""

    worker: Any
    keys: tuple[UnitKey, ...]
    stream: Any

    @property
    def layer(self) -> int | None:
        return self.keys[0].layer if self.keys else None


class RayExecutor:
    """Measures on the workers of a Ray cluster, or of a Ray that it starts on this machine."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        self._share = worker_share(plan.spec, on_gpu=plan.model.device.type == "cuda")
        self._cluster = RayCluster(plan.spec, self._share, layers=len(plan.layers))

    def __enter__(self) -> "RayExecutor":
        self._cluster.open()
        self._progress.note(f"{self._cluster.workers} Ray workers, each with {self._share}")
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.close()

    def commit(self, captured: Captured, gate: Gate, missing: Sequence[UnitKey]) -> Generator[UnitKey, None, None]:
        """Measure each layer on whichever worker is free; what a dead worker left goes to another."""
        ray = import_ray()
        crew = _Crew(ray, self._plan, self._share, ray.put(Assignment.of(captured, gate)), missing, self._progress)
        try:
            yield from crew.work(self._cluster.workers)
        finally:
            crew.dismiss()
        self._await_visible(missing)

    def _await_visible(self, keys: Sequence[UnitKey]) -> None:
        folder, until = self._plan.folder, time.monotonic() + _VISIBLE_WITHIN
        unseen = list(keys)
        while unseen := [key for key in unseen if not folder.has_unit(key, self._plan.fingerprint)]:
            if time.monotonic() > until:
                raise ExecutorError(
                    f"{len(unseen)} units that workers committed aren't in {folder.folder} on this machine; "
                    f"put --out on a file system that every node shares"
                )
            time.sleep(1.0)


class _Crew:
    """The workers of one run and the layers that wait for them."""

    def __init__(
        self, ray: Any, plan: Plan, share: Share, assignment: Any, missing: Sequence[UnitKey], progress: Progress
    ) -> None:
        self._ray, self._plan, self._share, self._progress = ray, plan, share, progress
        self._assignment = assignment
        self._waiting = deque(tuple(keys) for keys in by_layer(missing))
        self._jobs: dict[Any, _Job] = {}
        self._deaths: Counter[int | None] = Counter()
        self._told: set[UnitKey] = set()

    def work(self, workers: int) -> Iterator[UnitKey]:
        """Yield units as workers commit them, until none is missing."""
        for _ in range(min(workers, len(self._waiting))):
            self._hire()
        while self._jobs:
            job = self._next()
            try:
                yield from self._tell([self._ray.get(next(job.stream))])
            except StopIteration:
                self._free(job)
            except self._ray.exceptions.RayTaskError as error:
                raise _cause(error) from None
            except self._ray.exceptions.RayError as error:
                yield from self._replace(job, error)

    def dismiss(self) -> None:
        """End every worker that is still there."""
        for job in self._jobs.values():
            self._ray.kill(job.worker)
        if self._jobs:
            time.sleep(_DYING)  # Ray doesn't wait, and what they are writing is removed next
        self._jobs.clear()

    def _hire(self) -> None:
        actor = self._ray.remote(Worker).options(
            num_cpus=self._share.cpus, num_gpus=self._share.gpus, max_restarts=0, max_task_retries=0
        )
        self._give(actor.remote(self._assignment, self._share.device, self._share.cpus), ())

    def _give(self, worker: Any, keys: tuple[UnitKey, ...]) -> None:
        stream = worker.commit.options(num_returns="streaming").remote(keys)
        self._jobs[stream] = _Job(worker, keys, stream)

    def _next(self) -> _Job:
        """The first job that has something to tell."""
        while True:
            ready, _ = self._ray.wait(list(self._jobs), num_returns=1, timeout=_PATIENCE)
            if ready:
                return self._jobs[ready[0]]
            if all(job.layer is None for job in self._jobs.values()):
                self._progress.note(f"no worker is ready yet: each waits for {self._share}, then loads the model")

    def _free(self, job: _Job) -> None:
        """Give a worker its next layer, or let it go."""
        del self._jobs[job.stream]
        if self._waiting:
            self._give(job.worker, self._waiting.popleft())
        else:
            self._ray.kill(job.worker)

    def _replace(self, job: _Job, error: Exception) -> Iterator[UnitKey]:
        """Hand what a lost worker didn't commit to a new one; yield what it did commit but could no longer tell."""
        del self._jobs[job.stream]
        self._ray.kill(job.worker)
        self._deaths[job.layer] += 1
        what = "before it had loaded the model" if job.layer is None else f"at layer {job.layer}"
        if self._deaths[job.layer] == TRIES:
            raise ExecutorError(
                f"{TRIES} workers died {what}, the last one of: {_reason(error)}; give each more memory or lower "
                f"--workers, then continue with --resume --out {self._plan.folder.folder}"
            )
        self._progress.note(f"a worker died {what}; another one takes over")
        done = [key for key in job.keys if self._plan.folder.has_unit(key, self._plan.fingerprint)]
        if len(done) < len(job.keys):
            self._waiting.appendleft(tuple(key for key in job.keys if key not in done))
        if self._waiting:
            self._hire()
        yield from self._tell(done)

    def _tell(self, keys: Sequence[UnitKey]) -> Iterator[UnitKey]:
        for key in keys:
            if key not in self._told:
                self._told.add(key)
                yield key


def _cause(error: Any) -> Exception:
    """What a worker raised: its one line where it was meant for people, else everything that Ray knows."""
    cause = error.cause
    return cause if isinstance(cause, DeltalensError) else error


def _reason(error: Exception) -> str:
    """The sentence of Ray's report that says why a worker is gone."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return lines[-1].split(". Some common causes")[0] if lines else type(error).__name__

"""An executor that measures in a few processes of this machine: the example of docs/extending/executor.md."""

from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from deltalens.experiment.captured import Captured
from deltalens.experiment.executors import Assignment
from deltalens.experiment.gate import Gate
from deltalens.experiment.layer import LayerUnits
from deltalens.experiment.plan import Plan
from deltalens.experiment.progress import Progress
from deltalens.experiment.store import UnitKey, by_layer

_units: LayerUnits | None = None


class PoolExecutor:
    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._workers = plan.spec.workers or 2

    def __enter__(self) -> "PoolExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def commit(self, captured: Captured, gate: Gate, missing: Sequence[UnitKey]) -> Generator[UnitKey, None, None]:
        given = Assignment.of(captured, gate)
        with ProcessPoolExecutor(self._workers, get_context("spawn"), _take_up, (given,)) as pool:
            for done in as_completed([pool.submit(_measure, keys) for keys in by_layer(missing)]):
                yield from done.result()


def _take_up(given: Assignment) -> None:
    global _units
    _units = given.take_up(device="cpu")


def _measure(keys: list[UnitKey]) -> list[UnitKey]:
    assert _units is not None
    return list(_units.commit(keys))

"""What runs the units of a plan must offer."""

from collections.abc import Generator, Sequence
from typing import Protocol, runtime_checkable

from deltalens.experiment.captured import Captured
from deltalens.experiment.gate import Gate
from deltalens.experiment.store import UnitKey


@runtime_checkable
class Executor(Protocol):
    """Measures units and commits each to the run folder, in this process or in others.

    An executor is a context manager that opens before anything is captured, so that what it can't reach is refused
    early, and is closed when the run ends, however it ends.
    """

    def __enter__(self) -> "Executor":
        """Get hold of whatever measures; raise `ExecutorError` where it can't be had."""
        ...

    def __exit__(self, *_: object) -> None:
        """Let go of everything that this executor started, and of nothing else."""
        ...

    def commit(self, captured: Captured, gate: Gate, missing: Sequence[UnitKey]) -> Generator[UnitKey, None, None]:
        """Measure and commit the missing units in any order; yield each when it is in the run folder."""
        ...

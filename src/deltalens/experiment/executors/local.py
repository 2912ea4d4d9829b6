"""Units one after the other, in this process."""

from collections.abc import Generator, Sequence

from deltalens.experiment.captured import Captured
from deltalens.experiment.gate import Gate
from deltalens.experiment.layer import LayerUnits
from deltalens.experiment.plan import Plan
from deltalens.experiment.progress import Progress
from deltalens.experiment.store import UnitKey, by_layer


class LocalExecutor:
    """Measures in this process, with the model that is loaded."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        pass

    def __enter__(self) -> "LocalExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def commit(self, captured: Captured, gate: Gate, missing: Sequence[UnitKey]) -> Generator[UnitKey, None, None]:
        """Measure layer by layer."""
        with LayerUnits(captured, gate) as units:
            for keys in by_layer(missing):
                yield from units.commit(keys)

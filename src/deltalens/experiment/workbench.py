"""What a study of layers starts from: a model, its captured states, fits by layer and protocol, and a meter.

A run commits its units to a folder; the studies beside it (rankings, the inside of the residual, replacements) need
the same start and keep only their own table, so their states lie in a temporary folder.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltalens.errors import InputError
from deltalens.experiment.captured import Captured, capture_states
from deltalens.experiment.documents import Documents
from deltalens.experiment.fitting import LayerStates, ProtocolFits, layer_states
from deltalens.experiment.functional import FunctionalMeter
from deltalens.experiment.gate import Gate, open_gate
from deltalens.experiment.plan import Plan, load_for, make_plan, read_documents
from deltalens.experiment.progress import Progress
from deltalens.experiment.spec import Protocol, RunSpec
from deltalens.models import Model


@dataclass(frozen=True)
class Workbench:
    """A checked model with its captured states; valid inside the ``with`` that opened it."""

    plan: Plan
    captured: Captured
    gate: Gate

    def states(self, layer: int) -> LayerStates:
        """Included tokens of one transition, evaluation and pool."""
        return layer_states(self.captured, layer)

    def fits(self, states: LayerStates, protocol: Protocol) -> ProtocolFits:
        """The fits of one layer under one protocol, sharing neighbourhoods and Gram matrix."""
        return ProtocolFits(states, protocol, self.plan.spec, self.plan.model, self.captured.partner)

    def meter(self) -> FunctionalMeter:
        """What measures the effect of patches on all evaluation windows (a context manager)."""
        return self.gate.meter()


@contextmanager
def open_workbench(
    spec: RunSpec, progress: Progress, *, model: Model | None = None, documents: Documents | None = None
) -> Iterator[Workbench]:
    """Plan, capture and check; a model or documents that are at hand are used instead of what the spec names.

    Raises:
        InputError: a field can't be used as it is.
        CorpusError: the text is too small for what was asked.
        ModelError: the model can't be loaded, or fails a check that numbers rest on.
    """
    for field in spec.swept:
        raise InputError(f"{field} has {len(spec.values(field))} values, but only a run sweeps; give one")
    if spec.executor != "local":
        raise InputError(f"executor is '{spec.executor}', but only a run has units for workers; leave it out")
    documents = documents or read_documents(spec)
    loaded = model or load_for(spec)
    with tempfile.TemporaryDirectory(prefix="deltalens-") as folder:
        plan = make_plan(spec, loaded, documents, Path(folder))
        captured = capture_states(plan, progress)
        yield Workbench(plan, captured, open_gate(plan, captured.exclusions.included, progress))

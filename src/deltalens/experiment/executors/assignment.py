"""What a process elsewhere needs in order to measure units exactly as the process that planned the run would."""

from dataclasses import dataclass
from pathlib import Path

from deltalens.errors import ExecutorError
from deltalens.experiment.captured import Captured, committed_states
from deltalens.experiment.corpus import Corpus
from deltalens.experiment.gate import Gate, Proof
from deltalens.experiment.layer import LayerUnits
from deltalens.experiment.plan import Plan, load_for, run_fingerprint
from deltalens.experiment.spec import RunSpec
from deltalens.experiment.store import RunFolder


@dataclass(frozen=True)
class Assignment:
    """Everything beside the weights and the captured states: those are read from the model's name and the folder.

    Attributes:
        spec: the run's spec.
        model: the model's name, or its path made absolute.
        corpus: the windows; workers read no text and cut none.
        layers: the transitions that are measured.
        window: tokens per window.
        folder: the run folder, absolute, on a file system that all workers share.
        fingerprint: the run's fingerprint, which a worker must arrive at by itself.
        proof: what the gate proved; workers don't repeat it.
    """

    spec: RunSpec
    model: str
    corpus: Corpus
    layers: tuple[int, ...]
    window: int
    folder: Path
    fingerprint: str
    proof: Proof

    @classmethod
    def of(cls, captured: Captured, gate: Gate) -> "Assignment":
        """The assignment of a run that is captured and proved."""
        plan = captured.plan
        named = Path(plan.spec.model)
        model = str(named.resolve()) if named.exists() else plan.spec.model
        folder = plan.folder.folder.resolve()
        return cls(plan.spec, model, plan.corpus, plan.layers, plan.window, folder, plan.fingerprint, gate.proof)

    def take_up(self, device: str | None) -> LayerUnits:
        """Load the model on ``device``, read the captured states, and be ready to measure.

        Raises:
            ExecutorError: this process has other weights or versions.
            StoreError: it doesn't see the captured states.
        """
        model = load_for(self.spec.model_copy(update={"model": self.model, "device": device}))
        if run_fingerprint(self.spec, model, self.corpus) != self.fingerprint:
            raise ExecutorError(
                f"a worker's weights of {self.spec.model} or its versions of deltalens, torch or transformers differ "
                f"from the driver's; install the same versions and give the same model on every node"
            )
        folder = RunFolder(self.folder)
        plan = Plan(self.spec, model, self.corpus, self.layers, self.window, folder, self.fingerprint)
        captured = committed_states(plan)
        return LayerUnits(captured, Gate(plan, captured.exclusions.included, self.proof))

"""A run from plan to finished folder: check, capture, exclude, then fit, measure and commit unit by unit."""

from contextlib import closing

from deltalens.experiment.captured import Captured, capture_states
from deltalens.experiment.executors import Executor, executor_for
from deltalens.experiment.gate import Gate, open_gate
from deltalens.experiment.manifest import finished_manifest, search_entry, started_manifest
from deltalens.experiment.plan import Plan
from deltalens.experiment.progress import Progress
from deltalens.experiment.store import StoredRun, UnitKey


def execute(plan: Plan, progress: Progress) -> StoredRun:
    """Do what a plan says, or the part of it that isn't committed yet; return the finished run."""
    folder = plan.folder
    with executor_for(plan, progress) as executor, folder.locked(), folder.left_empty_on_refusal():
        manifest = started_manifest(plan)
        folder.write_manifest(manifest)
        captured = capture_states(plan, progress)
        gate = open_gate(plan, captured.exclusions.included, progress)
        missing = [key for key in plan.keys if not folder.has_unit(key, plan.fingerprint)]
        _measure_units(executor, captured, gate, missing, progress)
        folder.write_table("pool", captured.pool_tokens)
        tables = folder.merge_units(plan.keys)
        search = search_entry(plan.spec, folder.summaries(plan.keys))
        folder.write_manifest(finished_manifest(manifest, captured, gate, tables) | {"search": search})
        if not plan.spec.keep_states:
            folder.drop_states()
    return StoredRun(folder.folder)


def _measure_units(
    executor: Executor, captured: Captured, gate: Gate, missing: list[UnitKey], progress: Progress
) -> None:
    with (
        progress.step("fit and measure", len(missing)) as advance,
        closing(executor.commit(captured, gate, missing)) as committed,
    ):
        for _ in committed:
            advance(1)

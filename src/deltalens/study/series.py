"""The engine of every study: one run after another, each in its folder; a failure is noted and the rest go on."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from deltalens.api import Run, check_folder, run_spec
from deltalens.errors import DeltalensError, StoreError
from deltalens.experiment.documents import Documents
from deltalens.experiment.plan import measuring_versions
from deltalens.experiment.progress import Progress
from deltalens.models import Model
from deltalens.study.members import Member, check_names
from deltalens.study.record import STUDY_FILE, Kind, Outcome, Record, check_same, read_record, write_record


@dataclass(frozen=True)
class Series:
    """Runs to make, with what they share.

    Attributes:
        kind: the verb.
        title: one line for a reader.
        members: the runs.
        model: a loaded model instead of what the specs name, where all runs are on it.
        documents: a text at hand instead of what the specs name.
    """

    kind: Kind
    title: str
    members: tuple[Member, ...]
    model: Model | None = None
    documents: Documents | None = None


def open_series(series: Series, folder: Path, *, resume: bool) -> Record:
    """The record that a series starts or goes on from; nothing is run, and a folder of another study is refused.

    Raises:
        InputError: names of runs that can't be folders.
        StoreError: the folder can't be used, or holds another study.
    """
    check_names(series.members)
    check_folder(folder, resume, STUDY_FILE)
    fresh = Record(series.kind, series.title, tuple(Outcome(member) for member in series.members))
    if not (folder / STUDY_FILE).exists():
        return fresh
    recorded = read_record(folder)
    check_same(recorded, series.members, folder)
    return recorded


def recorded_series(folder: Path) -> Series | None:
    """The series that a folder holds, so that it can go on; None where it holds none."""
    if not (folder / STUDY_FILE).exists():
        return None
    record = read_record(folder)
    return Series(record.kind, record.title, tuple(record.members))


def run_series(
    series: Series, folder: Path, *, resume: bool, progress: Progress, after: Callable[[Path, Record], Record]
) -> Record:
    """Make every run that isn't there yet, then what is written from all of them.

    Args:
        series: the runs.
        folder: where each gets a folder of its own.
        resume: whether ``folder`` may hold a part of them.
        progress: what shows the progress.
        after: writes tables and pages from the finished runs; returns the record with its warnings.

    Returns:
        The record, as ``study.json`` has it.
    """
    record = open_series(series, folder, resume=resume)
    write_record(folder, record)
    for number, member in enumerate(series.members):
        progress.note(f"{member.name} ({number + 1} of {len(series.members)})")
        record = _noted(folder, record, number, replace(record.outcomes[number], state="running", reason=None))
        record = _noted(folder, record, number, _outcome(series, member, folder, record.outcomes[number], progress))
        failure = record.outcomes[number].reason
        if failure is not None:
            progress.note(f"{member.name} failed: {failure}")
    record = after(folder, record)
    write_record(folder, record)
    return record


def _noted(folder: Path, record: Record, number: int, outcome: Outcome) -> Record:
    outcomes = (*record.outcomes[:number], outcome, *record.outcomes[number + 1 :])
    changed = replace(record, outcomes=outcomes)
    write_record(folder, changed)
    return changed


def _outcome(series: Series, member: Member, folder: Path, before: Outcome, progress: Progress) -> Outcome:
    at_hand = series.model is not None or series.documents is not None
    if not at_hand and is_finished(member, folder / member.name):
        return replace(before, state="done", reason=None)
    began = time.monotonic()
    try:
        run_spec(member.spec, series.model, series.documents, out=folder / member.name, resume=True, progress=progress)
    except DeltalensError as error:
        reason: str | None = str(error)
    except Exception as error:  # noqa: BLE001 - a study of hours goes on with its other models, whatever one of them does
        reason = str(DeltalensError(f"{type(error).__name__}: {error}"))
    else:
        reason = None
    return Outcome(member, "done" if reason is None else "failed", reason, time.monotonic() - began)


def is_finished(member: Member, folder: Path) -> bool:
    """Whether a folder holds this very run with its report, finished, undamaged and made by these versions."""
    if not (folder / "report.html").is_file():
        return False
    try:
        run = Run(folder)
        run.summary()
        run.tokens(layer=-1)  # no such layer, but the whole table is checked
    except StoreError:
        return False
    versions = run.manifest.get("versions") or {}
    return (run.manifest.get("spec") or {}) == member.spec.model_dump(mode="json") and all(
        versions.get(name) == version for name, version in measuring_versions().items()
    )

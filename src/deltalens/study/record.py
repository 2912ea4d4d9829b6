"""What a study's folder says of itself: ``study.json`` with every run's spec, state and reason of failure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from deltalens.errors import DeltalensError, StoreError
from deltalens.experiment.commit import read_json, write_json
from deltalens.experiment.spec import RunSpec
from deltalens.study.members import Member, check_names

STUDY_FILE = "study.json"
SCHEMA_VERSION = 1

Kind = Literal["reproduce", "repeat", "checkpoints"]
State = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True)
class Outcome:
    """One run of a study and what became of it.

    Attributes:
        member: the run.
        state: `waiting`, `running`, `done` or `failed`.
        reason: why it failed, in one line.
        seconds: how long its last try took.
    """

    member: Member
    state: State = "waiting"
    reason: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Record:
    """The content of ``study.json``."""

    kind: Kind
    title: str
    outcomes: tuple[Outcome, ...]
    warnings: tuple[str, ...] = ()

    @property
    def members(self) -> list[Member]:
        """The runs, in order."""
        return [outcome.member for outcome in self.outcomes]

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The runs that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.state == "failed")

    @property
    def finished(self) -> bool:
        """Whether every run was tried to its end."""
        return all(outcome.state in ("done", "failed") for outcome in self.outcomes)


def write_record(folder: Path, record: Record) -> None:
    """Put ``study.json`` in place in one step."""
    content = {
        "schema": SCHEMA_VERSION,
        "kind": record.kind,
        "title": record.title,
        "status": "complete" if record.finished else "running",
        "warnings": list(record.warnings),
        "runs": [_outcome_fields(outcome) for outcome in record.outcomes],
    }
    write_json(folder / STUDY_FILE, content)


def read_record(folder: Path) -> Record:
    """Read ``study.json``.

    Raises:
        StoreError: the folder holds no study, or one of another version, or it is damaged.
    """
    content = read_json(folder / STUDY_FILE)
    if content.get("schema") != SCHEMA_VERSION:
        raise StoreError(
            f"{folder / STUDY_FILE} has schema {content.get('schema')!r}, this version reads {SCHEMA_VERSION}; "
            f"use the version of deltalens that wrote it"
        )
    try:
        outcomes = tuple(_outcome(fields) for fields in content["runs"])
        kind, title, warnings = content["kind"], str(content["title"]), tuple(map(str, content["warnings"]))
        if kind not in get_args(Kind):
            raise ValueError(kind)
        check_names([outcome.member for outcome in outcomes])
    except (KeyError, TypeError, ValueError, AttributeError, DeltalensError) as error:
        raise StoreError(
            f"{folder / STUDY_FILE} isn't what a study wrote ({type(error).__name__}); give another folder"
        ) from None
    return Record(kind, title, outcomes, warnings)


def check_same(recorded: Record, members: Sequence[Member], folder: Path) -> None:
    """Refuse to continue a study with other runs than it was started with, naming the first difference."""
    before, now = ({m.name: m.spec for m in group} for group in (recorded.members, members))
    for name in [*before, *now]:
        if name not in now or name not in before:
            which = "was part of it and isn't now" if name not in now else "wasn't part of it"
            raise StoreError(f"{folder} holds another study: the run {name} {which}; give another folder")
        ours, theirs = now[name].numeric_fields(), before[name].numeric_fields()
        changed = next((field for field in ours if ours[field] != theirs[field]), None)
        if changed is not None:
            raise StoreError(
                f"{folder} holds another study: {changed} of the run {name} was {theirs[changed]!r}, is "
                f"{ours[changed]!r}; use the same settings to resume, or give another folder"
            )


def _outcome_fields(outcome: Outcome) -> dict[str, Any]:
    member = outcome.member
    return {
        "name": member.name,
        "group": member.group,
        "state": outcome.state,
        "reason": outcome.reason,
        "seconds": None if outcome.seconds is None else round(outcome.seconds, 1),
        "blocks": member.blocks,
        "megabytes": member.megabytes,
        "spec": member.spec.model_dump(mode="json"),
    }


def _outcome(fields: dict[str, Any]) -> Outcome:
    if fields["state"] not in get_args(State):
        raise ValueError(fields["state"])
    member = Member(
        name=str(fields["name"]),
        group=str(fields["group"]),
        spec=RunSpec.parse(**fields["spec"]),
        blocks=fields.get("blocks"),
        megabytes=fields.get("megabytes"),
    )
    return Outcome(member, fields["state"], fields.get("reason"), fields.get("seconds"))

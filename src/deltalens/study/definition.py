"""A study as data: a YAML file with shared fields and entries, read, validated and turned into runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deltalens.errors import InputError
from deltalens.experiment.spec import RunSpec
from deltalens.study.members import Member, check_names, distinct_items, folder_name, numbered

STUDIES = Path(__file__).parent / "studies"
PAPER, SMALL = STUDIES / "paper.yaml", STUDIES / "small.yaml"


class Entry(BaseModel):
    """One model of a study: a name, the fields of its run, and what the plan can say before the model is loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = Field(None, min_length=1, description="Of the run's folder. Default: the model's last part.")
    blocks: int | None = Field(None, ge=1, description="How many blocks the model has.")
    megabytes: float | None = Field(None, gt=0, description="Size of its weights.")
    run: dict[str, Any] = Field(description="Fields of the run, model among them; they win over the shared ones.")


class StudyDefinition(BaseModel):
    """A study: a title, fields that all runs share, and its entries."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str = Field(min_length=1, description="One line.")
    about: str = Field("", description="What it is for.")
    shared: dict[str, Any] = Field(default_factory=dict, description="Fields of every run.")
    entries: tuple[Entry, ...] = Field(min_length=1, description="The models.")

    def members(self) -> list[Member]:
        """The runs, every field of each validated.

        Raises:
            InputError: an entry can't be used as it is; the line names it.
        """
        specs = [self._spec(entry, number) for number, entry in enumerate(self.entries, start=1)]
        names = numbered([_name(entry, spec) for entry, spec in zip(self.entries, specs, strict=True)])
        members = [
            Member(name, name, spec, entry.blocks, entry.megabytes)
            for name, entry, spec in zip(names, self.entries, specs, strict=True)
        ]
        check_names(members)
        return members

    def only(self, models: Sequence[str]) -> "StudyDefinition":
        """The same study on these models: entries by name or model, anything else as a new entry."""
        models = distinct_items(models, "models")
        return self.model_copy(update={"entries": tuple(self._entry(model) for model in models)})

    def _entry(self, model: str) -> Entry:
        known = (entry for entry in self.entries if model in (entry.name, entry.run.get("model")))
        return next(known, Entry(run={"model": model}))  # type: ignore[call-arg]

    def _spec(self, entry: Entry, number: int) -> RunSpec:
        label = entry.name or entry.run.get("model") or f"number {number}"
        if "model" not in entry.run:
            raise InputError(f"entry {label} of the study names no model; give run: {{model: NAME}}")
        try:
            return RunSpec.parse(**{str(name): value for name, value in (self.shared | entry.run).items()})
        except InputError as error:
            raise InputError(f"entry {label} of the study: {error}") from None


def read_definition(path: Path) -> StudyDefinition:
    """Read a study from a YAML file.

    Raises:
        InputError: the file can't be read, or isn't a study; one line that says where.
    """
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InputError(f"the study {path} can't be read: {reason}; give a YAML file") from None
    if not isinstance(loaded, Mapping):
        raise InputError(f"the study {path} holds no fields; it needs a title and entries")
    try:
        return StudyDefinition.model_validate(dict(loaded))
    except ValidationError as error:
        raise InputError(f"the study {path}: {_first_fault(error)}") from None


def _first_fault(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "the file"
    if first["type"] == "extra_forbidden":
        known = Entry if first["loc"][0] == "entries" else StudyDefinition
        return f"'{place}' is no field of a study; the fields are {', '.join(known.model_fields)}"
    arrived = "" if first["type"] == "missing" else f", got {first['input']!r}"
    return f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}{arrived}"


def _name(entry: Entry, spec: RunSpec) -> str:
    return entry.name or folder_name(spec.model)

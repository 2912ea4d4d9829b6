"""Everything public is documented: in the reference, and in its docstring with shapes, errors, source and example."""

import inspect
import re
from pathlib import Path

import pytest
from typer.main import get_command

import deltalens as dl
from deltalens.cli import app
from deltalens.experiment.spec import RunSpec

ROOT = Path(__file__).parents[2]
PUBLIC = [name for name in dl.__all__ if name != "__version__"]
VERBS = [name for name in PUBLIC if inspect.isfunction(getattr(dl, name))]
NOUNS = [name for name in PUBLIC if name not in VERBS and not issubclass(getattr(dl, name), Exception)]


def sections(name: str) -> set[str]:
    return set(re.findall(r"^(\w+):$", inspect.getdoc(getattr(dl, name)) or "", re.MULTILINE))


def test_the_reference_names_everything_public() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf8")
    named = set(re.findall(r"^\.\. auto\w+:: (?:deltalens\.)?(\w+)$", page, re.MULTILINE))
    assert set(PUBLIC) <= named


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_says_what_it_takes_gives_and_raises(name: str) -> None:
    found = sections(name)
    assert {"Args", "Raises", "Source", "Example"} <= found
    assert found & {"Returns", "Yields"}


@pytest.mark.parametrize("name", NOUNS)
def test_a_noun_says_what_it_holds_or_shows_it(name: str) -> None:
    assert sections(name) & {"Attributes", "Example"}
    assert inspect.getdoc(getattr(dl, name)) != inspect.getdoc(object)


def test_every_field_and_option_says_what_it_is() -> None:
    assert all(field.description for field in RunSpec.model_fields.values())
    command = get_command(app)
    assert all(child.help and all(p.help for p in child.params) for child in command.commands.values())

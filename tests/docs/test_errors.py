"""The symptoms on the error pages are messages that the code can raise, word for word but for what was given."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "errors").glob("*.md"))
FEWEST_LETTERS = 12  # a template of less text than this would match anything


def templates() -> list[re.Pattern[str]]:
    """Every string of the package as a pattern, with anything in place of what is filled in."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            parts = list(pieces(node))
            if len("".join(part for part in parts if part)) >= FEWEST_LETTERS:
                found.append(
                    re.compile("".join(".*" if part is None else re.escape(part) for part in parts), re.DOTALL)
                )
    return found


def pieces(node: ast.AST) -> Iterator[str | None]:
    """The constant parts of a string, and None for each part that is filled in."""
    if isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def symptoms(page: Path) -> list[str]:
    block = re.search(r"## Symptom\n+```text\n(.*?)```", page.read_text(encoding="utf8"), re.DOTALL)
    assert block, f"{page.name} shows no symptom"
    return [line for line in block[1].splitlines() if line]


@pytest.fixture(scope="module")
def known() -> list[re.Pattern[str]]:
    return templates()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_symptom_is_what_the_code_says(page: Path, known: list[re.Pattern[str]]) -> None:
    for line in symptoms(page):
        # pydantic words the refusal of a value; every other message is the package's own
        assert "input should be" in line or any(pattern.fullmatch(line) for pattern in known), line


def test_a_message_that_nothing_raises_is_found(known: list[re.Pattern[str]]) -> None:
    assert not any(pattern.fullmatch("the moon is too large; lower the moon") for pattern in known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_symptom_cause_and_fix(page: Path) -> None:
    text = page.read_text(encoding="utf8")
    assert [heading for heading in re.findall(r"^## (.+)$", text, re.MULTILINE) if heading != "Try it"] == [
        "Symptom", "Cause", "Fix",
    ]  # fmt: skip
    assert f"errors/{page.stem}" in (ROOT / "docs" / "errors.md").read_text(encoding="utf8")

"""Every code block of the README and the documentation runs, and every shell line names commands that exist.

A page's Python blocks share a namespace, and its blocks a working folder that holds what the README makes
(``runs/first``) and some texts. Windows are short here, so that runs of default size are small. A block after
``<!-- not run: REASON -->`` is only compiled or parsed; one after ``<!-- saved as NAME -->`` is written to that file.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sybil import Example
from sybil.document import Document
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser
from typer.main import get_command

import deltalens.experiment.plan as plan
from deltalens.cli import app
from deltalens.experiment.builtin_text import builtin_topics

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)

SHORT_WINDOW = 16
MARKER = re.compile(r"<!-- (not run|saved as):? ([^\n]+) -->\s*\Z")


def marker(example: Example) -> tuple[str, str]:
    """The kind and text of the comment right before a block; empty without one."""
    found = MARKER.search(example.document.text[: example.start])
    return (found[1], found[2]) if found else ("", "")


def evaluate_python(example: Example) -> None:
    if marker(example)[0] == "not run":
        compile(example.parsed, example.path, "exec")
    else:
        PythonEvaluator()(example)


def evaluate_shell(example: Example) -> None:
    for line in commands(example.parsed):
        parse(line)
        if marker(example)[0] != "not run":
            code = app(line, prog_name="deltalens", standalone_mode=False)
            assert code in (None, 0), f"deltalens {shlex.join(line)} ended with {code}"


def evaluate_file(example: Example) -> None:
    kind, name = marker(example)
    if kind == "saved as":
        Path(name).write_text(example.parsed)


def commands(block: str) -> Iterator[list[str]]:
    """The arguments of each line that calls deltalens; what is piped or redirected is left out."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(re.split(r"[|>]", line)[0], comments=True)
        if words and Path(words[0]).name == "deltalens":
            yield words[1:]


def parse(arguments: list[str]) -> None:
    """Fail unless the command exists and takes these options."""
    command, context = get_command(app), None
    while hasattr(command, "commands"):
        context = command.make_context(command.name or "deltalens", list(arguments), parent=context)
        name, command, arguments = command.resolve_command(context, context._protected_args + context.args)
    command.make_context(name, arguments, parent=context)


PARSERS = [
    CodeBlockParser("python", evaluate_python),
    CodeBlockParser("bash", evaluate_shell),
    CodeBlockParser("yaml", evaluate_file),
    CodeBlockParser("text", evaluate_file),
]


def run_examples(path: Path) -> None:
    for example in Document.parse(str(path), *PARSERS).examples():
        example.evaluate()


@pytest.fixture(autouse=True, scope="module")
def short_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "LONGEST_DEFAULT_WINDOW", SHORT_WINDOW)
        yield


@pytest.fixture(scope="module")
def after_readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the README was followed, with texts as a user might have them."""
    folder = tmp_path_factory.mktemp("readme")
    topics = list(builtin_topics().values())
    (folder / "book.txt").write_text(topics[0])
    (folder / "books").mkdir()
    for number, text in enumerate(topics[:24]):
        (folder / "books" / f"{number}.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_examples(README)
    return folder


def test_the_readme_makes_a_run_and_its_report(after_readme: Path) -> None:
    assert (after_readme / "runs" / "first" / "summary.parquet").exists()
    assert "low_rank:8" in (after_readme / "report.html").read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT / "docs")))
def test_a_page_runs_from_its_first_block_to_its_last(
    path: Path, after_readme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(after_readme, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    run_examples(path)


@pytest.mark.parametrize(
    "line",
    ["run --nonsense 1", "sweep-all", "run --tokens", "report", "doctor tiny-gpt2 --tokens 5"],
)
def test_a_shell_line_that_cannot_work_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|requires|unexpected"):
        parse(shlex.split(line))


def test_a_python_block_that_fails_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError):
        run_examples(page)
    page.write_text("<!-- not run: it fails -->\n```python\nassert 1 == 2\n```\n")
    run_examples(page)

"""Where text comes from: strings, files, folders, Hub datasets, the built-in text. One `Document` each."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deltalens.errors import CorpusError
from deltalens.experiment.builtin_text import builtin_topics

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".jsonl")

#: What `dl.run` takes as text: a string is content, a path a file or folder, a sequence one document each.
TextSource = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Document:
    """A text that windows never cross, with the name that results show for it."""

    name: str
    text: str


@dataclass(frozen=True)
class Documents:
    """The documents of a run and their identity: a name to show and a SHA-256 over all texts, in order.

    ``in_python`` says that some were given as strings in Python, so that no command line can name them.
    """

    name: str
    items: tuple[Document, ...]
    in_python: bool = False

    @property
    def hash(self) -> str:
        """SHA-256 over every document's text, in order."""
        digest = hashlib.sha256()
        for document in self.items:
            content = document.text.encode("utf8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
        return digest.hexdigest()


def built_in_documents() -> Documents:
    """Help topics of CPython that the built-in models were never trained on."""
    return Documents("built-in", tuple(Document(name, text) for name, text in builtin_topics().items()))


def read_source(source: TextSource) -> Documents:
    """Documents from text given in Python: content, paths, or a sequence of either."""
    if isinstance(source, str):
        return _checked(Documents("text", (Document("text", source),), in_python=True))
    if isinstance(source, Path):
        return read_paths([source])
    items: list[Document] = []
    for number, item in enumerate(source):
        if isinstance(item, Path):
            items.extend(read_paths([item]).items)
        elif isinstance(item, str):
            items.append(Document(f"text {number}", item))
        else:
            raise CorpusError(f"text item {number} is a {type(item).__name__}; give strings or paths")
    return _checked(Documents("texts", tuple(items), in_python=True))


def read_paths(paths: Iterable[Path]) -> Documents:
    """Documents from files and folders: ``.txt`` is one document, ``.jsonl`` one per line, a folder its files."""
    given = list(paths)
    items = tuple(document for path in given for document in _read_path(path))
    return _checked(Documents(", ".join(path.name for path in given), items))


def read_dataset(name: str, *, most_documents: int = 20_000) -> Documents:
    """Documents of a Hub dataset, ``NAME`` or ``NAME:CONFIG:SPLIT`` (split ``train`` unless given), field ``text``."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise CorpusError(f"dataset {name!r} needs the extra 'datasets': pip install 'deltalens[datasets]'") from None
    dataset, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    try:
        rows = load_dataset(dataset, config or None, split=split or "train", streaming=True)
        items = tuple(
            Document(f"{dataset} {number}", str(row["text"]))
            for number, row in zip(range(most_documents), rows, strict=False)
        )
    except KeyError:
        raise CorpusError(f"dataset {name!r} has no field 'text'; name a dataset with one") from None
    except Exception as error:  # noqa: BLE001 - the hub client raises whatever its transport does
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorpusError(f"dataset {name!r} can't be read: {reason}") from None
    return _checked(Documents(name, items))


def _read_path(path: Path) -> Iterator[Document]:
    if _is_folder(path):
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        if not files:
            raise CorpusError(f"the folder {path} holds no text file; give one with {', '.join(TEXT_SUFFIXES)} files")
        for file in files:
            yield from _read_file(file, str(file.relative_to(path)))
    else:
        yield from _read_file(path, path.name)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError) as error:
        raise CorpusError(f"the path {path} can't be used: {getattr(error, 'strerror', None) or error}") from None


def _read_file(path: Path, name: str) -> Iterator[Document]:
    try:
        text = path.read_text(encoding="utf8")
    except FileNotFoundError:
        raise CorpusError(f"the text file {path} does not exist; check the path") from None
    except UnicodeDecodeError as error:
        raise CorpusError(f"the text file {path} isn't UTF-8 (byte {error.start}); convert it to UTF-8") from None
    except OSError as error:
        raise CorpusError(f"the text file {path} can't be read: {error.strerror}") from None
    if path.suffix != ".jsonl":
        yield Document(name, text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield Document(f"{name}:{number}", _json_text(line, path, number))


def _json_text(line: str, path: Path, number: int) -> str:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        raise CorpusError(
            f"line {number} of {path} isn't JSON; write one object with a field 'text' per line"
        ) from None
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise CorpusError(f"line {number} of {path} has no string field 'text'; write one object with it per line")
    return text


def _checked(documents: Documents) -> Documents:
    kept = tuple(document for document in documents.items if document.text.strip())
    if not kept:
        raise CorpusError("the text is empty; give a text with at least a few thousand tokens")
    for document in kept:
        if any("\ud800" <= character <= "\udfff" for character in document.text):
            raise CorpusError(
                f"document '{document.name}' holds half a character (a lone surrogate); mend its encoding"
            )
    # A text that comes twice would stand in the evaluation and in the pool that is held out from it.
    first = {document.text: document for document in reversed(kept)}
    distinct = tuple(document for document in kept if first[document.text] is document)
    return replace(documents, items=_named_apart(distinct))


def _named_apart(documents: tuple[Document, ...]) -> tuple[Document, ...]:
    """Number the names that come several times, so that a name says which document is meant."""
    seen: Counter[str] = Counter()
    apart = []
    for document in documents:
        seen[document.name] += 1
        count = seen[document.name]
        apart.append(document if count == 1 else Document(f"{document.name} ({count})", document.text))
    return tuple(apart)

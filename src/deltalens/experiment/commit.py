"""Files and folders that are either whole or not there: temporary name, fsync, rename, marker last."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from deltalens.errors import StoreError

MARKER = "complete.json"
_TEMPORARY = ".writing-"


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in place in one step."""
    with _one_line_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=_TEMPORARY, suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def require_file_place(path: Path) -> Path:
    """The path of a file that can be written, as far as can be told without writing; others are refused."""
    with _one_line_errors(path):
        if path.is_dir():
            raise StoreError(f"{path} is a folder; give the name of a file")
        existing = next(parent for parent in path.absolute().parents if parent.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise StoreError(f"{path} can't be written: {existing} takes no files; give another place")
    return path


def write_json(path: Path, content: object) -> None:
    """Write JSON in one step; NaN is refused, since no JSON reader has to take it."""
    text = json.dumps(content, indent=2, sort_keys=False, allow_nan=False, ensure_ascii=True)
    write_file(path, lambda temporary: _write_text(temporary, text + "\n"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or say in one line what is wrong with the file."""
    try:
        content = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist; the folder is no finished run, or it was damaged") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(
            f"{path} can't be read ({type(error).__name__}); it is damaged: run again with --resume"
        ) from None
    if not isinstance(content, dict):
        raise StoreError(f"{path} holds no JSON object; it is damaged: run again with --resume")
    return content


def commit_folder(folder: Path, marker: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary folder, add the marker with every file's size and hash, and put it in place."""
    with _one_line_errors(folder, "run again with --resume"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder.parent))
        try:
            write(temporary)
            files = {path.name: file_identity(path) for path in sorted(temporary.iterdir())}
            for path in temporary.iterdir():
                _sync(path)
            write_json(temporary / MARKER, {**marker, "files": files})
            if folder.exists():
                shutil.rmtree(folder)
            temporary.replace(folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def damage(folder: Path) -> str | None:
    """What is wrong with a committed folder in a few words, or None where every file is as it was committed."""
    try:
        marker = read_json(folder / MARKER)
    except StoreError as error:
        return str(error)
    files = marker.get("files")
    if not isinstance(files, dict):
        return f"{folder / MARKER} names no files"
    for name, identity in files.items():
        path = folder / str(name)
        if path.parent != folder or path.is_symlink() or not path.is_file():
            return f"{path} is missing"
        if file_identity(path) != identity:
            return f"{path} isn't what was written"
    return None


def file_identity(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def bytes_held(folder: Path) -> int:
    """Bytes of the files below a folder; one that another writer just removed counts nothing."""
    held = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            held += path.lstat().st_size if path.is_file() else 0
    return held


def remove_temporaries(folder: Path) -> None:
    """Remove what a killed writer left half-written."""
    for path in folder.rglob(f"{_TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def _one_line_errors(path: Path, then: str = "run again") -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StoreError(f"{path} can't be written: {reason}; mend that and {then}") from error


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""What can be said of a model before it is loaded: where its weights come from, how many blocks, how large."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltalens.models.builtin_models import BUILTIN_FOLDER, builtin_models
from deltalens.models.named import NAMED, cache_folder
from deltalens.models.opening import is_path

_BLOCK_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@dataclass(frozen=True)
class Glance:
    """A model from outside.

    Attributes:
        source: where its weights come from, in a few words.
        here: whether they are on this machine.
        blocks: how many, where a config or a card says so.
        megabytes: of the weights, where that is known.
    """

    source: str
    here: bool
    blocks: int | None = None
    megabytes: float | None = None


def glance(name: str, revision: str | None = None) -> Glance:
    """Look at a model without loading it and without asking the network.

    Args:
        name: what `load` takes.
        revision: of a Hub model.

    Returns:
        What is known. Unknown names count as the Hub's; whether it has them shows when they are loaded.

    Example:
        >>> glance("tiny-gpt2").blocks
        6
    """
    if name in builtin_models():
        return _folder(BUILTIN_FOLDER / name, "built in")
    if name in NAMED:
        kept = cache_folder() / f"{name}-{NAMED[name].version}.gguf"
        return Glance("package index", kept.is_file(), megabytes=NAMED[name].megabytes)
    path = Path(os.path.expanduser(name))
    if is_path(path.is_file):
        return Glance("GGUF file", True, megabytes=_megabytes([path]))
    if is_path(path.is_dir):
        return _folder(path, "folder")
    return _cached(name, revision)


def _cached(name: str, revision: str | None) -> Glance:
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except errors.HFValidationError:
        return Glance("nowhere", False)
    return _folder(Path(found).parent, "Hub, cached") if isinstance(found, str) else Glance("Hub", False)


def _folder(folder: Path, source: str) -> Glance:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf8"))
    except (OSError, ValueError):
        config = {}
    blocks = next((config[field] for field in _BLOCK_FIELDS if isinstance(config.get(field), int)), None)
    return Glance(source, True, blocks, _megabytes(sorted(folder.glob("*.safetensors"))))


def _megabytes(files: Sequence[Path]) -> float | None:
    return sum(path.stat().st_size for path in files) / 1e6 if files else None

"""From a name, a folder, a GGUF file or a transformers model to a `Model`, before anything about it is proven."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from deltalens.errors import InputError, ModelError
from deltalens.models.builtin_models import BUILTIN_FOLDER, TOKENIZER_FOLDER, builtin_models
from deltalens.models.discovery import find_blocks
from deltalens.models.handling import apply_handling
from deltalens.models.hub import resolve_on_hub
from deltalens.models.identity import identify
from deltalens.models.model import Model, Source
from deltalens.models.named import NAMED, fetch
from deltalens.models.sources import Loaded, read_folder, read_gguf, read_hub

_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}


def open_model(
    name: Any,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: Any = None,
) -> Model:
    """Load a model and locate its blocks without the checks of `load`; for the doctor, which reports them instead."""
    wanted = _dtype(dtype)
    loaded, label, source = _read(name, wanted, device, revision, trust_remote_code, tokenizer)
    hf = loaded.hf.eval()
    if device is not None and str(device) != "auto":
        hf = _moved(hf, device)
    found = find_blocks(hf)
    apply_handling(hf, found.architecture)
    identity = identify(hf, label, source, loaded.revision)
    model = Model(hf, loaded.tokenizer, found.blocks, identity, found.architecture, found.kinds)
    _check_vocabulary(model)
    return model


def _read(
    name: Any, dtype: torch.dtype | None, device: Any, revision: str | None, trusted: bool, tokenizer: Any
) -> tuple[Loaded, str, Source]:
    if not isinstance(name, (str, Path)):
        return _in_memory(name, dtype, tokenizer), _label_of(name), "object"
    text, path, spread = str(name), Path(os.path.expanduser(name)), str(device) == "auto"
    if text in builtin_models():
        folder, plain = BUILTIN_FOLDER / text, dtype or torch.float32
        return read_folder(folder, plain, spread=spread, tokenizer_folder=TOKENIZER_FOLDER), text, "built-in"
    if text in NAMED:
        return read_gguf(fetch(NAMED[text]), dtype or torch.float32), text, "named"
    if is_path(path.is_file):
        if path.suffix != ".gguf":
            raise ModelError(f"{text} is a file, but not a GGUF one; give the folder that holds config.json.")
        return read_gguf(path, dtype or torch.float32), text, "gguf"
    if is_path(path.is_dir):
        return read_folder(path, dtype, trusted=trusted, spread=spread), text, "folder"
    if text.startswith((".", "~", "/")) or text.endswith(".gguf") or text.count("/") > 1:
        raise ModelError(f"There is no folder or file {text}; check the path.")
    found = resolve_on_hub(text, revision, suggest(text))
    return read_hub(found, dtype, trusted=trusted, spread=spread), text, "hub"


def suggest(name: str) -> list[str]:
    """Return the built-in and named models whose names are near."""
    return difflib.get_close_matches(name, [*builtin_models(), *NAMED], n=3, cutoff=0.5)


def is_path(question: Callable[[], bool]) -> bool:
    """The answer to a question about a path; a name that can't be a path at all is neither file nor folder."""
    try:
        return question()
    except (OSError, ValueError):
        return False


def _in_memory(hf: Any, dtype: torch.dtype | None, tokenizer: Any) -> Loaded:
    from transformers import PreTrainedModel

    if not isinstance(hf, PreTrainedModel):
        raise InputError(f"A model is a name, a path or a transformers model; got {type(hf).__name__}.")
    return Loaded(hf if dtype is None else hf.to(dtype), tokenizer)


def _label_of(hf: Any) -> str:
    return getattr(hf, "name_or_path", "") or type(hf).__name__


def _moved(hf: Any, device: torch.device | str) -> Any:
    with _as_input_error(f"The device {device} can't be used"):
        return hf.to(torch.device(device))


@contextlib.contextmanager
def _as_input_error(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AssertionError, ValueError) as error:
        raise InputError(f"{what}: {str(error).splitlines()[0]}") from error


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise InputError(f"The dtype {dtype} is unknown; choose one of {', '.join(_DTYPES)}.")
    found: torch.dtype = _DTYPES[dtype]
    return found


def _check_vocabulary(model: Model) -> None:
    if model.tokenizer is None:
        return
    known = len(model.tokenizer)
    if known > model.vocabulary:
        raise ModelError(
            f"{model.identity.name}: the tokenizer has {known} tokens, the model's embedding {model.vocabulary}; "
            "they don't belong together."
        )

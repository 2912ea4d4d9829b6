"""Reading checkpoints with transformers: folders, hub snapshots and GGUF files; every failure becomes one line."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltalens.errors import ModelError
from deltalens.models.checks import first_line
from deltalens.models.hub import TOKENIZER_FILES, HubModel


@dataclass(frozen=True)
class Loaded:
    """A transformers model, its tokenizer or None, and the commit if it came from the Hub."""

    hf: Any
    tokenizer: Any
    revision: str | None = None


def read_folder(
    folder: Path,
    dtype: torch.dtype | None,
    *,
    trusted: bool = False,
    spread: bool = False,
    tokenizer_folder: Path | None = None,
) -> Loaded:
    """Read a folder written by `save_pretrained`.

    Args:
        folder: Holds `config.json` and weights.
        dtype: None for the checkpoint's own.
        trusted: Whether code in the folder may run.
        spread: Whether to spread the model over all devices.
        tokenizer_folder: Where the tokenizer lies, if elsewhere.

    Returns:
        Model and tokenizer.

    Raises:
        ModelError: No `config.json`, or weights that are missing, damaged or of another shape.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"The folder {folder} has no config.json; give one written by save_pretrained.")
    if not any(folder.glob("*.safetensors")):
        pickled = next((path.name for path in sorted(folder.glob("*.bin"))), None)
        found = f"only pickled weights ({pickled}), which aren't read" if pickled else "no weights"
        raise ModelError(f"The folder {folder} has {found}; save them as safetensors with save_pretrained.")
    hf = _read_weights(str(folder), dtype, trust_remote_code=trusted, spread=spread, local_files_only=True)
    return Loaded(hf, _read_tokenizer(tokenizer_folder or folder, trusted))


def read_hub(found: HubModel, dtype: torch.dtype | None, *, trusted: bool, spread: bool) -> Loaded:
    """Read a model that `resolve_on_hub` found; arguments as in `read_folder`."""
    where = {"revision": found.revision, "local_files_only": found.only_cached}
    hf = _read_weights(found.name, dtype, trust_remote_code=trusted, spread=spread, **where)
    tokenizer = _tokenizer_from(found.name, trust_remote_code=trusted, **where) if found.has_tokenizer else None
    return Loaded(hf, tokenizer, found.revision)


def read_gguf(path: Path, dtype: torch.dtype) -> Loaded:
    """Read a GGUF file into an ordinary transformers model, which can be cast and saved.

    Args:
        path: The file.
        dtype: Of the result; the quantised weights are first read as float32.

    Returns:
        Model and tokenizer.

    Raises:
        ModelError: The file is damaged, or of an architecture that transformers doesn't read from GGUF.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    # The bar of the GGUF reader has no switch of its own.
    silent = contextlib.redirect_stderr(io.StringIO())
    with _one_line(f"The GGUF file {path} can't be read"), quiet(), silent, _parsed_once():
        quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    config = copy.deepcopy(quantised.config)
    # A model that came from GGUF refuses to be cast or saved; one built from the config with the same state doesn't.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with quiet():
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    return Loaded(plain.to(dtype), tokenizer)


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    # transformers parses the file anew for the config, the weights and the tokenizer: most of the time that it takes.
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _read_weights(name: str, dtype: torch.dtype | None, *, spread: bool, **where: Any) -> Any:
    from transformers import AutoModelForCausalLM

    placement = {"device_map": "auto"} if spread else {}
    with _one_line(f"The model {name} can't be read"), quiet():
        hf, report = AutoModelForCausalLM.from_pretrained(
            name,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            output_loading_info=True,
            **placement,
            **where,
        )
    absent = sorted(report["missing_keys"]) + sorted(str(key[0]) for key in report["mismatched_keys"])
    if absent:
        raise ModelError(
            f"The model {name} lacks {len(absent)} of its weights, such as {absent[0]}; they would be random numbers."
        )
    return hf


def _read_tokenizer(folder: Path, trusted: bool) -> Any:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return _tokenizer_from(str(folder), trust_remote_code=trusted, local_files_only=True)


def _tokenizer_from(name: str, **where: Any) -> Any:
    from transformers import AutoTokenizer

    with _one_line(f"The tokenizer of {name} can't be read"), quiet():
        return AutoTokenizer.from_pretrained(name, **where)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing bars and advice inside the `with`; errors still raise."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    # Readers of configs, weights and tokenizers raise nearly anything on damaged files.
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(f"{what}: it brings its own code, which runs only with trust_remote_code.") from error
        raise ModelError(f"{what}: {first_line(error)}") from error

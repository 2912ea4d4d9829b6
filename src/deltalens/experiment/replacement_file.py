"""Replacements as files: safetensors with everything in the header that says what they are; nothing in them runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deltalens.core.maps import parse_map
from deltalens.core.maps.forms import form_of, rebuild
from deltalens.errors import InputError, StoreError
from deltalens.experiment.commit import write_file
from deltalens.models import ModelIdentity
from deltalens.models.bypass import OutputKind
from deltalens.models.replacement import Replacement, ReplacementFacts

FORMAT, SCHEMA = "deltalens.replacement", "1"
CONVENTION = "h_{l+1} = T(h_l): T stands for the whole block and includes the residual stream; states are rows"

_CONTAINERS: dict[str, type | None] = {"tensor": None, "tuple": tuple, "list": list}


def file_name(layer: int, map: str) -> str:
    """Such as ``03.low_rank-8.safetensors``."""
    return f"{layer:02d}.{map.replace(':', '-')}.safetensors"


def write_replacement(path: Path, replacement: Replacement, fit: dict[str, Any]) -> None:
    """Write a replacement in one step; ``fit`` says how it was fitted.

    Raises:
        StoreError: the file can't be written.
    """
    facts = replacement.facts
    tensors = {name: tensor.cpu() for name, tensor in replacement.parameters_by_name.items()}
    container = facts.output.container
    metadata = {
        "format": FORMAT,
        "schema": SCHEMA,
        "convention": CONVENTION,
        "map": facts.map,
        "formula": replacement.formula,
        "layer": str(facts.layer),
        "width": str(facts.width),
        "dtype": _dtype(tensors),
        "model": json.dumps(asdict(facts.model)),
        "output": json.dumps(
            {
                "container": "tensor" if container is None else "list" if container is list else "tuple",
                "carried": facts.output.carried,
            }
        ),
        "cache_layer": json.dumps(facts.cache_layer),
        "fit": json.dumps(fit),
    }
    write_file(path, lambda temporary: save_file(tensors, temporary, metadata))


def load_replacement(path: str | Path) -> Replacement:
    """Read a replacement, a module that stands in for one block: ``h_{l+1} = T(h_l)``.

    Args:
        path: a file that `fit_replacements` wrote.

    Returns:
        The module, on the CPU, in eval mode; ``replaced_blocks`` checks that it belongs to a model.

    Raises:
        StoreError: the file is missing, damaged, or holds something else.

    Source:
        The file format is this package's own, on safetensors.

    Example:
        >>> import deltalens as dl
        >>> dl.load_replacement("no/such.safetensors")
        Traceback (most recent call last):
        deltalens.errors.StoreError: no/such.safetensors can't be read as a replacement: there is no such file
    """
    where = Path(path)
    try:
        if not where.is_file():
            raise InputError("there is no such file")
        with safe_open(where, framework="pt") as reader:
            metadata = reader.metadata() or {}
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 - no mapping
        facts = _facts(metadata)
        if metadata.get("dtype") != _dtype(tensors):
            raise InputError(f"its header says {metadata.get('dtype')!r}, its parameters are {_dtype(tensors)!r}")
        return Replacement(rebuild(facts.map, tensors, facts.width), facts).eval()
    except (InputError, SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise StoreError(f"{where} can't be read as a replacement: {reason}") from None


def _facts(metadata: dict[str, str]) -> ReplacementFacts:
    if metadata.get("format") != FORMAT:
        raise InputError(f"it isn't one (format {metadata.get('format')!r}); give a file of deltalens replace")
    if metadata.get("schema") != SCHEMA:
        raise InputError(f"it has schema {metadata.get('schema')!r}, this version reads {SCHEMA}")
    try:
        map, layer, width = parse_map(metadata["map"]).name, int(metadata["layer"]), int(metadata["width"])
        identity = ModelIdentity(**_json(metadata, "model", dict))
        output = _json(metadata, "output", dict)
        kind = OutputKind(_CONTAINERS[output["container"]], tuple(output["carried"]))
        cache_layer = _json(metadata, "cache_layer", int | None)
    except (KeyError, TypeError, RecursionError) as error:
        raise InputError(f"its header is damaged ({type(error).__name__}: {error})") from None
    texts = (identity.name, identity.weight_hash, *(name for name in kind.carried if name is not None))
    if layer < 0 or width < 1 or not all(isinstance(text, str) for text in texts):
        raise InputError(f"its header is damaged (layer {layer}, width {width})")
    if metadata.get("formula") != form_of(map).formula or metadata.get("convention") != CONVENTION:
        raise InputError(f"it states another formula or convention than this version's for the map '{map}'")
    return ReplacementFacts(map, layer, width, identity, kind, cache_layer)


def _json(metadata: dict[str, str], key: str, kind: Any) -> Any:
    value = json.loads(metadata[key])
    if not isinstance(value, kind):
        raise TypeError(f"{key} is a {type(value).__name__}")
    return value


def _dtype(tensors: dict[str, Tensor]) -> str:
    return " ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))

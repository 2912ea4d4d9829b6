"""Who a model is: the hash of its weights and the facts that decide whether two runs may be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deltalens.errors import ModelError
from deltalens.models.model import ModelIdentity, Source

_CHUNK = 1 << 24


def identify(hf: Any, name: str, source: Source, revision: str | None = None) -> ModelIdentity:
    """Read a model's identity; every weight is read once, for the hash and to find NaN.

    Args:
        hf: A transformers model.
        name: As it was asked for.
        source: Where it came from.
        revision: Commit on the Hub.

    Returns:
        The identity.

    Raises:
        ModelError: A weight is NaN or infinite.
    """
    config = hf.config
    return ModelIdentity(
        name=name,
        source=source,
        revision=revision,
        weight_hash=weight_hash(hf),
        model_type=config.model_type,
        architecture=type(hf).__name__,
        parameters=sum(p.numel() for p in hf.parameters()),
        dtype=str(hf.get_input_embeddings().weight.dtype).removeprefix("torch."),
        attention=getattr(config, "_attn_implementation", None),
        quantization=_quantization(config),
    )


def weight_hash(module: nn.Module) -> str:
    """Return the sha256 over the names, shapes, dtypes and bytes of a module's state, in the order of the names.

    Args:
        module: Any module; weights that accelerate keeps elsewhere are read from there.

    Returns:
        64 hexadecimal digits.

    Raises:
        ModelError: A parameter is NaN or infinite, or its data is nowhere.
    """
    digest = hashlib.sha256()
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, tensor in sorted(_state(module), key=lambda named: named[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().contiguous().view(-1)
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK].cpu()
            if name in parameters and part.is_floating_point() and not bool(torch.isfinite(part).all()):
                raise ModelError(f"The weight {name} holds NaN or infinite values; the checkpoint is damaged.")
            digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # Not from state_dict(): bitsandbytes unpacks 4-bit weights there, which changes the model that is being read.
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        persistent = {k: v for k, v in owner._buffers.items() if k not in owner._non_persistent_buffers_set}
        for leaf, value in (*owner._parameters.items(), *persistent.items()):
            if value is not None:
                yield prefix + leaf, _offloaded(owner, prefix, leaf) if value.is_meta else value
                yield from ((f"{prefix}{leaf}.{name}", scale) for name, scale in _scales(value))


def _scales(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a quantised weight is multiplied by; bitsandbytes keeps it beside the data."""
    found = {"SCB": getattr(value, "SCB", None), "absmax": getattr(getattr(value, "quant_state", None), "absmax", None)}
    yield from ((name, scale) for name, scale in found.items() if isinstance(scale, Tensor))


def _offloaded(owner: nn.Module, prefix: str, leaf: str) -> Tensor:
    hook = getattr(owner, "_hf_hook", None)
    for one in (hook, *getattr(hook, "hooks", ())):
        weights = getattr(one, "weights_map", None)
        if weights is not None:
            tensor: Tensor = weights[leaf]
            return tensor
    raise ModelError(f"The weight {prefix}{leaf} has no data; load the model with its weights, not on the meta device.")


def _quantization(config: Any) -> str | None:
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    fields = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method")))
    bits = 4 if fields.get("load_in_4bit") else 8 if fields.get("load_in_8bit") else fields.get("bits")
    return method if bits is None else f"{method}-{bits}bit"

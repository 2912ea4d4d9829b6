"""Special handling that a row asks for, applied before the first forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deltalens.errors import ModelError
from deltalens.models.architectures import Architecture


def apply_handling(hf: Any, architecture: Architecture) -> None:
    """Apply everything that `architecture.handling` names.

    Args:
        hf: The transformers model; changed in place, mathematically the same afterwards.
        architecture: Its row.

    Raises:
        ModelError: A name that isn't known.
    """
    for name in architecture.handling:
        if name not in _HANDLING:
            raise ModelError(f"The row {architecture.model_type} asks for the unknown handling {name}.")
        _HANDLING[name](hf)


def _rwkv_rescaling_off(hf: Any) -> None:
    # In eval mode RWKV halves the stream every few blocks, with output weights divided to match. Left on, h_l of
    # different layers are in different units and the input of a block isn't the output of the one before.
    inner = hf.rwkv
    if inner.layers_are_rescaled and hf.config.rescale_every > 0:
        training = inner.training
        inner.training = True
        inner._rescale_layers()
        inner.training = training
    inner.layers_are_rescaled = False
    hf.config.rescale_every = 0
    inner.config.rescale_every = 0


_HANDLING: Mapping[str, Callable[[Any], None]] = {"rwkv_rescaling_off": _rwkv_rescaling_off}

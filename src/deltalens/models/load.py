"""Loading a model and refusing it unless its blocks prove to form one residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deltalens.errors import ModelError
from deltalens.models.checks import Check, check_chain, check_identity_patch, probe_batch
from deltalens.models.doctor import check_needed
from deltalens.models.model import Model
from deltalens.models.opening import open_model
from deltalens.models.sources import quiet


def load(
    name: Any,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: Any = None,
) -> Model:
    """Load a causal language model and check that its blocks form one residual stream h_0, ..., h_L.

    Args:
        name: A built-in or named model, a folder, a GGUF file, a name on the Hub, or a transformers model in memory.
        dtype: Of the weights; float32 for built-in and named models and GGUF files, else the checkpoint's own.
        device: Where to put it; "auto" spreads it over all devices. A model in memory stays where it is by default.
        revision: Branch, tag or commit on the Hub.
        trust_remote_code: Whether code that comes with the checkpoint may run.
        tokenizer: For a model in memory, which has none of its own.

    Returns:
        The model in eval mode with its tokenizer, blocks and identity.

    Raises:
        ModelError: It can't be found, read or trusted; one line that says why.
        InputError: An unknown dtype or device.

    Source:
        The checks on load are ``chain`` and ``identity patch`` of docs/doctor.md.

    Example:
        >>> load("tiny-gpt2").n_layers
        6
    """
    model = open_model(
        name, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code, tokenizer=tokenizer
    )
    # The first forward pass is where transformers gives its advice on kernels, once.
    with quiet():
        failed = next((check for check in _checks(model) if not check.holds), None)
    if failed is not None:
        figure = f"{failed.name} fails ({failed.value:.3g}): {failed.detail}"
        raise ModelError(f"{model.identity.name} can't be measured: {figure}; see `deltalens doctor`.")
    return model


def _checks(model: Model) -> Iterator[Check]:
    fields = probe_batch(model).fields
    yield check_chain(model, fields)
    yield check_identity_patch(model, fields)
    if model.architecture.discovered:
        # Nobody has looked at this type before, so it must show everything that a run relies on.
        yield from check_needed(model, fields)

"""Which scheme a model's structure allows. Structure chooses; parity proves."""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
from torch import Tensor

from deltalens.errors import InputError
from deltalens.models.interventions.backbone import Backbone, undisturbed
from deltalens.models.interventions.cached_keys import CachedKeys
from deltalens.models.interventions.doubled_batch import DoubledBatch
from deltalens.models.interventions.doubled_length import DoubledLength
from deltalens.models.interventions.rerun import Rerun
from deltalens.models.interventions.scheme import Scheme
from deltalens.models.interventions.state_bank import StateBank, bank_bytes
from deltalens.models.interventions.states import changed_tensors, empty_cache, own_tensors
from deltalens.models.model import Model

_LOG = logging.getLogger(__name__)

SCHEMES: Final[dict[str, Any]] = {
    "cached_keys": CachedKeys,
    "doubled_length": DoubledLength,
    "state_bank": StateBank,
    "doubled_batch": DoubledBatch,
    "rerun": Rerun,
}

#: Bytes that a bank of states may take; a model that needs more goes token by token for every query.
BANK_BYTES = 4 * 2**30

# Kernels that take a mask of any form; the others know causal attention only.
_MASKED_KERNELS = ("sdpa", "eager", None)


def choose_scheme(model: Model, shape: tuple[int, int] | None = None) -> str:
    """Return the name of the scheme that the model's own structure asks for.

    Args:
        model: A loaded model.
        shape: Windows and tokens of the batches to come, to see whether a bank of states fits.

    Returns:
        `cached_keys` where every cache layer holds keys and values, `doubled_length` where there's no cache,
        `state_bank` where there are convolution or recurrent states (`doubled_batch` where a bank would take more
        than `BANK_BYTES`), `rerun` where neither is known.
    """
    name = _by_structure(model)
    if name == "state_bank" and shape is not None and Backbone.of(model).cache_argument != "state":
        with undisturbed(model.hf):
            return "doubled_batch" if bank_bytes(model, *shape) > BANK_BYTES else name
    return name


def _by_structure(model: Model) -> str:
    kernel = getattr(model.hf.config, "_attn_implementation", None)
    attends = any("attention" in kind or kind == "hybrid" for kind in model.block_kinds)
    if attends and kernel not in _MASKED_KERNELS:
        return "rerun"
    backbone = Backbone.of(model)
    if backbone.cache_argument == "state":
        return "state_bank"
    if backbone.cache_argument is None:
        return "doubled_length" if attends else "rerun"
    try:
        with undisturbed(model.hf):
            return _scheme_of_cache(model, backbone)
    except Exception as error:  # noqa: BLE001 (any failure only means that the structure is unknown)
        _LOG.info("The cache of %s is unknown (%s); patching goes by reruns.", type(model.hf).__name__, error)
        return "rerun"


def _scheme_of_cache(model: Model, backbone: Backbone) -> str:
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    # Without a cache first: that drops states which an earlier use left on the modules.
    backbone.run(ids)
    before, cache = own_tensors(model.blocks), empty_cache(model.hf.config)
    backbone.run(ids, cache=cache, use_cache=True)
    if changed_tensors(model.blocks, before):
        return "state_bank"
    if any(hasattr(layer, "conv_states") for layer in cache.layers):
        return "state_bank"
    holds_keys = [isinstance(getattr(layer, "keys", None), Tensor) for layer in cache.layers]
    if not any(holds_keys):
        return "doubled_length"
    keeps_nothing = [type(layer).__name__ == "DummyLayer" for layer in cache.layers]
    known = all(keys or nothing for keys, nothing in zip(holds_keys, keeps_nothing, strict=True))
    return "cached_keys" if known else "rerun"


def start_scheme(name: str, model: Model, input_ids: Tensor) -> Scheme:
    """Run the original under a scheme, by name."""
    if name not in SCHEMES:
        raise InputError(f"Unknown intervention scheme {name!r}; known are {', '.join(SCHEMES)}.")
    scheme: Scheme = SCHEMES[name].start(model, input_ids)
    return scheme

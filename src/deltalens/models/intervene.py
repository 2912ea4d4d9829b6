"""Interventions: what a token's own replaced state does to the model's prediction, for all tokens at once.

Schemes, sessions and the parity gate live in `deltalens.models.interventions`, one file each; this is their front.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.core.divergence import kl_divergence
from deltalens.errors import InputError
from deltalens.models.batches import token_batch
from deltalens.models.interventions.choice import SCHEMES, choose_scheme
from deltalens.models.interventions.isolated import isolated_outputs
from deltalens.models.interventions.parity import Parity, check_parity, trusted_scheme
from deltalens.models.interventions.session import InterventionSession, LogitsChunk, Scope
from deltalens.models.model import Model

__all__ = [
    "SCHEMES",
    "Intervention",
    "InterventionSession",
    "LogitsChunk",
    "Parity",
    "Scope",
    "check_parity",
    "choose_scheme",
    "intervene",
    "isolated_outputs",
    "trusted_scheme",
]

#: Positions of a window that `intervene` compares with patch-and-rerun before it trusts a fast scheme.
_COMPARED = 3

# By scheme, window length, dtype and attention kernel, since each of them may break a fast path.
_trusted: weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Intervention:
    """What replacing a block's output did.

    Attributes:
        logits: `(B, S, V)` logits of the patched run, NaN at padding.
        kl: `(B, S)` `KL(P_orig ‖ P_patched)` at each token's own position in nats, NaN at padding.
        path: The scheme that served; `plain` for scope `all`.
    """

    logits: Float[Tensor, "windows tokens vocabulary"]
    kl: Float[Tensor, "windows tokens"]
    path: str


def intervene(
    model: Model,
    batch: Int[Tensor, "windows tokens"] | Mapping[str, Tensor],
    *,
    layer: int,
    states: Float[Tensor, "windows tokens width"],
    scope: Scope = "single",
) -> Intervention:
    """Replace block `layer`'s output by `states` and return the logits and `KL(P_orig ‖ P_patched)` at each token.

    Args:
        model: A loaded model.
        batch: `(B, S)` token ids, or what a tokenizer returns, padded on the right.
        layer: The block, 0-based.
        states: `(B, S, d)` replacements.
        scope: `single`: row i is of a run in which token i's state alone is replaced; `all`: all are replaced at once.

    Returns:
        Logits, divergences and the scheme that served. A fast scheme serves only after it agreed with
        patch-and-rerun on this model and window length.

    Raises:
        InputError: Strings instead of token ids, a layer that doesn't exist, or shapes that don't fit.

    Source:
        arXiv 2604.02459, "Procedure", replaces the layer's output; single positions in one pass are described in
        docs/method.md.

    Example:
        >>> import deltalens as dl
        >>> model = dl.load("tiny-gpt2")
        >>> batch = model.tokenizer("Hello there, reader", return_tensors="pt")
        >>> with dl.capture(model, batch) as states:
        ...     same = dl.intervene(model, batch, layer=3, states=states.outputs[3])
        >>> bool(same.kl.abs().max() < 1e-6)
        True
    """
    _check_request(layer, states, scope)
    windows = token_batch(model, batch)
    input_ids, attention_mask = windows.input_ids, windows.attention_mask
    scheme = "rerun" if scope == "all" else _scheme_for(model, input_ids, attention_mask)
    with InterventionSession(model, input_ids, attention_mask, scheme=scheme) as session:
        logits = session.replace(layer, states, scope)
        kl = kl_divergence(session.logits, logits)
    return Intervention(logits, kl, "plain" if scope == "all" else scheme)


def _check_request(layer: object, states: object, scope: object) -> None:
    if scope not in get_args(Scope):
        raise InputError(f"scope is {scope!r}; choose one of {', '.join(get_args(Scope))}")
    if not isinstance(layer, int):
        raise InputError(f"layer is {layer!r}; give a whole number, counted from 0")
    if not isinstance(states, Tensor):
        raise InputError(f"states is a {type(states).__name__}; give a torch tensor (windows, tokens, width)")


def _scheme_for(model: Model, input_ids: Tensor, attention_mask: Tensor) -> str:
    windows, length = input_ids.shape
    chosen = choose_scheme(model, (windows, length))
    case = (chosen, length, model.dtype, getattr(model.hf.config, "_attn_implementation", None))
    known = _trusted.setdefault(model.hf, {})
    if case not in known:
        positions = torch.zeros(1, length, dtype=torch.bool)
        last = int(attention_mask[0].sum()) - 1
        positions[0, torch.linspace(0, last, _COMPARED).long()] = True
        layers = sorted({0, len(model.blocks) // 2})
        known[case], _ = trusted_scheme(
            model, input_ids[:1], attention_mask[:1], layers=layers, positions=positions, scheme=chosen
        )
    return known[case]

"""Token windows as a model takes them: ids and attention mask, never strings, padded on the right if at all."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.errors import InputError
from deltalens.models.model import Model


@dataclass(frozen=True)
class TokenBatch:
    """Windows of token ids.

    Attributes:
        input_ids: `(B, S)`, int64, on the device of the model's embedding.
        attention_mask: `(B, S)`, int64, 1 for tokens and 0 for padding.
    """

    input_ids: Int[Tensor, "b s"]
    attention_mask: Int[Tensor, "b s"]

    @property
    def fields(self) -> dict[str, Tensor]:
        """As a tokenizer would return it."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}


def token_batch(model: Model, batch: object) -> TokenBatch:
    """Check a batch and move it to the model.

    Args:
        model: The model that will read it.
        batch: Token ids `(B, S)`, or what a tokenizer returns with `return_tensors="pt"`.

    Returns:
        Ids and mask; without a mask every token counts.

    Raises:
        InputError: Strings, lists, another shape, windows longer than the model takes, ids outside the vocabulary, or
            padding that isn't on the right.
    """
    if isinstance(batch, Mapping):
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    else:
        ids, mask = batch, None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        arrived = f"shape {tuple(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(
            f"A batch is token ids (B, S) or a tokenizer's output with return_tensors='pt'; got {arrived}. "
            "Tokenize text first."
        )
    if ids.numel() == 0:
        raise InputError(f"The batch is empty: shape {tuple(ids.shape)}; give at least one token.")
    if model.longest_window is not None and ids.shape[1] > model.longest_window:
        raise InputError(
            f"The windows have {ids.shape[1]} tokens, but this model takes {model.longest_window}; cut them shorter."
        )
    largest, smallest = int(ids.max()), int(ids.min())
    if largest >= model.vocabulary or smallest < 0:
        raise InputError(
            f"Token id {largest if largest >= model.vocabulary else smallest} is outside the model's vocabulary of "
            f"{model.vocabulary}; use the model's own tokenizer."
        )
    return TokenBatch(ids.to(model.device, torch.int64), _checked_mask(mask, ids).to(model.device, torch.int64))


def _checked_mask(mask: object, ids: Tensor) -> Tensor:
    if mask is None:
        return torch.ones_like(ids)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        arrived = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"The attention mask must have the shape of the ids, {tuple(ids.shape)}; got {arrived}.")
    kept = mask != 0
    # Left padding shifts positions in some families and leaks into the state of recurrent ones.
    if bool((kept[:, 1:] & ~kept[:, :-1]).any()) or not bool(kept[:, 0].all()):
        raise InputError(
            "The batch is padded on the left or has gaps; set tokenizer.padding_side = 'right' or use full windows."
        )
    return mask


@torch.no_grad()
def forward_logits(model: Model, batch: TokenBatch) -> Float[Tensor, "b s v"]:
    """Run the model's own forward, without a cache, and return its logits untouched."""
    arguments: dict[str, object] = {"input_ids": batch.input_ids, "use_cache": False}
    if _takes(model, "attention_mask"):
        arguments["attention_mask"] = batch.attention_mask
    output = model.hf(**arguments)
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return logits


def _takes(model: Model, argument: str) -> bool:
    parameters = inspect.signature(type(model.hf).forward).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

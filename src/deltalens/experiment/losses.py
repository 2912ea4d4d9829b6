"""Next-token losses of a model as it is, module by module, over windows."""

import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.core.divergence import negative_log_likelihood
from deltalens.experiment.corpus import Windows
from deltalens.models import Model
from deltalens.models.batches import forward_logits, token_batch


def window_losses(model: Model, windows: Windows, batch_size: int) -> Float[Tensor, "windows length"]:
    """The loss of each next token in nats, NaN where a window has none; batches are halved until they fit."""
    losses: list[Tensor] = []
    start = 0
    while start < len(windows):
        batch = windows.rows(start, start + batch_size)
        try:
            losses.append(_batch_losses(model, batch))
        except (torch.OutOfMemoryError, MemoryError):
            if batch_size == 1:
                raise
            batch_size //= 2
            continue
        start += len(batch)
    return torch.cat(losses)


def _batch_losses(model: Model, batch: Windows) -> Tensor:
    fields = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    logits = forward_logits(model, token_batch(model, fields))
    losses = negative_log_likelihood(logits, batch.next_tokens.to(logits.device))
    return losses.float().cpu()

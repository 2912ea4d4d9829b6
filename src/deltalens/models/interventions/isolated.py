"""The map `isolated`: a block run on each token alone, without context."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.errors import InputError
from deltalens.models.block_call import BlockRunner
from deltalens.models.interventions.backbone import undisturbed
from deltalens.models.model import Model

#: Tokens that run together, each a row of its own.
ROWS = 4096


def isolated_outputs(
    model: Model,
    layer: int,
    inputs: Float[Tensor, "n width"],
    *,
    positions: Int[Tensor, " n"] | None = None,
    token_ids: Int[Tensor, " n"] | None = None,
) -> Float[Tensor, "n width"]:
    """Return `T(x)`, block `layer` run on each token alone, at its own position, without context.

    Args:
        model: A loaded model.
        layer: The block, 0-based.
        inputs: `(n, d)` inputs of the block.
        positions: `(n,)` positions in their windows; 1 for all if None. One token alone makes attention blind to
            position, but not recurrences that start anew at position 0.
        token_ids: `(n,)` token ids, for blocks that also read the embedding; 0 for all if None.

    Returns:
        `(n, d)` outputs, in the block's own dtype.

    Raises:
        InputError: A layer that doesn't exist, or inputs that aren't `(n, d)`.
    """
    if inputs.dim() != 2:
        raise InputError(f"inputs has shape {tuple(inputs.shape)}; expected (n, d), one row per token.")
    count = len(inputs)
    places = torch.ones(count, dtype=torch.long) if positions is None else positions
    ids = torch.zeros(count, dtype=torch.long) if token_ids is None else token_ids
    chunks = []
    with undisturbed(model.hf):
        runner = BlockRunner(model, layer)
        for start in range(0, count, ROWS):
            rows = slice(start, start + ROWS)
            alone, place = inputs[rows].unsqueeze(1), places[rows].unsqueeze(1)
            chunks.append(runner.run(ids[rows].unsqueeze(1), alone, positions=place).output[:, 0])
    return torch.cat(chunks) if chunks else inputs.clone()

"""The map `isolated`: a block run on each token alone, without context."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.errors import InputError
from deltalens.models.blocks import override_input, watch_blocks
from deltalens.models.bypass import OutputKind, bypassed, learn_output_kinds
from deltalens.models.interventions.backbone import Backbone, undisturbed
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
    if not 0 <= layer < len(model.blocks):
        raise InputError(f"Layer {layer} doesn't exist; the model has layers 0 to {len(model.blocks) - 1}.")
    if inputs.dim() != 2:
        raise InputError(f"inputs has shape {tuple(inputs.shape)}; expected (n, d), one row per token.")
    count = len(inputs)
    places = torch.ones(count, dtype=torch.long) if positions is None else positions
    ids = torch.zeros(count, dtype=torch.long) if token_ids is None else token_ids
    backbone, chunks = Backbone.of(model), []
    with undisturbed(model.hf):
        kinds = _output_kinds(model, backbone)
        for start in range(0, count, ROWS):
            rows = slice(start, start + ROWS)
            chunks.append(_alone(model, backbone, kinds, layer, inputs[rows], places[rows], ids[rows]))
    return torch.cat(chunks) if chunks else inputs.clone()


def _output_kinds(model: Model, backbone: Backbone) -> tuple[OutputKind, ...]:
    with learn_output_kinds(model.blocks) as kinds:
        backbone.run(torch.zeros((1, 2), dtype=torch.long, device=model.device))
    return tuple(kinds[index] for index in range(len(model.blocks)))


def _alone(
    model: Model,
    backbone: Backbone,
    kinds: tuple[OutputKind, ...],
    layer: int,
    inputs: Tensor,
    positions: Tensor,
    token_ids: Tensor,
) -> Tensor:
    found: list[Tensor] = []
    later = model.blocks[layer + 1 :]
    with ExitStack() as undo:
        undo.enter_context(bypassed(model.blocks[:layer], kinds[:layer]))
        undo.enter_context(bypassed(later, kinds[layer + 1 :]))
        undo.enter_context(override_input(model.blocks[layer], inputs.unsqueeze(1)))
        undo.enter_context(watch_blocks([model.blocks[layer]], on_output=lambda _, states: found.append(states)))
        device = model.device
        backbone.run(token_ids.to(device).unsqueeze(1), positions=positions.to(device).unsqueeze(1))
    return found[0][:, 0]

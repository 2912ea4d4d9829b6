"""One block as a function of its hidden states, all its other arguments being those of its call in the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from deltalens.errors import InputError, ModelError
from deltalens.models.blocks import hidden_states, override_input, watch_blocks, with_block_input
from deltalens.models.bypass import bypassed, learn_output_kinds
from deltalens.models.interventions.backbone import Backbone
from deltalens.models.model import Model


@dataclass(frozen=True)
class BlockCall:
    """One call of a block.

    Attributes:
        block: The block.
        arguments: Positional arguments of the call.
        named: Named arguments: masks, positions, what else the model passes.
        output: `(B, S, d)` that the block returned.
    """

    block: nn.Module
    arguments: tuple[object, ...]
    named: Mapping[str, object]
    output: Float[Tensor, "windows tokens width"]

    def __call__(self, states: Float[Tensor, "windows tokens width"]) -> Float[Tensor, "windows tokens width"]:
        """Call the block again with other hidden states; gradients pass where they are enabled."""
        arguments, named = with_block_input(self.arguments, self.named, states)
        return hidden_states(self.block(*arguments, **named))

    def in_float32(self) -> BlockCall:
        """The same call of a copy of the block in float32, or of the block itself where it is no coarser."""
        kinds = {parameter.dtype for parameter in self.block.parameters() if parameter.is_floating_point()}
        if kinds <= {torch.float32, torch.float64}:
            return self
        wide = copy.deepcopy(self.block).float()
        arguments, named = _wide(self.arguments), {name: _wide(value) for name, value in self.named.items()}
        return BlockCall(wide, cast(tuple[object, ...], arguments), named, self.output.float())


class BlockRunner:
    """Runs one block of a model on given hidden states while the others pass theirs through.

    Use it inside `undisturbed`, since some blocks keep states on their modules.

    Args:
        model: A loaded model.
        layer: The block, 0-based.

    Raises:
        InputError: A layer that doesn't exist.
    """

    def __init__(self, model: Model, layer: int) -> None:
        if not 0 <= layer < model.n_layers:
            raise InputError(f"Layer {layer} doesn't exist; the model has layers 0 to {model.n_layers - 1}.")
        self._model, self._layer, self._backbone = model, layer, Backbone.of(model)
        with learn_output_kinds(model.blocks) as kinds:
            self._backbone.run(torch.zeros((1, 2), dtype=torch.long, device=model.device))
        self._kinds = tuple(kinds[index] for index in range(model.n_layers))

    def run(
        self,
        input_ids: Int[Tensor, "windows tokens"],
        inputs: Float[Tensor, "windows tokens width"],
        *,
        positions: Int[Tensor, "windows tokens"] | None = None,
    ) -> BlockCall:
        """Run the block on hidden states; ids and positions are what the rest of its call is made from."""
        layer, blocks, device = self._layer, self._model.blocks, self._model.device
        calls: list[tuple[tuple[object, ...], dict[str, object]]] = []
        outputs: list[Tensor] = []
        with ExitStack() as undo:
            undo.enter_context(bypassed(blocks[:layer], self._kinds[:layer]))
            undo.enter_context(bypassed(blocks[layer + 1 :], self._kinds[layer + 1 :]))
            undo.enter_context(override_input(blocks[layer], inputs))
            recorder = blocks[layer].register_forward_pre_hook(
                lambda _, arguments, named: calls.append((arguments, named)), with_kwargs=True
            )
            undo.callback(recorder.remove)
            undo.enter_context(watch_blocks([blocks[layer]], on_output=lambda _, states: outputs.append(states)))
            places = None if positions is None else positions.to(device)
            self._backbone.run(input_ids.to(device), positions=places)
        if len(calls) != 1:
            raise ModelError(f"Block {layer} was called {len(calls)} times in one forward pass; expected one call.")
        return BlockCall(blocks[layer], calls[0][0], calls[0][1], outputs[0])


def _wide(value: object) -> object:
    """Floating tensors in float32, also inside tuples."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    return tuple(_wide(item) for item in value) if type(value) is tuple else value

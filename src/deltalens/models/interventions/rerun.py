"""Scheme `rerun`: patch one position, run the window up to it, read one row. The fallback and the judge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.models.blocks import override_output
from deltalens.models.interventions.backbone import Backbone
from deltalens.models.interventions.scheme import BaseRun, run_base
from deltalens.models.model import Model

#: Patched windows that run together.
ROWS = 32


@dataclass(frozen=True)
class Rerun:
    """One forward pass per asked position, cut after the position and batched; nothing is skipped or cached."""

    base: BaseRun
    rows: int = ROWS

    @classmethod
    def start(cls, model: Model, input_ids: Int[Tensor, "windows tokens"]) -> Rerun:
        """Run the original once."""
        return cls(run_base(Backbone.of(model), model.blocks, input_ids))

    def patched(
        self, layer: int, states: Float[Tensor, "p b s d"], asked: Bool[Tensor, "b s"]
    ) -> Float[Tensor, "p b s f"]:
        """See `Scheme.patched`; positions that aren't asked for are NaN."""
        final = torch.full_like(self.base.final, torch.nan).repeat(states.shape[0], 1, 1, 1)
        # Neighbouring positions together, so that a batch is cut at nearly the same token.
        window, position = torch.nonzero(asked, as_tuple=True)
        order = torch.argsort(position, stable=True)
        for patch in range(states.shape[0]):
            for start in range(0, len(order), self.rows):
                chosen = order[start : start + self.rows]
                where = window[chosen], position[chosen]
                final[patch][where] = self._batch(layer, states[patch][where], *where)
        return final

    def _batch(
        self, layer: int, states: Float[Tensor, "n d"], window: Tensor, position: Tensor
    ) -> Float[Tensor, "n f"]:
        row = torch.arange(len(position))
        # Never one token alone, which some recurrent models treat as a step of generation.
        end = max(int(position.max()) + 1, min(2, self.base.length))
        replacement = self.base.cast(layer, states)

        def patch(original: Tensor) -> Tensor:
            changed = original.clone()
            changed[row, position] = replacement
            return changed

        with override_output(self.base.blocks[layer], patch):
            output = self.base.backbone.run(self.base.input_ids[window, :end])
        return self.base.backbone.final_states(output)[row, position]

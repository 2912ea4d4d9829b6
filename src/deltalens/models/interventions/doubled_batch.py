"""Scheme `doubled_batch`: original and patched rows side by side, token by token, for states too large to keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.models.blocks import override_output
from deltalens.models.interventions.backbone import Backbone, undisturbed
from deltalens.models.interventions.scheme import BaseRun, repeated, run_base
from deltalens.models.interventions.states import Memory, read_first_tokens
from deltalens.models.model import Model


@dataclass(frozen=True)
class DoubledBatch:
    """After every token the original rows' memory is copied over that of the patched rows.

    Nothing is skipped: a first cache that stays empty would shift positions and masks.
    """

    base: BaseRun

    @classmethod
    def start(cls, model: Model, input_ids: Int[Tensor, "windows tokens"]) -> DoubledBatch:
        """Run the original once."""
        return cls(run_base(Backbone.of(model), model.blocks, input_ids))

    def patched(
        self,
        layer: int,
        states: Float[Tensor, "p b s d"],
        asked: Bool[Tensor, "b s"],  # noqa: ARG002 (all positions come together)
    ) -> Float[Tensor, "p b s f"]:
        """See `Scheme.patched`; every position comes at no extra cost."""
        base, (count, windows, length) = self.base, states.shape[:3]
        ids = repeated(base.input_ids, count + 1)
        rows = base.cast(layer, states.flatten(0, 1))
        finals: list[Tensor] = []

        def step(cache: object, token: int = 0) -> object:
            positions = torch.full((1, 1), token, device=ids.device)

            def patch(original: Tensor) -> Tensor:
                return torch.cat([original[:windows], rows[:, token : token + 1].to(original.device)])

            with override_output(base.blocks[layer], patch):
                output = base.backbone.run(ids[:, token : token + 1], cache=cache, use_cache=True, positions=positions)
            finals.append(base.backbone.final_states(output)[windows:])
            return output

        # Put back afterwards, since a model that keeps its states on modules would start the next patch from them.
        with undisturbed(base.backbone.hf):
            memory = read_first_tokens(base.backbone, base.blocks, step)
            for token in range(1, length):
                _copy_original(memory, windows)
                step(memory.cache, token)
        return base.per_patch(torch.cat(finals, dim=1), count)


def _copy_original(memory: Memory, windows: int) -> None:
    for slot in memory.slots:
        content = slot.read()
        if content is None:
            continue
        part = content[..., -1:, :] if slot.is_keys else content
        copies = part.shape[0] // windows - 1
        part[windows:] = part[:windows].repeat(copies, *([1] * (part.dim() - 1)))

"""Scheme `doubled_length`: original and patched tokens in one sequence, for models that keep no cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.models.interventions.backbone import Backbone
from deltalens.models.interventions.masks import (
    BlockPattern,
    CausalBuffer,
    causal_buffers,
    doubled_bias,
    imposed_arguments,
    suffix_mask,
    swapped_buffers,
)
from deltalens.models.interventions.scheme import BaseRun, repeated, run_base
from deltalens.models.model import Model


@dataclass(frozen=True)
class DoubledLength:
    """`[original; patched]` under a mask in which a patched token sees the original before it and itself."""

    base: BaseRun
    buffers: tuple[CausalBuffer, ...]
    masks: dict[object, Tensor] = field(default_factory=dict)

    @classmethod
    def start(cls, model: Model, input_ids: Int[Tensor, "windows tokens"]) -> DoubledLength:
        """Run the original once."""
        return cls(run_base(Backbone.of(model), model.blocks, input_ids), causal_buffers(model.blocks))

    def patched(
        self,
        layer: int,
        states: Float[Tensor, "p b s d"],
        asked: Bool[Tensor, "b s"],  # noqa: ARG002 (all positions come together)
    ) -> Float[Tensor, "p b s f"]:
        """See `Scheme.patched`; every position comes at no extra cost."""
        base, (count, _, length) = self.base, states.shape[:3]
        original = repeated(base.outputs[layer], count)
        rows = torch.cat([original, base.cast(layer, states.flatten(0, 1))], dim=1)
        ids = repeated(base.input_ids, count)
        positions = torch.arange(length, device=ids.device).repeat(2).unsqueeze(0)
        later = range(layer + 1, len(base.blocks))
        arguments = {base.blocks[index]: self._arguments(base.patterns[index], count) for index in later}
        with base.started_after(layer, rows), imposed_arguments(arguments), swapped_buffers(self.buffers, length):
            output = base.backbone.run(torch.cat([ids, ids], dim=1), positions=positions)
        return base.per_patch(base.backbone.final_states(output)[:, length:], count)

    def _arguments(self, pattern: BlockPattern, count: int) -> dict[str, Tensor]:
        arguments = {}
        if pattern.mask_argument is not None:
            arguments[pattern.mask_argument] = self._mask(pattern)
        for name, bias in pattern.biases.items():
            doubled = doubled_bias(bias, self.base.length)
            arguments[name] = repeated(doubled, count) if name == "alibi" else doubled
        return arguments

    def _mask(self, pattern: BlockPattern) -> Tensor:
        key = (id(pattern.mask), pattern.dtype, pattern.device)
        if key not in self.masks:
            mask = None if pattern.mask is None else pattern.mask[:1]
            self.masks[key] = suffix_mask(mask, self.base.length, pattern, doubled=True)
        return self.masks[key]

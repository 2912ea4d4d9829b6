"""Scheme `doubled_length`: original and patched tokens in one sequence, for models that keep no cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.models.interventions.backbone import Backbone
from deltalens.models.interventions.patterns import SuffixPatterns
from deltalens.models.interventions.scheme import BaseRun, repeated, run_base
from deltalens.models.model import Model


@dataclass(frozen=True)
class DoubledLength:
    """`[original; patched]` under a mask in which a patched token sees the original before it and itself."""

    base: BaseRun
    patterns: SuffixPatterns

    @classmethod
    def start(cls, model: Model, input_ids: Int[Tensor, "windows tokens"]) -> DoubledLength:
        """Run the original once."""
        base = run_base(Backbone.of(model), model.blocks, input_ids)
        return cls(base, SuffixPatterns.of(base, doubled=True))

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
        with base.started_after(layer, rows), self.patterns.imposed(layer, count):
            output = base.backbone.run(torch.cat([ids, ids], dim=1), positions=positions)
        return base.per_patch(base.backbone.final_states(output)[:, length:], count)

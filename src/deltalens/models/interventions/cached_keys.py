"""Scheme `cached_keys`: the patched tokens run as a continuation of the original, whose keys and values are cached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from deltalens.models.interventions.backbone import Backbone
from deltalens.models.interventions.patterns import SuffixPatterns
from deltalens.models.interventions.scheme import BaseRun, repeated, run_base
from deltalens.models.model import Model


@dataclass(frozen=True)
class CachedKeys:
    """Patched token i attends to the cached keys and values of the original tokens j < i and to its own.

    One pass through the blocks after the patched one serves all S tokens of a window.
    """

    base: BaseRun
    patterns: SuffixPatterns

    @classmethod
    def start(cls, model: Model, input_ids: Int[Tensor, "windows tokens"]) -> CachedKeys:
        """Run the original once with a cache that keeps every key."""
        # Without a config, since the default cache drops keys that left a sliding window.
        base = run_base(Backbone.of(model), model.blocks, input_ids, cache=DynamicCache(), use_cache=True)
        return cls(base, SuffixPatterns.of(base, doubled=False))

    def patched(
        self,
        layer: int,
        states: Float[Tensor, "p b s d"],
        asked: Bool[Tensor, "b s"],  # noqa: ARG002 (all positions come together)
    ) -> Float[Tensor, "p b s f"]:
        """See `Scheme.patched`; every position comes at no extra cost."""
        base, (count, _, length) = self.base, states.shape[:3]
        rows = base.cast(layer, states.flatten(0, 1))
        positions = torch.arange(length, device=base.input_ids.device).unsqueeze(0)
        with (
            base.started_after(layer, rows),
            self.patterns.imposed(layer, count),
            _restored_keys(base.cache, count),
        ):
            output = base.backbone.run(
                repeated(base.input_ids, count), cache=base.cache, use_cache=True, positions=positions
            )
        return base.per_patch(base.backbone.final_states(output), count)


@contextmanager
def _restored_keys(cache: Any, count: int) -> Iterator[None]:
    # References, not `crop`: it refuses positive lengths and sliding layers, and this needs no copy.
    kept = [(layer, layer.keys, layer.values) for layer in cache.layers]
    try:
        if count > 1:
            for layer, keys, values in kept:
                layer.keys, layer.values = repeated(keys, count), repeated(values, count)
        yield
    finally:
        for layer, keys, values in kept:
            layer.keys, layer.values = keys, values

"""Scheme `cached_keys`: the patched tokens run as a continuation of the original, whose keys and values are cached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

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
class CachedKeys:
    """Patched token i attends to the cached keys and values of the original tokens j < i and to its own.

    One pass through the blocks after the patched one serves all S tokens of a window.
    """

    base: BaseRun
    buffers: tuple[CausalBuffer, ...]
    masks: dict[object, Tensor] = field(default_factory=dict)

    @classmethod
    def start(cls, model: Model, input_ids: Int[Tensor, "windows tokens"]) -> CachedKeys:
        """Run the original once with a cache that keeps every key."""
        # Without a config, since the default cache drops keys that left a sliding window.
        base = run_base(Backbone.of(model), model.blocks, input_ids, cache=DynamicCache(), use_cache=True)
        return cls(base, causal_buffers(model.blocks))

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
            self._patterns_after(layer, count),
            swapped_buffers(self.buffers, length),
            _restored_keys(base.cache, count),
        ):
            output = base.backbone.run(
                repeated(base.input_ids, count), cache=base.cache, use_cache=True, positions=positions
            )
        return base.per_patch(base.backbone.final_states(output), count)

    def _patterns_after(self, layer: int, count: int) -> Any:
        later = range(layer + 1, len(self.base.blocks))
        return imposed_arguments(
            {self.base.blocks[index]: self._arguments(self.base.patterns[index], count) for index in later}
        )

    def _arguments(self, pattern: BlockPattern, count: int) -> dict[str, Tensor]:
        length = self.base.length
        arguments = {}
        if pattern.mask_argument is not None:
            arguments[pattern.mask_argument] = self._mask(pattern)
        for name, bias in pattern.biases.items():
            doubled = doubled_bias(bias, length)
            arguments[name] = repeated(doubled, count) if name == "alibi" else doubled
        return arguments

    def _mask(self, pattern: BlockPattern) -> Tensor:
        # Blocks share a few mask tensors, which live as long as the base run that recorded them.
        key = (id(pattern.mask), pattern.dtype, pattern.device)
        if key not in self.masks:
            # Rows are full windows, so all have the first one's pattern.
            mask = None if pattern.mask is None else pattern.mask[:1]
            self.masks[key] = suffix_mask(mask, self.base.length, pattern, doubled=False)
        return self.masks[key]


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

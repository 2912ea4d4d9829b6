"""What blocks are given in place of their own masks and biases when patched tokens run behind the original ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from deltalens.models.interventions.masks import (
    BlockPattern,
    CausalBuffer,
    causal_buffers,
    doubled_bias,
    imposed_arguments,
    suffix_mask,
    swapped_buffers,
)
from deltalens.models.interventions.scheme import BaseRun, repeated


@dataclass(frozen=True)
class SuffixPatterns:
    """The pattern `[strictly lower | identity]` for every later block: a patched token sees originals and itself.

    Attributes:
        base: The original run, which recorded each block's own pattern.
        doubled: Whether original and patched tokens are both queries, or the patched ones alone.
        buffers: Causal buffers that blocks keep of their own.
        masks: Masks already made, by what they were made from.
    """

    base: BaseRun
    doubled: bool
    buffers: tuple[CausalBuffer, ...]
    masks: dict[object, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, base: BaseRun, *, doubled: bool) -> SuffixPatterns:
        """Read the blocks' own causal buffers once."""
        return cls(base, doubled, causal_buffers(base.blocks))

    @contextmanager
    def imposed(self, layer: int, count: int) -> Iterator[None]:
        """Give the pattern to all blocks after `layer` inside the `with`, for `count` patches at once."""
        base = self.base
        later = range(layer + 1, len(base.blocks))
        arguments = {base.blocks[index]: self._arguments(base.patterns[index], count) for index in later}
        with imposed_arguments(arguments), swapped_buffers(self.buffers, base.length):
            yield

    def _arguments(self, pattern: BlockPattern, count: int) -> dict[str, Tensor]:
        arguments = {}
        if pattern.mask_argument is not None:
            arguments[pattern.mask_argument] = self._mask(pattern)
        for name, bias in pattern.biases.items():
            doubled = doubled_bias(bias, self.base.length)
            arguments[name] = repeated(doubled, count) if name == "alibi" else doubled
        return arguments

    def _mask(self, pattern: BlockPattern) -> Tensor:
        # Blocks share a few mask tensors, which live as long as the base run that recorded them.
        key = (id(pattern.mask), pattern.dtype, pattern.device)
        if key not in self.masks:
            # Rows are full windows, so all have the first one's pattern.
            mask = None if pattern.mask is None else pattern.mask[:1]
            self.masks[key] = suffix_mask(mask, self.base.length, pattern, doubled=self.doubled)
        return self.masks[key]

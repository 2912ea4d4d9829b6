"""Attention patterns in which token i sees the original tokens before it and, of the patched ones, only itself.

The pattern of each block is derived from the mask that the model itself gave that block in the original run, so sliding
windows, chunks and biases folded into masks carry over: `[strictly lower part | diagonal]` over `[original | patched]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deltalens.models.blocks import argument_names, call_arguments

_MASK_NAMES = ("causal_mask", "attention_mask")
_BIAS_NAMES = ("alibi", "position_bias")


@dataclass
class BlockPattern:
    """What one block was given in the original run.

    Attributes:
        mask_argument: Name of its attention mask argument, or None if its signature has none.
        mask: The `(b, h, S, S)` mask, boolean or additive; None for plain causal attention.
        biases: Positional biases by argument name, last axis over keys.
        dtype: Of the block's output.
        device: Of the block's output.
    """

    mask_argument: str | None = None
    mask: Tensor | None = None
    biases: dict[str, Tensor] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@contextmanager
def record_patterns(blocks: Sequence[nn.Module]) -> Iterator[dict[int, BlockPattern]]:
    """Record every block's attention pattern while the original runs inside the `with`."""
    patterns: dict[int, BlockPattern] = {}
    with ExitStack() as undo:
        for index, block in enumerate(blocks):
            handle = block.register_forward_pre_hook(_recorder(index, patterns), with_kwargs=True)
            undo.callback(handle.remove)
        yield patterns


def _recorder(index: int, patterns: dict[int, BlockPattern]) -> Any:
    def hook(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        arguments = call_arguments(block, args, kwargs)
        signature = argument_names(type(block).forward)
        name = next((name for name in _MASK_NAMES if name in signature or name in arguments), None)
        mask = arguments.get(name) if name is not None else None
        patterns[index] = BlockPattern(
            mask_argument=name,
            mask=mask if isinstance(mask, Tensor) and mask.dim() == 4 else None,
            biases={bias: value for bias in _BIAS_NAMES if isinstance(value := arguments.get(bias), Tensor)},
        )

    return hook


def suffix_mask(mask: Tensor | None, length: int, like: BlockPattern, *, doubled: bool) -> Tensor:
    """Return the mask of S patched tokens over `[original | patched]`, or of `[original; patched]` over the same.

    Args:
        mask: The original `(b, h, S, S)` mask, or None for plain causal attention.
        length: S.
        like: The block's pattern, for device and dtype.
        doubled: Whether the original tokens are queries too.

    Returns:
        `(b, h, S, 2 S)`, or `(b, h, 2 S, 2 S)` when doubled; boolean or additive as the original.
    """
    mask = _causal(length, like) if mask is None else mask[..., :length]
    blocked = _blocked_value(mask)
    strict = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril(-1)
    itself = torch.eye(length, dtype=torch.bool, device=mask.device)
    lower = mask.masked_fill(~strict, blocked)
    diagonal = mask.masked_fill(~itself, blocked)
    patched = torch.cat([lower, diagonal], dim=-1)
    if not doubled:
        return patched
    original = torch.cat([mask, torch.full_like(mask, blocked)], dim=-1)
    return torch.cat([original, patched], dim=-2)


def single_token_masks(mask: Tensor | None, length: int, like: BlockPattern) -> Tensor:
    """Return `(b, h, S, S + 1)`: row i is the mask of patched token i over all original keys and its own."""
    mask = _causal(length, like) if mask is None else mask[..., :length]
    blocked = _blocked_value(mask)
    strict = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril(-1)
    own = mask.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    return torch.cat([mask.masked_fill(~strict, blocked), own], dim=-1)


def _causal(length: int, like: BlockPattern) -> Tensor:
    blocked = torch.finfo(like.dtype).min
    mask = torch.zeros(1, 1, length, length, dtype=like.dtype, device=like.device)
    later = torch.ones(length, length, dtype=torch.bool, device=like.device).triu(1)
    return mask.masked_fill(later, blocked)


def _blocked_value(mask: Tensor) -> bool | float:
    # A token always sees itself, so the diagonal tells what "seen" is: some models use True for what is hidden.
    if mask.dtype == torch.bool:
        return not bool(mask[0, 0, 0, 0])
    return float(torch.finfo(mask.dtype).min)


def doubled_bias(bias: Tensor, length: int) -> Tensor:
    """Return a positional bias over keys for `[original | patched]` keys; models read its last columns."""
    last = bias[..., -length:]
    return torch.cat([last, last], dim=-1)


@contextmanager
def imposed_arguments(blocks: Mapping[nn.Module, Mapping[str, Tensor]]) -> Iterator[None]:
    """Replace named arguments of block calls inside the `with`, whether passed by position or by name."""
    with ExitStack() as undo:
        for block, replacements in blocks.items():
            handle = block.register_forward_pre_hook(_imposer(replacements), with_kwargs=True)
            undo.callback(handle.remove)
        yield


def _imposer(replacements: Mapping[str, Tensor]) -> Any:
    def hook(
        block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        names = argument_names(type(block).forward)
        positional = (
            tuple(replacements.get(name, value) for name, value in zip(names, args, strict=False)) + args[len(names) :]
        )
        named = {name: value for name, value in replacements.items() if name not in names[: len(args)]}
        return positional, {**kwargs, **named}

    return hook


@dataclass(frozen=True)
class CausalBuffer:
    """A model's own causal pattern, kept as a buffer: `(1, 1, N, N)`, true where a query sees a key."""

    module: nn.Module
    name: str
    original: Tensor

    def doubled(self, length: int) -> Tensor:
        """Return the pattern of `[original; patched]` over itself, `(1, 1, 2 S, 2 S)`."""
        seen = self.original[..., :length, :length]
        strict = torch.ones(length, length, dtype=torch.bool, device=seen.device).tril(-1)
        itself = torch.eye(length, dtype=torch.bool, device=seen.device)
        top = torch.cat([seen, torch.zeros_like(seen)], dim=-1)
        bottom = torch.cat([seen * strict, seen * itself], dim=-1)
        return torch.cat([top, bottom], dim=-2).to(seen.dtype)


def causal_buffers(blocks: Sequence[nn.Module]) -> tuple[CausalBuffer, ...]:
    """Find the square lower-triangular buffers that blocks use as causal masks of their own."""
    found = []
    for block in blocks:
        for module in block.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if _is_causal_pattern(buffer):
                    found.append(CausalBuffer(module, name, buffer))
    return tuple(found)


def _is_causal_pattern(buffer: Tensor) -> bool:
    if buffer.dim() != 4 or buffer.shape[-1] != buffer.shape[-2] or buffer.shape[-1] < 2:
        return False
    corner = buffer[0, 0, : min(64, buffer.shape[-1]), : min(64, buffer.shape[-1])]
    return bool((corner.diagonal() == 1).all()) and not bool(corner.triu(1).any())


@contextmanager
def swapped_buffers(buffers: Sequence[CausalBuffer], length: int) -> Iterator[None]:
    """Put the doubled pattern in place of causal buffers inside the `with`."""
    with ExitStack() as undo:
        for buffer in buffers:
            undo.callback(buffer.module._buffers.__setitem__, buffer.name, buffer.original)
            buffer.module._buffers[buffer.name] = buffer.doubled(length)
        yield

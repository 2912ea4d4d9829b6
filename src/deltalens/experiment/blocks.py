"""Evaluation windows in blocks, fitted, patched and measured together, so that memory does not grow with them."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from deltalens.core.controls import derangement

#: Tokens of one block. Numbers depend on it: a token's partner, whose residual is its control, lies in its block.
BLOCK_TOKENS = 1024

#: A partner stands in another window.
FEWEST_WINDOWS = 2


@dataclass(frozen=True)
class Block:
    """Neighbouring evaluation windows.

    Attributes:
        number: 0-based.
        windows: the windows.
        tokens: their included tokens, as numbers among all included ones.
        partner: for each of these the number, within the block, of an included token of another window; -1 for none.
    """

    number: int
    windows: slice
    tokens: slice
    partner: Int[Tensor, " n"]

    def seed(self, seed: int) -> int:
        """The seed of what is drawn in this block."""
        return seed + self.number

    def among(self, tokens: Bool[Tensor, "windows length"]) -> Bool[Tensor, "windows length"]:
        """The given tokens as far as they are in this block."""
        chosen = torch.zeros_like(tokens)
        chosen[self.windows] = tokens[self.windows]
        return chosen


def cut_blocks(included: Bool[Tensor, "windows length"], seed: int) -> tuple[Block, ...]:
    """Blocks of about `BLOCK_TOKENS` tokens, whole windows each and at least two where there are as many."""
    first = torch.cat([torch.zeros(1, dtype=torch.long), included.sum(dim=1).cumsum(dim=0)]).tolist()
    blocks = []
    for number, windows in enumerate(window_blocks(*included.shape)):
        owner = torch.nonzero(included[windows])[:, 0]
        partner = derangement(owner, torch.ones(len(owner), dtype=torch.bool), seed + number)
        blocks.append(Block(number, windows, slice(first[windows.start], first[windows.stop]), partner))
    return tuple(blocks)


def window_blocks(windows: int, length: int) -> list[slice]:
    """Slices of about `BLOCK_TOKENS` tokens; a last window doesn't stand alone."""
    size = max(FEWEST_WINDOWS, BLOCK_TOKENS // length)
    starts = [start for start in range(0, windows, size) if start == 0 or windows - start >= FEWEST_WINDOWS]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], windows], strict=True)]


def all_partners(blocks: tuple[Block, ...]) -> Int[Tensor, " n"]:
    """Every included token's partner as a number among all included tokens; -1 for none."""
    return torch.cat([torch.where(b.partner >= 0, b.partner + b.tokens.start, -1) for b in blocks])

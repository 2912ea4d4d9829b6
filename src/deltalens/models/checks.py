"""The two checks that every load makes: blocks form one chain, and putting back their own outputs changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deltalens.errors import ModelError
from deltalens.models.batches import TokenBatch, forward_logits, token_batch
from deltalens.models.blocks import override_output, watch_blocks
from deltalens.models.model import Model

PROBE_WINDOWS, PROBE_TOKENS = 2, 12


@dataclass(frozen=True)
class Check:
    """One property of a model, measured.

    Attributes:
        name: What was checked.
        value: The figure, in the unit that `detail` names; NaN where it can't be measured.
        tolerance: The largest figure at which it holds.
        holds: Whether it does.
        detail: What the figure is, or why it failed, in one line.
        needed: Whether a run needs it.
    """

    name: str
    value: float
    tolerance: float
    holds: bool
    detail: str
    needed: bool = True


def probe_batch(model: Model, *, windows: int = PROBE_WINDOWS, tokens: int = PROBE_TOKENS, seed: int = 0) -> TokenBatch:
    """Seeded random token windows, full, on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    return token_batch(model, torch.randint(0, model.vocabulary, (windows, tokens), generator=generator))


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return max|a - b| over the range max(a) - min(a), in float64; infinite if either isn't finite."""
    a, b = a.detach().to("cpu", torch.float64), b.detach().to("cpu", torch.float64)
    difference = float((a - b).abs().max())
    if not torch.isfinite(torch.tensor(difference)) or not bool(torch.isfinite(a).all()):
        return float("inf")
    if difference == 0.0:
        return 0.0
    return difference / max(float(a.max() - a.min()), torch.finfo(torch.float64).tiny)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return next((line.strip()[:200] for line in str(error).splitlines() if line.strip()), type(error).__name__)


def tolerance_of(model: Model) -> float:
    """Relative difference that rounding alone explains: 1e-5, or 3e-2 in half precision and for quantised weights."""
    coarse = torch.finfo(model.dtype).bits < 32 or model.identity.quantization is not None
    return 3e-2 if coarse else 1e-5


class ChainRecorder:
    """Watches one forward pass: the order of calls, and how far each input is from the output before it."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.worst = 0.0
        self.broken_at: int | None = None
        self._last: Tensor | None = None

    def on_input(self, index: int, states: Tensor) -> None:
        """Compare a block's input with the output of the block called before it."""
        if self._last is not None and self.calls:
            gap = _gap(self._last, states)
            if gap > self.worst:
                self.worst = gap
                self.broken_at = index if self.broken_at is None else self.broken_at
        self.calls.append(index)

    def on_output(self, _: int, states: Tensor) -> None:
        """Keep a block's output for the next one; a copy, because the next may change it in place."""
        self._last = states.detach().clone()


def check_chain(model: Model, batch: object) -> Check:
    """Check that each block is called once, in order, on exactly what the block before it returned.

    Args:
        model: A loaded model.
        batch: Token ids `(B, S)` or a tokenizer's output.

    Returns:
        The largest |x_{l+1} - y_l| over the largest |y_l|; tolerance 0.
    """
    return chain_of(model, model.blocks, token_batch(model, batch))


def chain_of(model: Model, blocks: Sequence[nn.Module], batch: TokenBatch) -> Check:
    """The chain check for any sequence of blocks."""
    recorder = ChainRecorder()
    try:
        with watch_blocks(blocks, recorder.on_input, recorder.on_output):
            forward_logits(model, batch)
    except ModelError as error:
        return Check("chain", float("nan"), 0.0, holds=False, detail=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a model's own forward raises is the finding
        detail = f"the model's own forward breaks: {first_line(error)}"
        return Check("chain", float("nan"), 0.0, holds=False, detail=detail)
    if recorder.calls != list(range(len(blocks))):
        calls = ", ".join(map(str, recorder.calls[:12]))
        detail = f"blocks must be called once each, in order; called were {calls or 'none'}"
        return Check("chain", float("inf"), 0.0, holds=False, detail=detail)
    if recorder.broken_at is not None:
        detail = f"the input of block {recorder.broken_at} isn't the output of block {recorder.broken_at - 1}"
        return Check("chain", recorder.worst, 0.0, holds=False, detail=detail)
    detail = "input of block l+1 against output of block l, relative"
    return Check("chain", 0.0, 0.0, holds=True, detail=detail)


def check_identity_patch(model: Model, batch: object) -> Check:
    """Check that replacing every block's output with itself leaves the logits as they were.

    Args:
        model: A loaded model.
        batch: Token ids `(B, S)` or a tokenizer's output.

    Returns:
        The largest change of a logit over the logits' range.
    """
    tokens = token_batch(model, batch)
    tolerance = tolerance_of(model)
    original = forward_logits(model, tokens)
    if not bool(torch.isfinite(original).all()):
        detail = "the model's own logits are NaN or infinite"
        return Check("identity patch", float("inf"), tolerance, holds=False, detail=detail)
    with ExitStack() as undo:
        for block in model.blocks:
            undo.enter_context(override_output(block, lambda states: states.clone()))
        patched = forward_logits(model, tokens)
    value = relative_difference(original, patched)
    detail = "change of logits when outputs are put back, over their range"
    return Check("identity patch", value, tolerance, value <= tolerance, detail)


def _gap(before: Tensor, after: Tensor) -> float:
    if before.shape != after.shape:
        return float("inf")
    # A model may cast between blocks; the value that arrives must still be the one that left.
    same = before.to(device=after.device, dtype=after.dtype)
    if bool(torch.equal(same, after)):
        return 0.0
    difference = float((same.double() - after.double()).abs().max())
    return difference / max(float(same.double().abs().max()), torch.finfo(torch.float64).tiny)

"""Which tokens take part, decided once for all layers: special tokens, window starts, sinks and non-finite states."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.experiment.corpus import Windows

#: Reasons in the order in which they are given; a token has the first that holds.
REASONS = ("", "padding", "special", "first", "non_finite", "sink")


@dataclass(frozen=True)
class Exclusions:
    """The reason for each position of some windows, as an index into `REASONS`; 0 where the token takes part."""

    reason: Int[Tensor, "windows length"]

    @property
    def included(self) -> Bool[Tensor, "windows length"]:
        """Where a token is in every pool and statistic."""
        return self.reason == 0

    def counts(self) -> dict[str, int]:
        """Excluded tokens by reason; padding is no token and isn't counted."""
        return {
            name: int((self.reason == number).sum())
            for number, name in enumerate(REASONS)
            if number >= REASONS.index("special")
        }


def exclude(
    windows: list[Windows],
    norms: list[Float[Tensor, "_ _ states"]],
    *,
    skip_first: int,
    max_norm_multiple: float,
) -> list[Exclusions]:
    """Decide for several sets of windows together, so that a sink is the same thing in evaluation and pool.

    Args:
        windows: evaluation windows, and pool windows where there are any.
        norms: for each set, the norm of every state, from the first block's input to the last one's output.
        skip_first: positions left out at the start of each window.
        max_norm_multiple: a token whose norm exceeds this multiple of the median at any state is a sink.
    """
    structural = [_structural(w, n, skip_first) for w, n in zip(windows, norms, strict=True)]
    kept = torch.cat([n[reason == 0] for n, reason in zip(norms, structural, strict=True)])
    medians = torch.from_numpy(np.median(kept.numpy(), axis=0)) if len(kept) else torch.zeros(norms[0].shape[-1])
    sinks = [(n > max_norm_multiple * medians).any(dim=-1) for n in norms]
    sink = REASONS.index("sink")
    return [
        Exclusions(torch.where((reason == 0) & is_sink, torch.tensor(sink), reason))
        for reason, is_sink in zip(structural, sinks, strict=True)
    ]


def _structural(windows: Windows, norms: Tensor, skip_first: int) -> Tensor:
    position = torch.arange(windows.input_ids.shape[1])
    reason = torch.zeros(windows.input_ids.shape, dtype=torch.long)
    conditions = {
        "non_finite": ~torch.isfinite(norms).all(dim=-1),
        "first": (position < skip_first).expand_as(reason),
        "special": windows.special,
        "padding": windows.attention_mask == 0,
    }
    for name, holds in conditions.items():  # the last that holds is the one that is kept
        reason[holds] = REASONS.index(name)
    return reason

"""What a replaced state does to the output: KL, loss and argmax, for every patch of a layer, window batch by window batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.core.divergence import (
    jensen_shannon,
    kl_divergence,
    negative_log_likelihood,
    reverse_kl,
    top1_agreement,
)
from deltalens.experiment.corpus import Windows
from deltalens.experiment.spec import Scope
from deltalens.models import InterventionSession, Model

#: Sessions stay open across layers while their caches and logits fit in this many bytes; beyond it they are reopened.
SESSION_MEMORY = 2 * 2**30

_DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl_divergence,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
}


@dataclass(frozen=True)
class Effect:
    """What one patch did at each position (W, S); NaN where it wasn't measured.

    ``divergences`` holds ``kl`` in nats and the optional others; ``nll_delta`` is NaN at a window's last token.
    """

    divergences: Mapping[str, Float[Tensor, "windows length"]]
    nll_delta: Float[Tensor, "windows length"]
    top1_agrees: Float[Tensor, "windows length"]


@dataclass
class FunctionalMeter:
    """Patches the evaluation windows of one model, keeping each batch's base run for all layers, maps and controls.

    Args:
        model: the model.
        windows: the evaluation windows.
        included: positions that are patched and measured.
        batch_size: windows per session.
        scheme: how single positions are patched; ``rerun`` only serves the positions in ``sampled``.
        divergences: names of the divergences beside ``kl``.
        sampled: positions that ``rerun`` patches, or None where every included one is served.
    """

    model: Model
    windows: Windows
    included: Bool[Tensor, "windows length"]
    batch_size: int
    scheme: str
    divergences: Sequence[str] = ()
    sampled: Bool[Tensor, "windows length"] | None = None
    _stack: ExitStack = field(default_factory=ExitStack)
    _open: dict[int, InterventionSession] = field(default_factory=dict)
    _open_bytes: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def base_nll(self) -> Float[Tensor, "windows length"]:
        """Next-token loss of the unpatched model, nats; NaN at each window's last token."""
        losses = [negative_log_likelihood(s.logits, self._targets(part)).cpu() for part, s in self._sessions()]
        return torch.cat(losses)

    def measure(
        self,
        layer: int,
        patches: Mapping[str, Float[Tensor, "windows length d"]],
        scope: Scope,
        advance: Callable[[int], None] = lambda _: None,
    ) -> dict[str, Effect]:
        """The effect of each patch of block ``layer``'s output, in one pass over the windows.

        Positions that aren't included are never patched: the caller leaves the original state there.
        """
        parts: dict[str, list[Effect]] = {name: [] for name in patches}
        for part, session in self._sessions():
            for name, states in patches.items():
                parts[name].append(self._effect(session, layer, states[part], scope, part))
                advance(1)
        return {name: _joined(effects) for name, effects in parts.items()}

    def _effect(
        self, session: InterventionSession, layer: int, states: Tensor, scope: Scope, part: slice
    ) -> Effect:
        asked = self._asked(scope)[part]
        patched = session.replace(layer, states, scope, asked)
        targets = self._targets(part).to(patched.device)
        defined = asked.to(patched.device)
        original = session.logits
        names = ("kl", *self.divergences)
        divergences = {
            name: torch.where(defined, _DIVERGENCES[name](original, patched), torch.nan).float().cpu() for name in names
        }
        delta = negative_log_likelihood(patched, targets) - negative_log_likelihood(original, targets)
        agrees = top1_agreement(original, patched).float()
        return Effect(
            divergences,
            torch.where(defined, delta, torch.nan).float().cpu(),
            torch.where(defined, agrees, torch.nan).cpu(),
        )

    def _asked(self, scope: Scope) -> Bool[Tensor, "windows length"]:
        return self.sampled if scope == "single" and self.sampled is not None else self.included

    def _targets(self, part: slice) -> Int[Tensor, "windows length"]:
        """The next token of each position; -1 where the window has none."""
        ids, lengths = self.windows.input_ids[part], self.windows.lengths[part]
        targets = torch.full_like(ids, -1)
        targets[:, :-1] = ids[:, 1:]
        targets[torch.arange(ids.shape[1]) >= lengths[:, None] - 1] = -1
        return targets

    def _sessions(self) -> Iterator[tuple[slice, InterventionSession]]:
        for start in range(0, len(self.windows), self.batch_size):
            part = slice(start, min(start + self.batch_size, len(self.windows)))
            if start in self._open:
                yield part, self._open[start]
                continue
            rows = self.windows.rows(part.start, part.stop)
            session = InterventionSession(self.model, rows.input_ids, rows.attention_mask, scheme=self.scheme)
            if self._open_bytes < SESSION_MEMORY:
                self._open[start] = self._stack.enter_context(session)
                self._open_bytes += session.memory_bytes
                yield part, session
            else:
                with session:
                    yield part, session


def _joined(effects: Sequence[Effect]) -> Effect:
    return Effect(
        {name: torch.cat([e.divergences[name] for e in effects]) for name in effects[0].divergences},
        torch.cat([e.nll_delta for e in effects]),
        torch.cat([e.top1_agrees for e in effects]),
    )

"""What a replaced state does to the output: KL, loss and argmax, for every patch of a layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

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
from deltalens.models import InterventionSession, LogitsChunk, Model
from deltalens.models.memory import tensor_bytes

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

    def without(self, undefined: Bool[Tensor, "windows length"]) -> "Effect":
        """The same with NaN where the patch was none."""

        def kept(values: Tensor) -> Tensor:
            return values.masked_fill(undefined.to(values.device), torch.nan)

        divergences = {name: kept(values) for name, values in self.divergences.items()}
        return Effect(divergences, kept(self.nll_delta), kept(self.top1_agrees))


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

    def __enter__(self) -> "FunctionalMeter":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self._open.clear()
        self._open_bytes = 0
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
        while True:
            try:
                return self._measure(layer, patches, scope, advance)
            except (torch.OutOfMemoryError, MemoryError):
                if self.batch_size == 1:
                    raise
                self._close()
                self.batch_size //= 2

    def _measure(
        self, layer: int, patches: Mapping[str, Tensor], scope: Scope, advance: Callable[[int], None]
    ) -> dict[str, Effect]:
        whole = {name: self._empty_effect() for name in patches}
        for part, session in self._sessions():
            asked = self._asked(scope)[part]
            targets = self._targets(part)
            names = list(patches)
            for chunk in session.stream(layer, [patches[name][part] for name in names], scope, asked):
                rows = chunk.windows.cpu() + part.start, chunk.positions.cpu()
                self._record(whole[names[chunk.patch]], rows, chunk, targets[chunk.windows.cpu(), rows[1]])
            advance(part.stop - part.start)
        return whole

    def _empty_effect(self) -> Effect:
        def empty() -> Tensor:
            return torch.full(self.included.shape, torch.nan)

        return Effect({name: empty() for name in ("kl", *self.divergences)}, empty(), empty())

    @staticmethod
    def _record(effect: Effect, rows: tuple[Tensor, Tensor], chunk: LogitsChunk, targets: Tensor) -> None:
        original, patched = chunk.original, chunk.patched
        for name, values in effect.divergences.items():
            values[rows] = _DIVERGENCES[name](original, patched).float().cpu()
        at = targets.to(patched.device)
        delta = negative_log_likelihood(patched, at) - negative_log_likelihood(original, at)
        effect.nll_delta[rows] = delta.float().cpu()
        effect.top1_agrees[rows] = top1_agreement(original, patched).float().cpu()

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
                self._open_bytes += tensor_bytes(session)
                yield part, session
            else:
                with session:
                    yield part, session

"""What a replaced state does to the output: KL, loss and argmax, for every patch of a layer."""

from collections.abc import Callable, Collection, Mapping, Sequence
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
from deltalens.experiment.blocks import window_blocks
from deltalens.experiment.corpus import Windows
from deltalens.experiment.spec import Scope
from deltalens.models import InterventionSession, LogitsChunk, Model
from deltalens.models.memory import tensor_bytes

#: Base runs stay open across layers while they fit in this many bytes; the others are run again at each layer, which
#: costs one forward pass where a layer's patches cost 15 or more.
SESSION_MEMORY = 2**28

_DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl_divergence,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
}


@dataclass(frozen=True)
class Effect:
    """What one patch did at each position (W, S); NaN where it wasn't measured.

    ``divergences`` holds ``kl`` in nats and the optional others; ``nll_delta`` is NaN at a window's last token. With
    ``kl_only`` nothing but ``kl`` was wanted.
    """

    divergences: Mapping[str, Float[Tensor, "windows length"]]
    nll_delta: Float[Tensor, "windows length"]
    top1_agrees: Float[Tensor, "windows length"]
    kl_only: bool = False

    def of(self, windows: slice) -> "Effect":
        """A view of some windows."""
        divergences = {name: values[windows] for name, values in self.divergences.items()}
        return Effect(divergences, self.nll_delta[windows], self.top1_agrees[windows], self.kl_only)

    def on_host(self) -> "Effect":
        """A copy in main memory: one transfer, after all chunks."""
        divergences = {name: values.cpu() for name, values in self.divergences.items()}
        return Effect(divergences, self.nll_delta.cpu(), self.top1_agrees.cpu(), self.kl_only)

    def without(self, undefined: Bool[Tensor, "windows length"]) -> "Effect":
        """The same with NaN where the patch was none."""

        def kept(values: Tensor) -> Tensor:
            return values.masked_fill(undefined.to(values.device), torch.nan)

        divergences = {name: kept(values) for name, values in self.divergences.items()}
        return Effect(divergences, kept(self.nll_delta), kept(self.top1_agrees), self.kl_only)


@dataclass
class FunctionalMeter:
    """Patches the evaluation windows of one model, block by block, on base runs that serve many patches.

    A block's base runs and logits are kept while patches of that block follow each other. Beyond it, base runs stay
    open across layers while they fit in `SESSION_MEMORY`; logits don't.

    Args:
        model: the model.
        windows: the evaluation windows.
        included: positions that are patched and measured.
        batch_size: the most windows of a session.
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
    _kept: dict[int, InterventionSession] = field(default_factory=dict)
    _kept_bytes: int = 0
    _passing: ExitStack = field(default_factory=ExitStack)
    _current: dict[int, InterventionSession] = field(default_factory=dict)
    _losses: dict[int, Tensor] = field(default_factory=dict)
    _block: slice | None = None

    def __enter__(self) -> "FunctionalMeter":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self._leave_block()
        self._kept.clear()
        self._losses.clear()
        self._kept_bytes = 0
        self._stack.close()

    def base_nll(self, windows: slice | None = None) -> Float[Tensor, "windows length"]:
        """Next-token loss of the unpatched model, nats; NaN at each window's last token."""
        parts = [part for block in self._blocks(windows) for part in self._parts(block)]
        return torch.cat([self._nll(part) for part in parts])

    def measure(
        self,
        layer: int,
        patches: Mapping[str, Float[Tensor, "windows length d"]],
        scope: Scope,
        windows: slice | None = None,
        kl_only: Collection[str] = (),
        advance: Callable[[int], None] = lambda _: None,
    ) -> dict[str, Effect]:
        """The effect of each patch of block ``layer``'s output, in one pass over the windows.

        Positions that aren't included are never patched: the caller leaves the original state there.

        Args:
            layer: the block.
            patches: states of the windows by name.
            scope: one position at a time, or all at once.
            windows: which windows, neighbouring ones that stay together; by default all, block by block.
            kl_only: patches of which nothing but the KL is wanted.
            advance: told how many windows are done.
        """
        first = 0 if windows is None else windows.start
        effects = []
        for block in self._blocks(windows):
            own = {name: states[block.start - first : block.stop - first] for name, states in patches.items()}
            effects.append(self._measure_block(layer, own, scope, block, kl_only))
            advance(block.stop - block.start)
        return {name: _joined([effect[name] for effect in effects]) for name in patches}

    def _blocks(self, windows: slice | None) -> list[slice]:
        return window_blocks(*self.included.shape) if windows is None else [windows]

    def _measure_block(
        self, layer: int, patches: Mapping[str, Tensor], scope: Scope, block: slice, kl_only: Collection[str]
    ) -> dict[str, Effect]:
        while True:
            try:
                effects = {name: self._empty_effect(block, name in kl_only) for name in patches}
                for part in self._parts(block):
                    inside = slice(part.start - block.start, part.stop - block.start)
                    part_effects = {name: effect.of(inside) for name, effect in effects.items()}
                    self._measure_part(
                        layer, {name: patches[name][inside] for name in patches}, scope, part, part_effects
                    )
                return {name: effect.on_host() for name, effect in effects.items()}
            except (torch.OutOfMemoryError, MemoryError):
                if self.batch_size == 1:
                    raise
                self._close()
                self.batch_size //= 2

    def _measure_part(
        self, layer: int, patches: Mapping[str, Tensor], scope: Scope, part: slice, effects: Mapping[str, Effect]
    ) -> None:
        session, names, asked = self._session(part), list(patches), self._asked(scope)[part]
        device = self.model.device
        targets, nll = self._targets(part).to(device), self._nll(part).to(device)
        for chunk in session.stream(layer, list(patches.values()), scope, asked):
            # Nothing is read back while chunks are queued, so that an accelerator never waits for the host.
            rows = chunk.windows.to(device), chunk.positions.to(device)
            _record(effects[names[chunk.patch]], rows, chunk, targets[rows], nll[rows])

    def _empty_effect(self, block: slice, kl_only: bool) -> Effect:
        def empty() -> Tensor:
            return torch.full(self.included[block].shape, torch.nan, device=self.model.device)

        names = ("kl",) if kl_only else ("kl", *self.divergences)
        return Effect({name: empty() for name in names}, empty(), empty(), kl_only)

    def _asked(self, scope: Scope) -> Bool[Tensor, "windows length"]:
        return self.sampled if scope == "single" and self.sampled is not None else self.included

    def _targets(self, part: slice) -> Int[Tensor, "windows length"]:
        """The next token of each position; -1 where the window has none."""
        return self.windows.next_tokens[part]

    def _parts(self, block: slice) -> list[slice]:
        """A block's windows as sessions take them."""
        self._enter_block(block)
        return [
            slice(start, min(start + self.batch_size, block.stop))
            for start in range(block.start, block.stop, self.batch_size)
        ]

    def _nll(self, part: slice) -> Float[Tensor, "windows length"]:
        """Next-token loss of the unpatched model."""
        if part.start not in self._losses:
            logits = self._session(part).logits
            targets = self._targets(part).to(logits.device)
            self._losses[part.start] = negative_log_likelihood(logits, targets).float().cpu()
        return self._losses[part.start]

    def _enter_block(self, block: slice) -> None:
        if self._block != block:
            self._leave_block()
            self._block = block

    def _leave_block(self) -> None:
        self._block = None
        self._current.clear()
        self._passing.close()
        for session in self._kept.values():
            session.forget_logits()

    def _session(self, part: slice) -> InterventionSession:
        for found in (self._kept, self._current):
            if part.start in found:
                return found[part.start]
        rows = self.windows.rows(part.start, part.stop)
        session = InterventionSession(self.model, rows.input_ids, rows.attention_mask, scheme=self.scheme)
        with ExitStack() as opened:
            opened.enter_context(session)
            size = tensor_bytes(session)
            # Those that came first: every layer goes through the windows in the same order.
            fits = len(self._kept) == len(self._losses) and self._kept_bytes + size <= SESSION_MEMORY
            (self._stack if fits else self._passing).push(opened.pop_all())
        if fits:
            self._kept[part.start] = session
            self._kept_bytes += size
        else:
            self._current[part.start] = session
        return session


def _joined(effects: list[Effect]) -> Effect:
    divergences = {name: torch.cat([e.divergences[name] for e in effects]) for name in effects[0].divergences}
    return Effect(
        divergences,
        torch.cat([e.nll_delta for e in effects]),
        torch.cat([e.top1_agrees for e in effects]),
        effects[0].kl_only,
    )


def _record(effect: Effect, rows: tuple[Tensor, Tensor], chunk: LogitsChunk, targets: Tensor, nll: Tensor) -> None:
    for name, values in effect.divergences.items():
        values[rows] = _DIVERGENCES[name](chunk.original, chunk.patched).to(values)
    if not effect.kl_only:
        loss = negative_log_likelihood(chunk.patched, targets.to(chunk.patched.device)).to(nll)
        effect.nll_delta[rows] = loss - nll
        effect.top1_agrees[rows] = top1_agreement(chunk.original, chunk.patched).to(effect.top1_agrees)

"""One batch of windows, its original run, and any number of patches of any layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.errors import InputError
from deltalens.models.batches import token_batch
from deltalens.models.interventions.backbone import undisturbed
from deltalens.models.interventions.choice import choose_scheme, start_scheme
from deltalens.models.interventions.scheme import BaseRun, Scheme, patched_together
from deltalens.models.model import Model

Scope = Literal["single", "all"]

#: Patched tokens that run together; more are no faster on a processor, fewer are up to a tenth slower.
TOKENS_TOGETHER = 1024
#: The same on an accelerator, and where weights are brought in for every pass, which should then serve many patches.
ACCELERATED_TOKENS_TOGETHER = 8192
#: Logits that the head computes at once: fewer rows would read its weights too often.
HEAD_LOGITS = 2**24
#: Logits of one chunk on a processor, few enough that comparing them stays in its cache (a factor of 2 in time).
CHUNK_LOGITS = 2**18


@dataclass(frozen=True)
class LogitsChunk:
    """Logits of some asked tokens, original and patched.

    Attributes:
        patch: Which of the patches.
        windows: `(n,)` window of each row.
        positions: `(n,)` position of each row.
        original: `(n, V)` logits of the unpatched run.
        patched: `(n, V)` logits of the patched run.
    """

    patch: int
    windows: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]
    original: Float[Tensor, "n v"]
    patched: Float[Tensor, "n v"]


class InterventionSession:
    """Patch any layer of a batch of windows again and again, on one original run (a context manager).

    Inside the `with` the model is in eval mode and no gradients are made; on leaving, also by an exception, every
    module is as it was.

    Args:
        model: A loaded model.
        input_ids: `(B, S)` token ids.
        attention_mask: `(B, S)`, 1 for tokens and 0 for padding on the right; all tokens if None.
        scheme: Name of a scheme; by default `choose_scheme(model)`. It isn't checked here: see `trusted_scheme`.

    Raises:
        InputError: Padding on the left, shapes that don't fit, or an unknown scheme.
    """

    def __init__(
        self,
        model: Model,
        input_ids: Int[Tensor, "windows tokens"],
        attention_mask: Int[Tensor, "windows tokens"] | Bool[Tensor, "windows tokens"] | None = None,
        *,
        scheme: str | None = None,
    ) -> None:
        self._model = model
        fields = {"input_ids": input_ids, "attention_mask": attention_mask}
        batch = token_batch(model, fields)
        self._ids = batch.input_ids
        self._real = batch.attention_mask.bool().cpu()
        self._name = scheme
        self._undo = ExitStack()
        self._scheme: Scheme | None = None
        self._original: Tensor | None = None

    def __enter__(self) -> InterventionSession:
        if self._name is None:
            self._name = choose_scheme(self._model, self._shape)
        with ExitStack() as undo:
            undo.enter_context(undisturbed(self._model.hf))
            # Padding is on the right, where causal models can't look; full windows keep masks simple and rows alike.
            self._scheme = start_scheme(self._name, self._model, self._ids)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._scheme = self._original = None
        self._undo.close()

    @property
    def path(self) -> str:
        """Name of the scheme that serves."""
        if self._name is None:
            self._name = choose_scheme(self._model, self._shape)
        return self._name

    @property
    def _shape(self) -> tuple[int, int]:
        windows, length = self._ids.shape
        return windows, length

    @property
    def logits(self) -> Float[Tensor, "windows tokens vocabulary"]:
        """Logits of the unpatched run; those of padding mean nothing. Made at the first use, then kept."""
        if self._original is None:
            self._original = self._original_logits()
        return self._original

    def forget_logits(self) -> None:
        """Let go of the unpatched logits, by far the largest thing that a session holds, until they are asked for."""
        self._original = None

    def replace(
        self,
        layer: int,
        states: Float[Tensor, "windows tokens width"],
        scope: Scope = "single",
        positions: Bool[Tensor, "_ _"] | None = None,
    ) -> Float[Tensor, "windows tokens vocabulary"]:
        """Return the logits at each token when block `layer`'s output is replaced.

        Args:
            layer: The block, 0-based.
            states: `(B, S, d)` replacements.
            scope: `single`: row i is of a run in which token i's state alone is replaced; `all`: all are at once.
            positions: `(B, S)` tokens that are wanted (`single`) or replaced (`all`); by default all but padding.

        Returns:
            `(B, S, V)` logits, NaN where not wanted.
        """
        logits = torch.full_like(self.logits, torch.nan)
        for chunk in self.stream(layer, [states], scope, positions):
            logits[chunk.windows, chunk.positions] = chunk.patched
        return logits

    def stream(
        self,
        layer: int,
        patches: Sequence[Float[Tensor, "windows tokens width"]],
        scope: Scope = "single",
        positions: Bool[Tensor, "_ _"] | None = None,
    ) -> Iterator[LogitsChunk]:
        """Yield the wanted tokens' logits chunk by chunk, for several patches of one layer.

        Args:
            layer: The block, 0-based.
            patches: Alternatives of `(B, S, d)` replacements.
            scope: As in `replace`.
            positions: As in `replace`.

        Yields:
            Chunks of a few rows each, patch by patch, so that no full set of patched logits is ever held.
        """
        asked = self._asked(positions)
        self._check(layer, patches)
        windows, places = torch.nonzero(asked, as_tuple=True)
        together = max(1, self._tokens_together // asked.numel())
        for first in range(0, len(patches), together):
            group = patches[first : first + together]
            final = self._final(layer, torch.stack([states.to(group[0]) for states in group]), scope, asked)
            rows = [final[patch][windows, places] for patch in range(len(group))]
            del final
            for patch in range(len(group)):
                for start, patched in self._head_blocks(rows[patch]):
                    part = slice(start, start + len(patched))
                    original = _rows(self.logits, windows[part], places[part])
                    yield LogitsChunk(first + patch, windows[part], places[part], original, patched)

    @property
    def _tokens_together(self) -> int:
        offloaded = any(weight.is_meta for weight in self._model.hf.parameters())
        on_processor = self._ids.device.type == "cpu" and not offloaded
        return TOKENS_TOGETHER if on_processor else ACCELERATED_TOKENS_TOGETHER

    def _original_logits(self) -> Float[Tensor, "windows tokens vocabulary"]:
        # In the same blocks as patched rows, since a product of other shape rounds differently.
        rows = self._base.final.flatten(0, 1)
        first = self._head(rows[:1])
        vocabulary = first.shape[-1]
        block = _block(HEAD_LOGITS, vocabulary)
        logits = first.new_empty((len(rows), vocabulary))
        for start in range(0, len(rows), block):
            logits[start : start + block] = self._head(rows[start : start + block])
        return logits.reshape(*self._ids.shape, vocabulary)

    def _head_blocks(self, rows: Float[Tensor, "n f"]) -> Iterator[tuple[int, Float[Tensor, "m v"]]]:
        """Yield the first row's number and the logits of a few rows at a time."""
        vocabulary = self.logits.shape[-1]
        block = _block(HEAD_LOGITS, vocabulary)
        size = _block(CHUNK_LOGITS, vocabulary) if rows.device.type == "cpu" else block
        for start in range(0, len(rows), block):
            logits = self._head(rows[start : start + block])
            for inner in range(0, len(logits), size):
                yield start + inner, logits[inner : inner + size]

    @property
    def _base(self) -> BaseRun:
        if self._scheme is None:
            raise InputError("An InterventionSession works inside its `with` only.")
        return self._scheme.base

    def _head(self, states: Float[Tensor, "n f"]) -> Float[Tensor, "n v"]:
        return self._base.backbone.logits(states, template=self._base.template)

    def _final(self, layer: int, states: Tensor, scope: Scope, asked: Tensor) -> Tensor:
        if scope == "single":
            assert self._scheme is not None
            return self._scheme.patched(layer, states, asked)
        original = self._base.outputs[layer]
        replaced = asked.to(original.device).unsqueeze(-1)
        states = torch.where(replaced, self._base.cast(layer, states), original)
        # Only a scheme that was compared with reruns may skip blocks; their absence may matter to later ones.
        return patched_together(self._base, layer, states, skip_prefix=self.path != "rerun")

    def _asked(self, positions: Tensor | None) -> Bool[Tensor, "windows tokens"]:
        if positions is None:
            return self._real
        if positions.shape != self._real.shape:
            raise InputError(
                f"positions has shape {tuple(positions.shape)}; expected (windows, tokens) {tuple(self._real.shape)}."
            )
        return positions.cpu().bool() & self._real

    def _check(self, layer: int, patches: Sequence[Tensor]) -> None:
        if not 0 <= layer < len(self._base.blocks):
            raise InputError(f"Layer {layer} doesn't exist; the model has layers 0 to {len(self._base.blocks) - 1}.")
        expected = tuple(self._base.outputs[layer].shape)
        for states in patches:
            if tuple(states.shape) != expected:
                raise InputError(f"states has shape {tuple(states.shape)}; expected {expected} for these windows.")


def _block(entries: int, vocabulary: int) -> int:
    return max(1, entries // vocabulary)


def _rows(logits: Tensor, windows: Tensor, positions: Tensor) -> Tensor:
    # A view where rows follow each other, since copying logits costs as much as comparing them.
    length = logits.shape[1]
    start, count = int(windows[0]) * length + int(positions[0]), len(windows)
    last = int(windows[-1]) * length + int(positions[-1])
    if last - start == count - 1:
        return logits.flatten(0, 1)[start : start + count]
    return logits[windows, positions]

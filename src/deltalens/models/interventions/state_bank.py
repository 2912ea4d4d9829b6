"""Scheme `state_bank`: keep the memory after each original token, then start every patched token from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.errors import ModelError
from deltalens.models.bypass import learn_output_kinds
from deltalens.models.interventions.backbone import Backbone
from deltalens.models.interventions.masks import BlockPattern, imposed_arguments, single_token_masks
from deltalens.models.interventions.scheme import BaseRun, run_base
from deltalens.models.interventions.states import Memory, Slot, read_first_tokens
from deltalens.models.model import Model

#: Bytes that the rows of one call may hold in states and keys.
ROW_BYTES = 512 * 2**20


@dataclass(frozen=True)
class StateBank:
    """The states before every step of the original, and single-step calls that start from them.

    Attributes:
        base: The original run.
        memory: Where the model keeps its states.
        bank: For each slot that isn't keys, its content before each step, `(steps, B, ...)`.
        keys: For each slot that is keys, its content after the last token, `(B, h, S, ...)`.
        step: Tokens per step: 1, or 2 for models that mishandle single tokens.
        masks: Masks of single tokens by block pattern, made once.
    """

    base: BaseRun
    memory: Memory
    bank: dict[int, Tensor]
    keys: dict[int, Tensor]
    step: int
    masks: dict[object, Tensor] = field(default_factory=dict)

    @classmethod
    def start(cls, model: Model, input_ids: Int[Tensor, "windows tokens"]) -> StateBank:
        """Run the original as a whole, then once more step by step, keeping the states before each step."""
        backbone = Backbone.of(model)
        base = run_base(backbone, model.blocks, input_ids)
        # RWKV broadcasts a single token of several windows wrongly; two tokens at a time are right.
        step = 2 if backbone.cache_argument == "state" else 1
        ids = _padded(input_ids, step)

        def run(cache: object, start: int = 0) -> object:
            positions = torch.arange(start, start + step, device=ids.device).unsqueeze(0)
            return backbone.run(ids[:, start : start + step], cache=cache, use_cache=True, positions=positions)

        with learn_output_kinds(model.blocks) as kinds:
            memory = read_first_tokens(backbone, model.blocks, run)
        # Learnt again, since blocks hand on a state only when there's one.
        base = replace(base, kinds=tuple(kinds[index] for index in range(len(model.blocks))))
        steps = ids.shape[1] // step
        result = cls(base, memory, _empty_bank(memory, steps), {}, step)
        for index in range(1, steps):
            result._keep(index)
            with result._step_masks(index):
                run(memory.cache, index * step)
        result.keys.update((index, _content(slot)) for index, slot in enumerate(memory.slots) if slot.is_keys)
        return result

    def patched(
        self, layer: int, states: Float[Tensor, "p b s d"], asked: Bool[Tensor, "b s"]
    ) -> Float[Tensor, "p b s f"]:
        """See `Scheme.patched`; positions that aren't asked for are NaN."""
        final = torch.full_like(self.base.final, torch.nan).repeat(states.shape[0], 1, 1, 1)
        window, position = torch.nonzero(asked, as_tuple=True)
        rows = max(1, ROW_BYTES // max(1, self._row_bytes(layer)))
        for patch in range(states.shape[0]):
            for start in range(0, len(window), rows):
                where = window[start : start + rows], position[start : start + rows]
                final[patch][where] = self._rows(layer, states[patch][where], *where)
        return final

    def _rows(self, layer: int, states: Float[Tensor, "n d"], window: Tensor, position: Tensor) -> Float[Tensor, "n f"]:
        base, step = self.base, self.step
        order, within = torch.arange(len(window)), position % step
        tokens = (position - within).unsqueeze(1) + torch.arange(step)
        ids = _padded(base.input_ids, step)[window.unsqueeze(1), tokens]
        replacement = base.cast(layer, states)
        if step == 1:
            emitted = replacement.unsqueeze(1)
        else:
            emitted = base.outputs[layer][window.unsqueeze(1), tokens.clamp(max=base.length - 1)].clone()
            emitted[order, within] = replacement
        with (
            base.started_after(layer, emitted),
            self._row_masks(layer, position),
            self._row_states(layer, window, position // step),
        ):
            output = base.backbone.run(ids, cache=self.memory.cache, use_cache=True, positions=tokens.to(ids.device))
        return base.backbone.final_states(output)[order, within]

    def _later_slots(self, layer: int) -> list[tuple[int, Slot]]:
        return [(index, slot) for index, slot in enumerate(self.memory.slots) if slot.block > layer or slot.block == -1]

    @contextmanager
    def _row_states(self, layer: int, window: Tensor, step_index: Tensor) -> Iterator[None]:
        later = self._later_slots(layer)
        kept = [(slot, slot.read()) for _, slot in later]
        try:
            for index, slot in later:
                slot.write(self.keys[index][window] if slot.is_keys else self.bank[index][step_index, window])
            yield
        finally:
            for slot, tensor in kept:
                slot.write(tensor)

    @contextmanager
    def _row_masks(self, layer: int, position: Tensor) -> Iterator[None]:
        arguments = {}
        for index in self.memory.attends:
            pattern = self.base.patterns[index]
            if index > layer and pattern.mask_argument is not None:
                mask = self._single_masks(pattern)[0].transpose(0, 1)
                arguments[self.base.blocks[index]] = {pattern.mask_argument: mask[position].unsqueeze(2)}
        with imposed_arguments(arguments):
            yield

    @contextmanager
    def _step_masks(self, token: int) -> Iterator[None]:
        # The model's own masks would follow its window, not the keys that are kept here.
        arguments = {}
        for index in self.memory.attends:
            pattern = self.base.patterns[index]
            if pattern.mask_argument is not None:
                mask = self._single_masks(pattern)[:1, :, token : token + 1]
                arguments[self.base.blocks[index]] = {
                    pattern.mask_argument: torch.cat([mask[..., :token], mask[..., -1:]], dim=-1)
                }
        with imposed_arguments(arguments):
            yield

    def _single_masks(self, pattern: BlockPattern) -> Tensor:
        key = (id(pattern.mask), pattern.dtype, pattern.device)
        if key not in self.masks:
            mask = None if pattern.mask is None else pattern.mask[:1]
            self.masks[key] = single_token_masks(mask, self.base.length, pattern)
        return self.masks[key]

    def _keep(self, index: int) -> None:
        for number, stored in self.bank.items():
            stored[index].copy_(_content(self.memory.slots[number]))

    def _row_bytes(self, layer: int) -> int:
        total = 0
        for index, slot in self._later_slots(layer):
            # Keys twice, since the model appends to them by copying.
            row = self.keys[index][:1].expand(2, -1, -1, -1) if slot.is_keys else self.bank[index][0, :1]
            total += row.numel() * row.element_size()
        return total


def bank_bytes(model: Model, windows: int, length: int) -> int:
    """Return what a bank takes for so many windows of so many tokens, measured on a step of one window."""
    backbone = Backbone.of(model)
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    memory = read_first_tokens(backbone, model.blocks, lambda cache: backbone.run(ids, cache=cache, use_cache=True))
    kept = [_content(slot) for slot in memory.slots if not slot.is_keys]
    return windows * length * sum(tensor.numel() * tensor.element_size() for tensor in kept)


def _content(slot: Slot) -> Tensor:
    content = slot.read()
    if content is None:
        raise ModelError("A model forgot the state it kept; its memory can't be followed token by token.")
    return content


def _empty_bank(memory: Memory, steps: int) -> dict[int, Tensor]:
    bank = {}
    for index, slot in enumerate(memory.slots):
        if slot.is_keys:
            continue
        content = _content(slot)
        stored = content.new_zeros((steps, *content.shape))
        if index in memory.initial:
            stored[0].copy_(memory.initial[index])
        bank[index] = stored
    return bank


def _padded(ids: Int[Tensor, "windows tokens"], step: int) -> Int[Tensor, "windows padded"]:
    return torch.nn.functional.pad(ids, (0, -ids.shape[1] % step))

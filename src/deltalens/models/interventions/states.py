"""What a recurrent or hybrid model remembers after a token, wherever it keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, cache_utils

from deltalens.models.blocks import call_arguments
from deltalens.models.interventions.backbone import Backbone


@dataclass(frozen=True)
class Slot:
    """One tensor of memory: how to read it and how to put another in its place.

    Attributes:
        read: Returns the tensor, or None before the first token.
        write: Puts a tensor in its place.
        is_keys: Whether it grows by one entry per token along its second to last axis.
        block: Index of the block that owns it, or -1 for all blocks together.
    """

    read: Callable[[], Tensor | None]
    write: Callable[[Tensor | None], None]
    is_keys: bool = False
    block: int = -1


@dataclass(frozen=True)
class Memory:
    """A model's memory while it reads windows token by token.

    Attributes:
        cache: What the stack is passed as its cache.
        slots: All tensors of the memory that are in use.
        initial: Contents of a slot before the first token where they aren't zeros, by slot index.
        attends: Indices of the blocks that keep keys.
    """

    cache: Any
    slots: tuple[Slot, ...]
    initial: dict[int, Tensor]
    attends: frozenset[int]


def empty_cache(config: Any) -> DynamicCache:
    """Return an empty cache for `config` whose attention layers keep every key, whatever their window."""
    cache = DynamicCache(config=config)
    cache.layers = [_keeping_all(layer) for layer in cache.layers]
    return cache


def _keeping_all(layer: Any) -> Any:
    if not getattr(layer, "is_sliding", False):
        return layer
    if hasattr(layer, "conv_states"):
        # Before transformers could keep several states a layer, there was no such argument.
        several = {"number_of_states": layer.number_of_states} if hasattr(layer, "number_of_states") else {}
        return cache_utils.LinearAttentionAndFullAttentionLayer(**several)
    return cache_utils.DynamicLayer()


def read_first_tokens(backbone: Backbone, blocks: Sequence[nn.Module], run: Callable[[object], Any]) -> Memory:
    """Let `run(cache)` read the first tokens of windows and find where the model remembers them.

    Args:
        backbone: The stack and its calling convention.
        blocks: The blocks.
        run: Runs the stack on the first tokens with the cache it's given, and returns the stack's output.

    Returns:
        The memory after these tokens.
    """
    if backbone.cache_argument == "state":
        with _first_state(blocks[0]) as initial:
            state = backbone.cache_of(run(None))
        slots = tuple(_item_slot(state, index, -1) for index in range(len(state)))
        return Memory(state, slots, dict(enumerate(initial)), frozenset())
    before = own_tensors(blocks)
    cache = empty_cache(backbone.hf.config)
    run(cache)
    slots = tuple(slot for slot in _cache_slots(cache) if _filled(slot.read()))
    own = tuple(_attribute_slot(module, name, block) for block, module, name in changed_tensors(blocks, before))
    return Memory(cache, slots + own, {}, frozenset(slot.block for slot in slots if slot.is_keys))


Owner = tuple[int, nn.Module, str]


def own_tensors(blocks: Sequence[nn.Module]) -> dict[Owner, Tensor]:
    """Return the tensors that modules hold as plain attributes, neither weights nor buffers, by block, module, name."""
    return {
        (index, module, name): value
        for index, block in enumerate(blocks)
        for module in block.modules()
        for name, value in module.__dict__.items()
        if isinstance(value, Tensor) and not name.startswith("_")
    }


def changed_tensors(blocks: Sequence[nn.Module], before: Mapping[Owner, Tensor]) -> list[Owner]:
    """Return where such tensors are new since `before`: states that a model keeps on its modules."""
    return [owner for owner, value in own_tensors(blocks).items() if value is not before.get(owner)]


@contextmanager
def _first_state(block: nn.Module) -> Iterator[list[Tensor]]:
    first: list[Tensor] = []

    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        state = call_arguments(module, args, kwargs).get("state")
        if not first and isinstance(state, (list, tuple)):
            first.extend(tensor.clone() for tensor in state)

    handle = block.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield first
    finally:
        handle.remove()


def _cache_slots(cache: Any) -> Iterator[Slot]:
    for index, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            if hasattr(layer, name):
                yield _attribute_slot(layer, name, index, is_keys=True)
        for name in ("conv_states", "recurrent_states"):
            held = getattr(layer, name, None)
            if isinstance(held, dict):
                yield from (_item_slot(held, key, index) for key in held)
            elif isinstance(held, Tensor):
                yield _attribute_slot(layer, name, index)


def _filled(tensor: Tensor | None) -> bool:
    return isinstance(tensor, Tensor) and tensor.numel() > 0


def _attribute_slot(owner: Any, name: str, block: int, *, is_keys: bool = False) -> Slot:
    return Slot(lambda: getattr(owner, name), lambda value: setattr(owner, name, value), is_keys, block)


def _item_slot(owner: Any, key: Any, block: int) -> Slot:
    return Slot(lambda: owner[key], lambda value: owner.__setitem__(key, value), False, block)

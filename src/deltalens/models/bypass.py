"""Letting blocks skip their work while the modules and their hooks stay, always undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deltalens.models.blocks import block_input, call_arguments


@dataclass(frozen=True)
class OutputKind:
    """What a block returns beside its hidden states, as far as a skipped block must return it too.

    Attributes:
        container: `tuple`, `list` or another type; None for a bare tensor.
        carried: For each further entry the name of the argument that it passes on, or None where it returns nothing.
    """

    container: type | None
    carried: tuple[str | None, ...] = ()

    def pack(self, states: Tensor, arguments: Mapping[str, object]) -> object:
        """Return `states` in this kind of output, the carried arguments passed on."""
        if self.container is None:
            return states
        entries = [states, *(None if name is None else arguments.get(name) for name in self.carried)]
        return cast(Any, self.container)(entries)


@contextmanager
def learn_output_kinds(blocks: Sequence[nn.Module]) -> Iterator[dict[int, OutputKind]]:
    """Record each block's `OutputKind` while the model runs inside the `with`, keyed by block index."""
    kinds: dict[int, OutputKind] = {}
    handles: list[RemovableHandle] = []
    try:
        for index, block in enumerate(blocks):
            handles.append(block.register_forward_hook(_kind_recorder(index, kinds), with_kwargs=True))
        yield kinds
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def bypassed(blocks: Sequence[nn.Module], kinds: Sequence[OutputKind] | None = None) -> Iterator[None]:
    """Let blocks pass their input through inside the `with`; the modules and their hooks stay, the work is skipped.

    Args:
        blocks: The blocks to skip.
        kinds: What each returns, from `learn_output_kinds`; without it each returns a bare tensor.
    """
    with ExitStack() as undo:
        for index, block in enumerate(blocks):
            kind = kinds[index] if kinds is not None else OutputKind(None)
            undo.enter_context(replaced_forward(block, _passthrough(block, kind)))
        yield


@contextmanager
def emitting(block: nn.Module, states: Tensor, kind: OutputKind) -> Iterator[None]:
    """Let a block return `states` inside the `with` without doing its work.

    Args:
        block: The block to skip.
        states: `(B, S, d)` hidden states that it returns, on the device and in the dtype that it would have used.
        kind: What it returns beside them.
    """

    def forward(*args: object, **kwargs: object) -> object:
        return kind.pack(states, call_arguments(block, args, kwargs))

    with replaced_forward(block, forward):
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Set a module's `forward` inside the `with`, then restore the class's or the instance's own."""
    # accelerate gives instances a forward of their own, which must come back rather than be dropped.
    missing = object()
    own = module.__dict__.get("forward", missing)
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is missing:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def _kind_recorder(index: int, kinds: dict[int, OutputKind]) -> Callable[..., None]:
    def hook(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        if not isinstance(output, (tuple, list)):
            kinds[index] = OutputKind(None)
            return
        arguments = call_arguments(block, args, kwargs)
        kinds[index] = OutputKind(type(output), tuple(_carried(entry, arguments) for entry in output[1:]))

    return hook


def _carried(entry: object, arguments: Mapping[str, object]) -> str | None:
    # By identity: a recurrent state is updated in place and handed on as the object that came in.
    if entry is None:
        return None
    return next((name for name, value in arguments.items() if value is entry), None)


def _passthrough(block: nn.Module, kind: OutputKind) -> Callable[..., object]:
    def forward(*args: object, **kwargs: object) -> object:
        return kind.pack(block_input(args, kwargs), call_arguments(block, args, kwargs))

    return forward

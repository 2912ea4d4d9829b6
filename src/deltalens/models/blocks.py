"""Reading and replacing what a block takes and returns, through hooks that are always undone.

Blocks of different families return a tensor, a tuple, a list or a named output, and some of what they return beside
the hidden states (an attention map, a recurrent state) is needed by the next block. Everything here touches the hidden
states only and keeps the rest.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deltalens.errors import ModelError

Output = TypeVar("Output")
States = Tensor | Callable[[Tensor], Tensor]

_STREAM_NAMES = ("hidden_states", "last_hidden_state", "hidden_state", "x", "inputs", "input")


def hidden_states(output: object) -> Tensor:
    """Return the `(B, S, d)` residual stream that a block's output carries.

    Args:
        output: What a block returned: a tensor, a tuple or list that starts with one, or a mapping that names one.

    Returns:
        The hidden states themselves, not a copy.

    Raises:
        ModelError: No `(B, S, d)` tensor is found, or there is more than one stream.

    Example:
        >>> import torch
        >>> hidden_states((torch.ones(1, 2, 3), None)).shape
        torch.Size([1, 2, 3])
    """
    if isinstance(output, Tensor):
        return _one_stream(output)
    if isinstance(output, Mapping):
        return _one_stream(output[_stream_key(output)])
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        stream = _one_stream(output[0])
        if any(isinstance(other, Tensor) and other.shape == stream.shape for other in output[1:]):
            raise ModelError(
                "A block returns more than one residual stream; only blocks with one (B, S, d) stream can be measured."
            )
        return stream
    raise ModelError(
        f"A block returned {type(output).__name__}; expected a (B, S, d) tensor or a tuple that starts so."
    )


def with_hidden_states(output: Output, states: Tensor) -> Output:
    """Return the same kind of block output with its hidden states replaced and the rest kept.

    Args:
        output: What a block returned.
        states: `(B, S, d)` replacement.

    Returns:
        A tensor, tuple, list or mapping of the type that came in; the original isn't changed.

    Raises:
        ModelError: The output carries no `(B, S, d)` stream.

    Example:
        >>> import torch
        >>> with_hidden_states((torch.ones(1, 1, 2), "state"), torch.zeros(1, 1, 2))
        (tensor([[[0., 0.]]]), 'state')
    """
    if isinstance(output, Tensor):
        return cast(Output, states)
    hidden_states(output)
    if isinstance(output, Mapping):
        fields = {**output, _stream_key(output): states}
        return cast(Output, cast(Any, type(output))(**fields))
    rest = cast(Sequence[object], output)[1:]
    if hasattr(output, "_fields"):
        return cast(Output, cast(Any, type(output))(states, *rest))
    return cast(Output, cast(Any, type(output))((states, *rest)))


def block_input(args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor:
    """Return the hidden states that a block was called with, whether by position or by name.

    Args:
        args: Positional arguments of the call.
        kwargs: Named arguments of the call.

    Returns:
        The `(B, S, d)` hidden states.

    Raises:
        ModelError: The call has no such argument.

    Example:
        >>> import torch
        >>> block_input((), {"hidden_states": torch.ones(1, 2, 3)}).shape
        torch.Size([1, 2, 3])
    """
    if args and isinstance(args[0], Tensor):
        return _one_stream(args[0])
    for name in _STREAM_NAMES:
        value = kwargs.get(name)
        if isinstance(value, Tensor):
            return _one_stream(value)
    raise ModelError("A block was called without hidden states; expected them first or as hidden_states=.")


def with_block_input(
    args: Sequence[object], kwargs: Mapping[str, object], states: Tensor
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of a block call with the hidden states replaced."""
    block_input(args, kwargs)
    if args and isinstance(args[0], Tensor):
        return (states, *args[1:]), dict(kwargs)
    name = next(name for name in _STREAM_NAMES if isinstance(kwargs.get(name), Tensor))
    return tuple(args), {**kwargs, name: states}


@contextmanager
def watch_blocks(
    blocks: Sequence[nn.Module],
    on_input: Callable[[int, Tensor], None] | None = None,
    on_output: Callable[[int, Tensor], None] | None = None,
) -> Iterator[None]:
    """Call `on_input(l, x)` and `on_output(l, y)` whenever block `l` runs inside the `with`.

    Args:
        blocks: The blocks, in order.
        on_input: Receives the index and the `(B, S, d)` input.
        on_output: Receives the index and the `(B, S, d)` output.
    """
    handles: list[RemovableHandle] = []
    try:
        for index, block in enumerate(blocks):
            if on_input is not None:
                handles.append(block.register_forward_pre_hook(_input_watcher(index, on_input), with_kwargs=True))
            if on_output is not None:
                handles.append(block.register_forward_hook(_output_watcher(index, on_output)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def override_output(block: nn.Module, states: States) -> Iterator[None]:
    """Replace a block's output hidden states inside the `with`.

    Args:
        block: The block.
        states: `(B, S, d)` tensor, or a function from the block's own hidden states to the replacement; moved to the
            device and dtype of what it replaces.
    """

    def hook(_: nn.Module, __: object, output: object) -> object:
        return with_hidden_states(output, _replacement(states, hidden_states(output)))

    handle = block.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def override_input(block: nn.Module, states: States) -> Iterator[None]:
    """Replace the hidden states that a block receives inside the `with`; otherwise as `override_output`."""

    def hook(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return with_block_input(args, kwargs, _replacement(states, block_input(args, kwargs)))

    handle = block.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def call_arguments(block: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return a block call's arguments by name, positional ones named by the class's signature."""
    return {**dict(zip(argument_names(type(block).forward), args, strict=False)), **kwargs}


@functools.cache
def argument_names(forward: Callable[..., object]) -> tuple[str, ...]:
    """Return the argument names of a module class's forward, in order."""
    return tuple(name for name in inspect.signature(forward).parameters if name != "self")


def _one_stream(value: object) -> Tensor:
    if isinstance(value, Tensor) and value.dim() == 3:
        return value
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise ModelError(f"A block's hidden states have shape {shape}; expected one residual stream (B, S, d).")


def _stream_key(output: Mapping[str, object]) -> str:
    found = [name for name in _STREAM_NAMES if isinstance(output.get(name), Tensor)]
    if not found:
        raise ModelError(f"A block returned fields {sorted(output)} without hidden states; expected hidden_states.")
    return found[0]


def _replacement(states: States, original: Tensor) -> Tensor:
    new = states if isinstance(states, Tensor) else states(original)
    if new.shape != original.shape:
        raise ModelError(
            f"States of shape {tuple(new.shape)} can't replace hidden states of shape {tuple(original.shape)}."
        )
    return new.to(device=original.device, dtype=original.dtype)


def _input_watcher(index: int, on_input: Callable[[int, Tensor], None]) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        on_input(index, block_input(args, kwargs))

    return hook


def _output_watcher(index: int, on_output: Callable[[int, Tensor], None]) -> Callable[..., None]:
    def hook(_: nn.Module, __: object, output: object) -> None:
        on_output(index, hidden_states(output))

    return hook

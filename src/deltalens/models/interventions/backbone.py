"""Calling a causal language model in two parts: the stack of blocks, then the model's own head on any of its rows.

The head is never rebuilt: the model's own forward runs with its stack replaced by states that were computed before, so
final norms, softcaps and scalings are the model's.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from deltalens.errors import ModelError
from deltalens.models.bypass import replaced_forward
from deltalens.models.model import Model

_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


@dataclass(frozen=True)
class Backbone:
    """The stack of blocks of a causal language model, its calling convention and its head.

    Attributes:
        hf: The causal language model.
        stack: The module that runs the blocks; the causal model itself where it isn't split in two.
        cache_argument: What the stack calls its cache, or None if it takes none.
        takes_positions: Whether it takes `position_ids`.
        takes_use_cache: Whether it takes `use_cache`.
    """

    hf: Any
    stack: Any
    cache_argument: str | None
    takes_positions: bool
    takes_use_cache: bool

    @classmethod
    def of(cls, model: Model) -> Backbone:
        """Find the stack of `model` by watching what its forward calls, and read the stack's signature."""
        stack = _stack_of(model)
        names = inspect.signature(type(stack).forward).parameters
        cache = next((name for name in _CACHE_NAMES if name in names), None)
        takes_use_cache = "use_cache" in names or _takes_anything(names)
        return cls(model.hf, stack, cache, "position_ids" in names, takes_use_cache)

    @property
    def split(self) -> bool:
        """Whether stack and head can run apart."""
        return self.stack is not self.hf

    def run(
        self,
        input_ids: Int[Tensor, "rows tokens"],
        *,
        cache: object = None,
        use_cache: bool = False,
        positions: Int[Tensor, "_ tokens"] | None = None,
    ) -> Any:
        """Run the stack and return its output."""
        arguments: dict[str, object] = {"input_ids": input_ids}
        if self.takes_use_cache:
            arguments["use_cache"] = use_cache
        if self.cache_argument is not None and cache is not None:
            arguments[self.cache_argument] = cache
        if self.takes_positions and positions is not None:
            arguments["position_ids"] = positions
        return self.stack(**arguments)

    def final_states(self, output: Any) -> Float[Tensor, "rows tokens width"]:
        """Return what the head works on: the last hidden states, or the logits of a model that isn't split."""
        if not self.split:
            return _logits(output)
        states = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)
        if not isinstance(states, Tensor):
            raise ModelError(f"{type(self.stack).__name__} returned no last hidden state; deltalens can't read it.")
        return states

    def cache_of(self, output: Any) -> Any:
        """Return the cache that an output carries, or None."""
        return next((found for name in _CACHE_NAMES if (found := getattr(output, name, None)) is not None), None)

    def logits(self, states: Float[Tensor, "rows width"], *, template: type | None) -> Float[Tensor, "rows vocabulary"]:
        """Run the model's own head on final states.

        Args:
            states: `(n, d)` last hidden states.
            template: Type of the stack's output.

        Returns:
            `(n, V)` logits.
        """
        if not self.split:
            return states
        rows = states.unsqueeze(0)
        ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=rows.device)

        def stack_forward(*_: object, **__: object) -> object:
            return _output_like(template, rows)

        with replaced_forward(cast(nn.Module, self.stack), stack_forward):
            return _logits(self.hf(input_ids=ids, use_cache=False))[0]


_stack_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _stack_of(model: Model) -> Any:
    # Some causal models call a part of their base model, so what counts is the outermost module that they do call.
    if model.hf not in _stack_names:
        _stack_names[model.hf] = _called_stack(model)
    return model.hf.get_submodule(_stack_names[model.hf])


def _called_stack(model: Model) -> str:
    wanted = {id(block) for block in model.blocks}
    called: list[str] = []
    with ExitStack() as undo:
        for name, module in model.hf.named_modules():
            if name and wanted <= {id(part) for part in module.modules()} - {id(module)}:
                handle = module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
                undo.callback(handle.remove)
        undo.enter_context(undisturbed(model.hf))
        model.hf(input_ids=torch.zeros((1, 2), dtype=torch.long, device=model.device), use_cache=False)
    return called[0] if called else ""


def _takes_anything(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _logits(output: Any) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ModelError(f"{type(output).__name__} carries no logits; only causal language models can be measured.")
    return logits


def _output_like(template: type | None, states: Tensor) -> object:
    if template is None or issubclass(template, tuple):
        return (states,)
    return cast(Any, template)(last_hidden_state=states)


@contextmanager
def undisturbed(hf: nn.Module) -> Iterator[None]:
    """Run in eval mode without gradients, then put back every module's mode, attributes and buffers as they were.

    Some models keep recurrent states on their modules; others have causal buffers that a scheme swaps for a while.
    """
    kept = [
        (module, {name: value for name, value in module.__dict__.items() if not name.startswith("_")},
         dict(module._buffers))
        for module in hf.modules()
    ]  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.callback(_put_back, kept)
        if any(module.training for module in hf.modules()):
            hf.eval()
        yield


def _put_back(kept: list[tuple[nn.Module, dict[str, object], dict[str, Tensor | None]]]) -> None:
    for module, attributes, buffers in kept:
        for name in [name for name in module.__dict__ if not name.startswith("_") and name not in attributes]:
            del module.__dict__[name]
        module.__dict__.update(attributes)
        module._buffers.clear()
        module._buffers.update(buffers)

"""What a block's mixer and its MLP each add to the stream, with the test that both together are all it adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from deltalens.errors import ModelError
from deltalens.models.block_call import BlockRunner
from deltalens.models.blocks import hidden_states
from deltalens.models.model import Model

#: The largest sum error that is no more than the order of additions in float32.
SUM_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Contributions:
    """What a block adds to the stream, by sub-layer.

    Attributes:
        mixer: `(B, S, d)` of attention, convolution or recurrence; None where the block has none.
        mlp: `(B, S, d)` of the MLP or the experts; None where the block has none.
        output: `(B, S, d)` of the block.
    """

    mixer: Float[Tensor, "windows tokens width"] | None
    mlp: Float[Tensor, "windows tokens width"] | None
    output: Float[Tensor, "windows tokens width"]


def contributions(
    model: Model, runner: BlockRunner, layer: int, input_ids: Tensor, inputs: Float[Tensor, "windows tokens width"]
) -> Contributions:
    """Run one block on its true inputs and keep what each sub-layer adds.

    Args:
        model: A loaded model.
        runner: Of this layer.
        layer: The block, 0-based.
        input_ids: `(B, S)` token ids.
        inputs: `(B, S, d)` inputs of the block.

    Raises:
        ModelError: The model's row names no sub-layers of this block, or one returns no state per token.
    """
    mixer, mlp = sublayer_modules(model, layer)
    named = {name: module for name, module in (("mixer", mixer), ("mlp", mlp)) if module is not None}
    if not named:
        raise ModelError(f"the row of {model.architecture.model_type} names no sub-layers of block {layer}")
    with _kept_outputs(list(named.values()), inputs.shape) as kept:
        output = runner.run(input_ids, inputs).output
    if len(kept) != len(named):
        raise ModelError(f"a sub-layer of block {layer} that the row names isn't called by its forward pass")
    scale = _scale(model, layer)
    found = {name: kept[index] * scale for index, name in enumerate(named)}
    return Contributions(found.get("mixer"), found.get("mlp"), output)


def sublayer_modules(model: Model, layer: int) -> tuple[nn.Module | None, nn.Module | None]:
    """The modules whose outputs are what mixer and MLP of a block add, or None for what it doesn't have."""
    row, block = model.architecture, model.blocks[layer]
    mixer, mlp = _first(block, row.mixer_outputs), _first(block, row.mlp_outputs)
    # A stack whose blocks hold one thing each calls that its mixer also where it is an MLP.
    return (None, mixer or mlp) if model.block_kinds[layer] == "mlp" else (mixer, mlp)


def sum_error(
    x: Float[Tensor, "n d"], y: Float[Tensor, "n d"], mixer: Float[Tensor, "n d"], mlp: Float[Tensor, "n d"]
) -> float:
    """The sum test: ``‖Y - X - M - F‖ / ‖Y - X‖`` over all tokens, Frobenius norms in float64.

    Args:
        x: Inputs of a block.
        y: Its outputs.
        mixer: What the mixer adds.
        mlp: What the MLP adds.

    Returns:
        The error; NaN where the block adds nothing.

    Example:
        >>> import torch
        >>> x = torch.zeros(2, 3)
        >>> sum_error(x, x + 2, x + 1, x + 1)
        0.0
    """
    update = y.double() - x.double()
    size = float(update.norm())
    return float((update - mixer.double() - mlp.double()).norm()) / size if size > 0 else float("nan")


def sum_tolerance(x: Float[Tensor, "n d"], y: Float[Tensor, "n d"], dtype: torch.dtype) -> float:
    """The largest sum error that rounding explains: 1e-4, and two roundings of the stream relative to the update."""
    update = float((y.double() - x.double()).norm())
    return SUM_TOLERANCE + 2 * torch.finfo(dtype).eps * float(y.double().norm()) / max(update, 1e-30)


def _first(block: nn.Module, paths: Sequence[str]) -> nn.Module | None:
    modules = dict(block.named_modules(remove_duplicate=False))
    return next((modules[path] for path in paths if path in modules), None)


def _scale(model: Model, layer: int) -> float:
    name = model.architecture.contribution_scale
    return float(getattr(model.blocks[layer], name)) if name else 1.0


@contextmanager
def _kept_outputs(modules: Sequence[nn.Module], shape: torch.Size) -> Iterator[dict[int, Tensor]]:
    """Keep each module's output as states of ``shape`` while a block runs inside the `with`."""
    kept: dict[int, Tensor] = {}
    handles = [module.register_forward_hook(_keeper(index, kept, shape)) for index, module in enumerate(modules)]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _keeper(index: int, kept: dict[int, Tensor], shape: torch.Size) -> Callable[..., None]:
    def hook(module: nn.Module, _: object, output: object) -> None:
        states = output if isinstance(output, Tensor) else hidden_states(output)
        if states.numel() != shape.numel():
            raise ModelError(f"{type(module).__name__} returns {tuple(states.shape)}, no state of each token")
        # A copy, because a parallel block adds one output to the other in place; rows may come without windows.
        kept[index] = states.detach().clone().reshape(shape)

    return hook

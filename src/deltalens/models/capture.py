"""Block inputs and outputs of one batch, seen through hooks: the residual stream before any final norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.errors import InputError
from deltalens.models.batches import TokenBatch, forward_logits, token_batch
from deltalens.models.blocks import watch_blocks
from deltalens.models.interventions.backbone import Backbone, undisturbed
from deltalens.models.model import Model


@dataclass(frozen=True)
class States:
    """What the blocks took and gave in one forward pass; tensors stay on the block's device, in its dtype.

    Attributes:
        inputs: Per block, `(B, S, d)`: h_l.
        outputs: Per block, `(B, S, d)`: h_{l+1}.
        logits: `(B, S, V)` of the same pass.
    """

    inputs: tuple[Float[Tensor, "b s d"], ...]
    outputs: tuple[Float[Tensor, "b s d"], ...]
    logits: Float[Tensor, "b s v"]


@contextmanager
def capture(model: Model, batch: object) -> Iterator[States]:
    """Run the model once on a batch and hand out each block's input h_l and output h_{l+1}.

    Args:
        model: A loaded model.
        batch: Token ids `(B, S)` or a tokenizer's output; strings are refused.

    Yields:
        `States`, detached copies that later passes don't change.

    Raises:
        InputError: A batch that isn't token ids, or is padded on the left.

    Source:
        The residual stream before any final norm, as arXiv 2604.02459 decomposes it.

    Example:
        >>> import deltalens as dl
        >>> model = dl.load("tiny-gpt2")
        >>> with dl.capture(model, model.tokenizer("Hello there", return_tensors="pt")) as states:
        ...     bool((states.outputs[0] == states.inputs[1]).all())
        True
    """
    inputs, outputs, logits = _run(model, token_batch(model, batch), range(model.n_layers))
    yield States(tuple(inputs.values()), tuple(outputs.values()), logits)


def stream_states(
    model: Model,
    input_ids: Int[Tensor, "b s"],
    attention_mask: Int[Tensor, "b s"] | None,
    layers: Sequence[int],
) -> dict[int, tuple[Float[Tensor, "b s d"], Float[Tensor, "b s d"]]]:
    """Return `(x, y) = (h_l, h_{l+1})` of the asked blocks for one batch; nothing else is kept.

    Args:
        model: A loaded model.
        input_ids: Token ids `(B, S)`.
        attention_mask: `(B, S)`, or None for full windows.
        layers: Blocks to keep, 0-based.

    Returns:
        Block index -> detached input and output; neighbouring blocks share the tensor between them.

    Raises:
        InputError: A layer out of range, or ids and mask that don't fit.
    """
    fields = {"input_ids": input_ids, "attention_mask": attention_mask}
    inputs, outputs, _ = _run(model, token_batch(model, fields), layers)
    return {layer: (inputs[layer], outputs[layer]) for layer in layers}


def watch_stream(model: Model, batch: object, see: Callable[[int, Float[Tensor, "b s d"]], None]) -> None:
    """Run the blocks once on a batch and show each state of the stream as it passes: h_0, ..., h_L; nothing is kept.

    The head isn't run, so that no logits are held.

    Args:
        model: A loaded model.
        batch: Token ids `(B, S)` or a tokenizer's output.
        see: Called with l and `h_l` `(B, S, d)`, which the model may change in place afterwards: copy what you keep.

    Raises:
        InputError: A batch that isn't token ids, or is padded on the left.

    Example:
        >>> import torch
        >>> import deltalens as dl
        >>> passed = []
        >>> watch_stream(dl.load("tiny-gpt2"), torch.tensor([[1, 2]]), lambda l, h: passed.append(l))
        >>> passed
        [0, 1, 2, 3, 4, 5, 6]
    """
    tokens, backbone = token_batch(model, batch), Backbone.of(model)

    def last(index: int, states: Tensor) -> None:
        if index == model.n_layers - 1:
            see(model.n_layers, states.detach())

    # Padding is on the right, where causal models can't look.
    with undisturbed(model.hf), watch_blocks(model.blocks, lambda at, states: see(at, states.detach()), last):
        backbone.run(tokens.input_ids)


def _run(model: Model, batch: TokenBatch, layers: Sequence[int]) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
    asked = sorted(set(layers))
    if asked and not (asked[0] >= 0 and asked[-1] < model.n_layers):
        wrong = asked[0] if asked[0] < 0 else asked[-1]
        raise InputError(f"Layer {wrong} is out of range; this model has layers 0 to {model.n_layers - 1}.")
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}

    def keep_input(index: int, states: Tensor) -> None:
        before = outputs.get(asked[index] - 1)
        # One copy serves as output of one block and input of the next; a block may also change its input in place.
        shared = before is not None and _same(before, states)
        inputs[asked[index]] = before if shared and before is not None else states.detach().clone()

    def keep_output(index: int, states: Tensor) -> None:
        outputs[asked[index]] = states.detach().clone()

    with watch_blocks([model.blocks[layer] for layer in asked], keep_input, keep_output):
        logits = forward_logits(model, batch)
    return inputs, outputs, logits


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and bool(torch.equal(a, b))

"""Block outputs of every kind are read and replaced in their hidden states only, and hooks are always undone."""

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from intervention_models import family_model, windows
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from deltalens.errors import ModelError
from deltalens.models.blocks import (
    block_input,
    hidden_states,
    override_input,
    override_output,
    watch_blocks,
    with_hidden_states,
)
from deltalens.models.bypass import OutputKind, bypassed, emitting, learn_output_kinds

STREAM = torch.arange(6.0).reshape(1, 2, 3)
ATTENTION = torch.zeros(1, 4, 2, 2)
Named = namedtuple("Named", ["hidden", "state"])
OUTPUTS: dict[str, Any] = {
    "tensor": STREAM,
    "tuple": (STREAM, ATTENTION, None),
    "list": [STREAM, "state"],
    "named tuple": Named(STREAM, [1, 2]),
    "mapping": OrderedDict(hidden_states=STREAM, state=7),
    "model output": BaseModelOutput(last_hidden_state=STREAM, attentions=(ATTENTION,)),
}


class Block(nn.Module):
    """Returns what it's told to, around twice its input."""

    def __init__(self, make: Any = lambda states, state: states) -> None:
        super().__init__()
        self.make = make

    def forward(self, hidden_states: torch.Tensor, state: object = None) -> object:
        return self.make(2 * hidden_states, state)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_hidden_states_of_any_kind_of_output_are_found_whole(kind: str) -> None:
    assert hidden_states(OUTPUTS[kind]) is STREAM


@pytest.mark.parametrize("kind", OUTPUTS)
def test_replacing_keeps_the_kind_and_the_rest(kind: str) -> None:
    output = OUTPUTS[kind]
    changed = with_hidden_states(output, STREAM + 1)
    assert type(changed) is type(output)
    assert torch.equal(hidden_states(changed), STREAM + 1)
    if not isinstance(output, torch.Tensor):
        values = list(output.values()) if hasattr(output, "values") else list(output)
        kept = list(changed.values()) if hasattr(changed, "values") else list(changed)
        assert all(a is b for a, b in zip(values[1:], kept[1:], strict=True))
    assert torch.equal(STREAM, torch.arange(6.0).reshape(1, 2, 3))


@pytest.mark.parametrize(
    "output", [None, (), "states", torch.zeros(2, 3), torch.zeros(2, 1, 2, 3), {"x2": STREAM}, (None, STREAM)]
)
def test_outputs_without_one_stream_are_refused(output: object) -> None:
    with pytest.raises(ModelError):
        hidden_states(output)


def test_several_streams_are_refused() -> None:
    with pytest.raises(ModelError, match="more than one residual stream"):
        hidden_states((STREAM, STREAM.clone()))


def test_block_input_is_found_by_position_and_by_name() -> None:
    assert block_input((STREAM, 1), {}) is STREAM
    assert block_input((), {"attention_mask": ATTENTION, "hidden_states": STREAM}) is STREAM
    with pytest.raises(ModelError):
        block_input((None,), {"attention_mask": ATTENTION})


def test_override_output_takes_states_or_a_function_and_ends_with_the_block() -> None:
    block = Block(lambda states, state: (states, state))
    with override_output(block, torch.zeros(1, 2, 3, dtype=torch.float64)):
        states, state = block(STREAM, state="kept")  # type: ignore[misc]
        assert states.dtype == torch.float32
        assert torch.equal(states, torch.zeros(1, 2, 3))
        assert state == "kept"
    with override_output(block, lambda states: states + 1):
        assert torch.equal(block(STREAM)[0], 2 * STREAM + 1)
    with pytest.raises(ModelError, match="can't replace"), override_output(block, torch.zeros(1, 1, 3)):
        block(STREAM)
    assert torch.equal(block(STREAM)[0], 2 * STREAM)
    assert not block._forward_hooks


@pytest.mark.parametrize("by_name", [False, True])
def test_override_input_reaches_the_block_either_way(by_name: bool) -> None:
    block = Block()
    with override_input(block, STREAM + 1):
        found = block(hidden_states=STREAM) if by_name else block(STREAM)
    assert torch.equal(found, 2 * (STREAM + 1))
    assert torch.equal(block(STREAM), 2 * STREAM)


def test_watching_sees_inputs_and_outputs_in_order() -> None:
    blocks, seen = [Block(), Block()], []
    with watch_blocks(blocks, lambda i, x: seen.append((i, "in", x)), lambda i, y: seen.append((i, "out", y))):
        blocks[1](blocks[0](STREAM))
    assert [(index, kind) for index, kind, _ in seen] == [(0, "in"), (0, "out"), (1, "in"), (1, "out")]
    assert seen[1][2] is seen[2][2]
    blocks[0](STREAM)
    assert len(seen) == 4


def test_skipped_blocks_pass_their_input_and_state_on_in_their_own_kind() -> None:
    blocks = [Block(lambda states, state: (states, state, None)), Block()]
    with learn_output_kinds(blocks) as kinds:
        blocks[0](STREAM, state="any")
        blocks[1](STREAM)
    assert kinds == {0: OutputKind(tuple, ("state", None)), 1: OutputKind(None)}
    with bypassed(blocks, [kinds[0], kinds[1]]):
        assert blocks[0](STREAM, "current") == (STREAM, "current", None)
        assert blocks[1](hidden_states=STREAM) is STREAM
    with emitting(blocks[0], STREAM + 1, kinds[0]):
        states, state, _ = blocks[0](STREAM, "current")  # type: ignore[misc]
        assert torch.equal(states, STREAM + 1)
        assert state == "current"
    assert all("forward" not in block.__dict__ for block in blocks)
    assert torch.equal(blocks[1](STREAM), 2 * STREAM)


def test_everything_is_undone_after_an_interrupt() -> None:
    block = Block()
    own = lambda hidden_states: hidden_states  # noqa: E731
    block.forward = own  # type: ignore[assignment, method-assign]
    with (
        pytest.raises(KeyboardInterrupt),
        bypassed([block]),
        override_output(block, STREAM),
        override_input(block, STREAM),
    ):
        raise KeyboardInterrupt
    assert block.__dict__["forward"] is own
    assert not block._forward_hooks
    assert not block._forward_pre_hooks


@pytest.mark.parametrize("family", ["llama", "bloom", "gpt_neo", "rwkv", "zamba2"])
def test_a_model_whose_blocks_are_all_skipped_still_runs(family: str) -> None:
    model, ids = family_model(family), windows(2, 5)
    inputs: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        with learn_output_kinds(model.blocks) as kinds:
            model.hf(input_ids=ids, use_cache=False)
        order = [kinds[index] for index in range(len(model.blocks))]
        with bypassed(model.blocks, order), watch_blocks(model.blocks, on_input=inputs.__setitem__):
            model.hf(input_ids=ids, use_cache=False)
    assert all(torch.equal(inputs[index], inputs[0]) for index in range(len(model.blocks)))

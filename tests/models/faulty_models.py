"""Tiny models with one planted defect each, as found in the wild; the doctor must catch every one of them."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from tiny_models import tiny_model
from torch import Tensor, nn


def llama() -> Any:
    """The healthy model that most defects are planted in."""
    return tiny_model("llama")


def scaled_between_blocks() -> Any:
    """Something happens to the stream between block 1 and block 2 (a hidden norm, a rescaling)."""
    return _with_pre_hook(llama(), 2, lambda states: states / 2)


def second_stream() -> Any:
    """Blocks return two streams of the same shape."""
    hf = _with_output(llama(), 1, lambda states: (states, states + 1))
    return _first_of(hf, 2)


def nameless_output() -> Any:
    """A block returns a mapping without hidden states."""
    return _first_of(_with_output(llama(), 1, lambda states: {"result": states}), 2)


def four_dimensional_stream() -> Any:
    """Blocks carry several copies of the stream in a leading dimension."""
    hf = llama()
    first, last = hf.model.layers[0], hf.model.layers[-1]
    for layer in hf.model.layers:
        inner = layer.forward
        layer.forward = _on_each_copy(inner)
    first.register_forward_pre_hook(lambda _, a: (torch.stack([a[0], a[0]]), *a[1:]))
    last.register_forward_hook(lambda _, __, output: output.mean(0))
    return hf


def weights_that_drift() -> Any:
    """Each forward pass changes a weight."""
    hf = llama()
    hf.register_forward_hook(lambda *_: _scale(hf.model.layers[1].mlp.up_proj.weight))
    return hf


def hooks_that_pile_up() -> Any:
    """Each forward pass leaves one more hook behind."""
    hf = llama()
    hf.model.norm.register_forward_pre_hook(
        lambda *_: hf.model.layers[0].mlp.register_forward_hook(lambda *_: None) and None
    )
    return hf


def sees_padding() -> Any:
    """A block mixes in the mean over the whole window, padding and future included."""
    return _with_output(llama(), 1, lambda states: states + states.mean(dim=1, keepdim=True))


def positions_from_the_end() -> Any:
    """Positions are counted from the end of the window, as left padding does to them."""
    hf = llama()
    inner = hf.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        length = kwargs["input_ids"].shape[1]
        return inner(*args, **{**kwargs, "position_ids": torch.arange(100 - length, 100).unsqueeze(0) * 3 % 128})

    hf.model.forward = forward
    return hf


def mask_from_pad_id() -> Any:
    """The attention mask is rebuilt from the token ids, so real tokens with the padding id are dropped."""
    hf = llama()
    inner = hf.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **{**kwargs, "attention_mask": (kwargs["input_ids"] != 2).long()})

    hf.model.forward = forward
    return hf


def one_loud_token() -> Any:
    """The first position's state is a thousand times the others'."""

    def loud(states: Tensor) -> Tensor:
        states = states.clone()
        states[:, 0] *= 1000
        return states

    return _with_output(llama(), 0, loud)


def constant_embedding() -> Any:
    """Every token has the same embedding."""
    hf = llama()
    with torch.no_grad():
        hf.model.embed_tokens.weight[:] = hf.model.embed_tokens.weight[0]
    return hf


def coarse_logits() -> Any:
    """A float32 model whose logits have passed through bfloat16."""
    hf = llama()
    hf.lm_head.register_forward_hook(lambda _, __, logits: logits.bfloat16().float())
    return hf


def alternating_kernel() -> Any:
    """Every other forward pass runs on another attention kernel."""
    hf = llama()
    inner, kernels = hf.model.forward, ["sdpa", "eager"]

    def forward(*args: Any, **kwargs: Any) -> Any:
        kernels.reverse()
        hf.config._attn_implementation = kernels[0]
        return inner(*args, **kwargs)

    hf.model.forward = forward
    return hf


def head_beside_the_stream() -> Any:
    """The head also reads the embeddings, past all blocks."""
    hf = llama()
    kept: list[Tensor] = []
    hf.model.embed_tokens.register_forward_hook(lambda _, __, states: kept.append(states))
    hf.model.norm.register_forward_pre_hook(lambda _, args: (args[0] + kept[-1],))
    return hf


def reversed_order() -> Any:
    """The forward pass calls the blocks from the last to the first."""
    hf = llama()
    hf.model.layers = _Reversed(hf.model.layers)
    return hf


def called_twice() -> Any:
    """The forward pass calls one block twice, as models that share weights between layers do."""
    hf = llama()
    hf.model.layers = _Repeating(hf.model.layers)
    return hf


def skipped_block() -> Any:
    """One block is never called."""
    hf = llama()
    hf.model.layers = _Shorter(hf.model.layers)
    return hf


def block_on_another_device() -> Any:
    """A block's output has no data here, as if it lay on a device that this code doesn't know of."""
    hf = llama()
    last = len(hf.model.layers) - 1
    _with_output(hf, last, lambda states: states.to("meta"))
    hf.model.norm.forward = lambda states: torch.zeros(states.shape)
    return hf


def wider_dtype() -> Any:
    """Block 1 returns float64; block 2 takes float32 again."""
    return _with_pre_hook(_with_output(llama(), 1, lambda states: states.double()), 2, lambda states: states.float())


def not_finite() -> Any:
    """The logits are NaN although every weight is finite."""
    return _with_output(llama(), 2, lambda states: states * float("nan"))


def hidden_block() -> Any:
    """One block isn't in the list, and the config counts it."""
    hf = llama()
    hidden = hf.model.layers[-1]
    hf.model.layers = nn.ModuleList(hf.model.layers[:-1])

    def run_hidden(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        positions = torch.arange(args[0].shape[1]).unsqueeze(0)
        return (hidden(args[0], position_embeddings=hf.model.rotary_emb(args[0], positions)),)

    hf.model.norm.register_forward_pre_hook(run_hidden)
    return hf


class _Reversed(nn.ModuleList):
    def __getitem__(self, index: Any) -> Any:
        return list(self)[::-1] if isinstance(index, slice) else super().__getitem__(index)


class _Repeating(nn.ModuleList):
    def __getitem__(self, index: Any) -> Any:
        blocks = list(self)
        return (
            [blocks[0], blocks[1], blocks[1], *blocks[2:]] if isinstance(index, slice) else super().__getitem__(index)
        )


class _Shorter(nn.ModuleList):
    def __getitem__(self, index: Any) -> Any:
        return list(self)[:-1] if isinstance(index, slice) else super().__getitem__(index)


def _first_of(hf: Any, index: int) -> Any:
    # The next block takes the stream out of what the one before returned.
    inner = hf.model.layers[index].forward

    def forward(states: Any, *args: Any, **kwargs: Any) -> Any:
        states = states["result"] if isinstance(states, dict) else states[0] if isinstance(states, tuple) else states
        return inner(states, *args, **kwargs)

    hf.model.layers[index].forward = forward
    return hf


def _with_pre_hook(hf: Any, index: int, change: Callable[[Tensor], Tensor]) -> Any:
    hf.model.layers[index].register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    return hf


def _with_output(hf: Any, index: int, change: Callable[[Any], Any]) -> Any:
    # In the forward itself rather than in a hook, so that it's part of the block.
    block = hf.model.layers[index]
    inner = block.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(inner(*args, **kwargs))

    block.forward = MethodType(forward, block)
    return hf


def _on_each_copy(inner: Callable[..., Any]) -> Callable[..., Any]:
    def forward(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.stack([inner(copy, *args, **kwargs) for copy in states])

    return forward


@torch.no_grad()
def _scale(weight: Tensor) -> None:
    weight.mul_(1.01)

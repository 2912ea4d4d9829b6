"""The properties that the doctor measures, one function each; every figure is a difference that should be small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.errors import ModelError
from deltalens.models.batches import TokenBatch, forward_logits
from deltalens.models.blocks import override_input, override_output, watch_blocks
from deltalens.models.checks import Check, relative_difference, tolerance_of
from deltalens.models.identity import weight_hash
from deltalens.models.model import Model


@dataclass(frozen=True)
class Probe:
    """One batch of windows, what the model made of it, and the states that flowed.

    Attributes:
        batch: Full windows `(B, S)`.
        logits: `(B, S, V)` of one plain forward pass.
        inputs: Per block, `(B, S, d)`.
        outputs: Per block, `(B, S, d)`.
        hooks: How many hooks the model had.
        weights: Hash of the weights after this pass; some quantised ones are repacked by the first.
    """

    batch: TokenBatch
    logits: Float[Tensor, "b s v"]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    hooks: int
    weights: str

    @classmethod
    def of(cls, model: Model, batch: TokenBatch) -> Probe:
        """Run the model once and keep everything, in the dtypes in which it flowed."""
        hooks = _hooks(model)
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        with watch_blocks(
            model.blocks,
            lambda index, states: inputs.__setitem__(index, states.detach().clone()),
            lambda index, states: outputs.__setitem__(index, states.detach().clone()),
        ):
            logits = forward_logits(model, batch)
        missing = [index for index in range(model.n_layers) if index not in outputs]
        if missing:
            raise ModelError(f"Block {missing[0]} of {model.identity.name} isn't called by its forward pass.")
        order = range(model.n_layers)
        flowed = tuple(inputs[i] for i in order), tuple(outputs[i] for i in order)
        return cls(batch, logits, *flowed, hooks, weight_hash(model.hf))

    @property
    def middle(self) -> int:
        """A position well inside the window."""
        return self.batch.input_ids.shape[1] // 2


def stream_shape(model: Model, probe: Probe) -> Check:
    """Every state is one `(B, S, d)` tensor with data: how many aren't."""
    expected = (*probe.batch.input_ids.shape, model.width)
    wrong = [x for x in (*probe.inputs, *probe.outputs) if tuple(x.shape) != expected or x.is_meta]
    detail = f"states that aren't {expected}"
    if wrong:
        detail += ", such as " + ("one without data" if wrong[0].is_meta else f"{tuple(wrong[0].shape)}")
    return measured("stream shape", float(len(wrong)), 0.0, detail)


def depth(model: Model) -> Check:
    """The config counts as many layers as blocks were found: the difference."""
    told = getattr(model.hf.config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(told, int):
        return measured("depth", float("nan"), 0.0, "the config doesn't say how many layers there are", needed=False)
    return measured("depth", float(abs(told - model.n_layers)), 0.0, f"blocks found: {model.n_layers}, config: {told}")


def finite_logits(probe: Probe) -> Check:
    """The logits are finite: how many aren't."""
    return measured(
        "finite logits", float((~torch.isfinite(probe.logits)).sum()), 0.0, "logits that are NaN or infinite"
    )


def batch_size(model: Model, probe: Probe) -> Check:
    """A window gives the same logits alone as in a batch."""
    alone = forward_logits(model, TokenBatch(probe.batch.input_ids[:1], probe.batch.attention_mask[:1]))
    value = relative_difference(probe.logits[:1], alone)
    return measured("batch size", value, tolerance_of(model), "change of logits, window alone or in a batch")


def padding(model: Model, probe: Probe) -> Check:
    """Padding on the right leaves the logits of real tokens as they are."""
    ids, mask = probe.batch.input_ids.clone(), probe.batch.attention_mask.clone()
    real = probe.middle
    ids[:, real:], mask[:, real:] = filler(model), 0
    padded = forward_logits(model, TokenBatch(ids, mask))[:, :real]
    short = TokenBatch(probe.batch.input_ids[:, :real].contiguous(), probe.batch.attention_mask[:, :real].contiguous())
    value = relative_difference(forward_logits(model, short), padded)
    return measured("padding", value, tolerance_of(model), "change of real tokens' logits by right padding")


def padding_by_mask(model: Model, probe: Probe) -> Check:
    """A real token whose id is the padding id counts: 0 if later tokens see it, 1 if they don't."""
    ids = probe.batch.input_ids.clone()
    at = probe.middle
    ids[:, at] = filler(model)
    batch = TokenBatch(ids, probe.batch.attention_mask)

    def louder(states: Tensor) -> Tensor:
        changed = states.clone()
        changed[:, at] = -2 * states[:, at].roll(1, dims=-1)
        return changed

    with override_input(model.blocks[0], louder):
        patched = forward_logits(model, batch)
    unseen = relative_difference(forward_logits(model, batch)[:, at + 1 :], patched[:, at + 1 :]) == 0.0
    return measured("pad id is a token", float(unseen), 0.0, "1 if a real token with the padding id is masked out")


def locality(model: Model, probe: Probe) -> Check:
    """A patch at position i changes nothing before i, at any layer."""
    worst, at = 0.0, probe.middle
    for layer in sampled_layers(model):
        with override_output(model.blocks[layer], _shaken(at)):
            patched = forward_logits(model, probe.batch)
        if torch.equal(patched[:, at], probe.logits[:, at]):
            detail = f"a patch after layer {layer} doesn't reach the logits at its own position"
            return Check("patch locality", float("inf"), tolerance_of(model), holds=False, detail=detail)
        worst = max(worst, relative_difference(probe.logits[:, :at], patched[:, :at]))
    return measured("patch locality", worst, tolerance_of(model), "change of logits before the patched position")


def stream_tail(model: Model, probe: Probe) -> Check:
    """Logits come from the last block's output alone, token by token: shuffled states give shuffled logits."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(probe.logits.shape[1], generator=generator)
    last = probe.outputs[-1]
    with override_output(model.blocks[-1], last[:, order.to(last.device)]):
        shuffled = forward_logits(model, probe.batch)
    value = relative_difference(probe.logits[:, order.to(probe.logits.device)], shuffled)
    detail = "change of logits when the last states trade places, beyond trading places"
    return measured("stream tail", value, tolerance_of(model), detail)


def restoration(model: Model, probe: Probe) -> Check:
    """After all of this, weights, logits and hooks are what they were: how many of the three aren't.

    Logits must be the same bits, unless the model's own two runs already differ.
    """
    weights = weight_hash(model.hf) != probe.weights
    again, once_more = forward_logits(model, probe.batch), forward_logits(model, probe.batch)
    logits = relative_difference(probe.logits, again) > 10 * relative_difference(again, once_more)
    changed = [
        n for n, bad in (("weights", weights), ("logits", logits), ("hooks", _hooks(model) != probe.hooks)) if bad
    ]
    detail = "which of weights, logits and hooks were left changed" + (f": {', '.join(changed)}" if changed else "")
    return measured("restoration", float(len(changed)), 0.0, detail)


def _hooks(model: Model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules())


def sampled_layers(model: Model) -> list[int]:
    """First, middle and last layer."""
    return sorted({0, model.n_layers // 2, model.n_layers - 1})


def filler(model: Model) -> int:
    """The id that padding would use: the tokenizer's or config's padding or end token, else 0."""
    config = model.hf.config.get_text_config()
    for owner in (model.tokenizer, config):
        for name in ("pad_token_id", "eos_token_id"):
            found = getattr(owner, name, None)
            found = found[0] if isinstance(found, list) and found else found
            if isinstance(found, int) and 0 <= found < model.vocabulary:
                return found
    return 0


def _shaken(at: int) -> Any:
    def patch(states: Tensor) -> Tensor:
        changed = states.clone()
        changed[:, at] = states[:, at].roll(1, dims=-1)
        return changed

    return patch


def measured(name: str, value: float, tolerance: float, detail: str, *, needed: bool = True) -> Check:
    """A check that holds up to its tolerance, or that couldn't be measured and so isn't held against the model."""
    holds = value != value or value <= tolerance
    return Check(name, value, tolerance, holds=holds, detail=detail, needed=needed)

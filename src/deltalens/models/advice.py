"""What the doctor measures because it's good to know; a run copes with each of these by itself."""

from __future__ import annotations

import inspect

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.errors import ModelError
from deltalens.models.batches import TokenBatch, forward_logits
from deltalens.models.checks import Check, first_line, relative_difference, tolerance_of
from deltalens.models.interventions.choice import choose_scheme
from deltalens.models.interventions.parity import check_parity
from deltalens.models.model import Model
from deltalens.models.probes import Probe, measured, sampled_layers

#: Norms above this multiple of the median make a token a sink.
SINK_MULTIPLE = 10.0
#: Share of layer 0's inputs that may be bitwise copies of another one.
MOST_DUPLICATES = 0.6
_SAMPLE_TEXT = "The quick brown fox can't jump: 3.14 > 2, naïve café\n\ttabs and «quotes» — 東京."


def determinism(model: Model, probe: Probe) -> Check:
    """The same windows give the same logits again, bit for bit, so on the same kernel."""
    again = [forward_logits(model, probe.batch) for _ in range(2)]
    value = max(relative_difference(probe.logits, logits) for logits in again)
    detail = "change of logits when run again; part of a run's noise floor"
    return measured("determinism", value, 0.0, detail, needed=False)


def stream_start(model: Model, probe: Probe) -> Check:
    """Block 0's input at a position depends on no other token."""
    ids = probe.batch.input_ids.clone()
    at = probe.middle
    ids[:, at] = (ids[:, at] + 1) % model.vocabulary
    changed = Probe.of(model, TokenBatch(ids, probe.batch.attention_mask)).inputs[0]
    kept = [i for i in range(ids.shape[1]) if i != at]
    value = relative_difference(probe.inputs[0][:, kept], changed[:, kept])
    detail = "change of block 0's input when another token changes"
    return measured("stream start", value, tolerance_of(model), detail, needed=False)


def cache_parity(model: Model, probe: Probe) -> Check:
    """Token by token with the model's own cache gives the logits of the whole window."""
    name = "cache"
    try:
        stepped = _stepped(model, probe.batch.input_ids[:1])
    except Exception as error:  # noqa: BLE001 - a cache that breaks only rules out schemes that use it
        return Check(name, float("nan"), 0.0, holds=False, detail=f"no cache: {first_line(error)}", needed=False)
    value = relative_difference(probe.logits[:1], stepped)
    limit = 10 * tolerance_of(model)
    return measured(name, value, limit, "change of logits, one token at a time with the cache", needed=False)


def fast_interventions(model: Model, probe: Probe) -> Check:
    """The scheme that the structure asks for agrees with patch-and-rerun, in float32."""
    scheme = choose_scheme(model)
    positions = _some_positions(probe.batch.input_ids)
    try:
        parity = check_parity(
            model, probe.batch.input_ids, None, layers=sampled_layers(model), positions=positions, scheme=scheme
        )
    except Exception as error:  # noqa: BLE001 - a scheme that breaks is replaced by reruns, like one that differs
        detail = f"{scheme} breaks ({first_line(error)}); a run patches by reruns"
        return Check("fast interventions", float("nan"), 0.0, holds=False, detail=detail, needed=False)
    detail = f"{scheme} against patch-and-rerun" + ("" if parity.holds else "; a run patches by reruns")
    value = parity.max_relative_difference
    return Check("fast interventions", value, parity.tolerance, holds=parity.holds, detail=detail, needed=False)


def block_dtypes(probe: Probe) -> Check:
    """Blocks return the dtype that they take: how many don't."""
    changed = [i for i, (x, y) in enumerate(zip(probe.inputs, probe.outputs, strict=True)) if x.dtype != y.dtype]
    seen = sorted({str(states.dtype).removeprefix("torch.") for states in (*probe.inputs, *probe.outputs)})
    detail = f"blocks that return another dtype than they take; seen: {', '.join(seen)}"
    return measured("block dtypes", float(len(changed)), 0.0, detail, needed=False)


def logit_precision(probe: Probe) -> Check:
    """Logits carry the precision of the model's dtype: how much coarser they are."""
    logits = probe.logits.detach()
    coarse = [d for d in (torch.bfloat16, torch.float16) if torch.equal(logits.to(d).to(logits.dtype), logits)]
    steps = max([torch.finfo(logits.dtype).eps, *(torch.finfo(d).eps for d in coarse)])
    value = float(steps / torch.finfo(torch.float32).eps)
    detail = "rounding step of the logits over float32's; KL far below its square can't be read"
    return measured("logit precision", value, 1.0, detail, needed=False)


def sinks(probe: Probe) -> Check:
    """Tokens whose norm dwarfs the others': the largest over the layer's median. A run excludes them."""
    worst = 0.0
    for states in (*probe.inputs, *probe.outputs):
        norms = states.detach().float().norm(dim=-1).flatten()
        worst = max(worst, float(norms.max() / norms.median().clamp_min(torch.finfo(torch.float32).tiny)))
    detail = "largest norm over its layer's median; a run excludes tokens above the limit"
    return measured("sinks", worst, SINK_MULTIPLE, detail, needed=False)


def duplicates(probe: Probe) -> Check:
    """Share of layer 0's inputs that are bitwise copies of an earlier one. A run merges them."""
    rows = probe.inputs[0].detach().float().flatten(0, 1)
    value = 1.0 - len(torch.unique(rows, dim=0)) / len(rows)
    return measured(
        "duplicates", value, MOST_DUPLICATES, "share of block 0's inputs that repeat an earlier one", needed=False
    )


def tokenizer_round_trip(model: Model) -> Check:
    """Decoding and encoding again gives the same tokens: the share that differs."""
    if model.tokenizer is None:
        return measured("tokenizer", float("nan"), 0.0, "no tokenizer came with the model", needed=False)
    ids = model.tokenizer(_SAMPLE_TEXT, add_special_tokens=False)["input_ids"]
    text = model.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    again = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    differing = sum(a != b for a, b in zip(ids, again, strict=False)) + abs(len(ids) - len(again))
    detail = "share of a sample's tokens that differ after decoding and encoding again"
    if max(ids, default=0) >= model.vocabulary:
        return Check("tokenizer", float("inf"), 0.0, holds=False, detail="token ids beyond the model's embedding")
    return measured("tokenizer", differing / max(1, len(ids)), 0.0, detail, needed=False)


def _some_positions(ids: Int[Tensor, "b s"]) -> Bool[Tensor, "b s"]:
    chosen = torch.zeros(ids.shape, dtype=torch.bool)
    length = ids.shape[1]
    chosen[0, [1, length // 2, length - 1]] = True
    return chosen


@torch.no_grad()
def _stepped(model: Model, ids: Int[Tensor, "b s"]) -> Float[Tensor, "b s v"]:
    names = ("cache", "past_key_values", "cache_params", "state")
    rows, carried = [], None
    takes_positions = "position_ids" in inspect.signature(type(model.hf).forward).parameters
    for position in range(ids.shape[1]):
        key = {} if carried is None else {carried[0]: carried[1]}
        if takes_positions:
            key["position_ids"] = torch.full((ids.shape[0], 1), position, device=ids.device)
        output = model.hf(input_ids=ids[:, position : position + 1], use_cache=True, **key)
        rows.append(output.logits)
        carried = next(((n, output[n]) for n in names if n in output and output[n] is not None), None)
        if carried is None:
            raise ModelError("the model returns no cache")
    return torch.cat(rows, dim=1)

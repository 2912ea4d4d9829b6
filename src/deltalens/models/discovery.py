"""Finding the blocks of a model: by its row, or, for an unknown type, from what its forward pass really calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deltalens.errors import ModelError
from deltalens.models.architectures import ARCHITECTURES, GENERIC_MIXERS, Architecture, Mixers
from deltalens.models.blocks import block_input, hidden_states
from deltalens.models.model import input_device

_PROBE = (2, 8)


@dataclass(frozen=True)
class Found:
    """The blocks of a model in call order, and the row that located them."""

    blocks: tuple[nn.Module, ...]
    kinds: tuple[str, ...]
    architecture: Architecture


def find_blocks(hf: Any) -> Found:
    """Locate the blocks of a transformers model.

    Args:
        hf: A causal language model in eval mode.

    Returns:
        Blocks, kinds and the row; the row is marked `discovered` if none was listed.

    Raises:
        ModelError: A refused type, a listed one whose modules aren't where the row says, or no single stream found.
    """
    config = hf.config
    for name in (config.model_type, config.get_text_config().model_type):
        if name in ARCHITECTURES and ARCHITECTURES[name].refused:
            raise ModelError(f"{name} can't be measured: {ARCHITECTURES[name].refused}.")
    row = ARCHITECTURES.get(config.model_type)
    if row is None:
        blocks, row = _discover(hf)
    elif _fits(hf, row):
        blocks = tuple(hf.get_submodule(row.blocks))
    else:
        raise ModelError(
            f"{type(hf).__name__} lacks {row.blocks}, {row.embedding} or {row.heads[0]}, where {row.model_type} has "
            "its blocks, embedding and head; load it with a causal language model class."
        )
    kinds = tuple(block_kind(block, row.mixers, config, index) for index, block in enumerate(blocks))
    return Found(blocks, kinds, row)


def block_kind(block: nn.Module, mixers: Mixers, config: Any, index: int) -> str:
    """Name how a block mixes tokens: one kind, `hybrid` for two, `mlp` for none."""
    found: list[str] = []
    inside = [type(module).__name__ for module in block.modules() if module is not block]
    for name in inside:
        # Norms are often named after the mixer that they serve.
        kind = None if "Norm" in name else next((kind for fragment, kind in mixers if fragment in name), None)
        if kind is not None and kind not in found:
            found.append(kind)
    if len(found) > 1:
        return "hybrid"
    if found == ["attention"] and _slides(config.get_text_config(), index):
        return "sliding_attention"
    return found[0] if found else "mlp"


def _slides(config: Any, index: int) -> bool:
    if config.model_type == "gpt_neo":
        return str(config.attention_layers[index]) == "local"
    if config.model_type == "recurrent_gemma":
        return True
    layer_types = getattr(config, "layer_types", None)
    if layer_types and index < len(layer_types):
        return layer_types[index] in ("sliding_attention", "chunked_attention")
    enabled = getattr(config, "use_sliding_window", True)
    return bool(enabled and getattr(config, "sliding_window", None))


def _fits(hf: nn.Module, row: Architecture) -> bool:
    modules = dict(hf.named_modules(remove_duplicate=False))
    placed = row.embedding in modules and any(head in modules for head in row.heads)
    return placed and isinstance(modules.get(row.blocks), nn.ModuleList)


@dataclass
class _Trace:
    """Calls of one group's children during one forward pass."""

    path: str
    children: Sequence[nn.Module]
    order: list[int]
    worst: float = 0.0
    problem: str | None = None
    last: Tensor | None = None

    def judge(self) -> str | None:
        """Why this group isn't the chain of blocks; None if it is."""
        if self.problem is not None:
            return self.problem
        if sorted(self.order) != list(range(len(self.children))):
            return f"{len(set(self.order))} of {len(self.children)} are called, {len(self.order)} times in all"
        return None


def _discover(hf: Any) -> tuple[tuple[nn.Module, ...], Architecture]:
    traces = [_Trace(path, children, []) for path, children in _groups(hf)]
    handles = [handle for trace in traces for handle in _watch(trace, int(hf.config.get_text_config().hidden_size))]
    generator = torch.Generator().manual_seed(0)
    embedding = hf.get_input_embeddings()
    ids = torch.randint(0, embedding.weight.shape[0], _PROBE, generator=generator)
    try:
        with torch.no_grad():
            hf(input_ids=ids.to(input_device(embedding)), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    told = getattr(hf.config.get_text_config(), "num_hidden_layers", None)
    chains = [t for t in traces if t.judge() is None and (told is None or len(t.children) == told)]
    if not chains:
        raise ModelError(_no_chain(hf, traces))
    # Sub-layers of a block can form a chain of their own, so the outermost wins, then the longest.
    best = min(chains, key=lambda t: (t.path.count("."), -len(t.children)))
    names = {id(module): name for name, module in hf.named_modules()}
    head = hf.get_output_embeddings()
    row = Architecture(
        model_type=hf.config.model_type, blocks=best.path, embedding=names[id(embedding)],
        heads=(names.get(id(head), ""),), mixers=GENERIC_MIXERS, mixer_outputs=(), mlp_outputs=(), discovered=True,
    )  # fmt: skip
    blocks = tuple(best.children[index] for index in best.order)
    return blocks, replace(row, returns="tuple" if _returns_tuple(hf, blocks[0], ids) else "tensor")


def _groups(hf: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    for path, module in hf.named_modules():
        children = list(module.children())
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            if children:
                yield path, children
            continue
        kinds: dict[type[nn.Module], list[nn.Module]] = {}
        for child in children:
            kinds.setdefault(type(child), []).append(child)
        for kind, group in kinds.items():
            if len(group) > 1:
                yield f"{path}[{kind.__name__}]", group


def _watch(trace: _Trace, width: int) -> Iterator[torch.utils.hooks.RemovableHandle]:
    def before(index: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        _note(trace, index, lambda: block_input(args, kwargs), width)
        trace.order.append(index)

    def after(index: int, output: object) -> None:
        _note(trace, index, lambda: hidden_states(output), width, is_output=True)

    for index, child in enumerate(trace.children):
        yield child.register_forward_pre_hook(lambda _, a, k, i=index: before(i, a, k), with_kwargs=True)
        yield child.register_forward_hook(lambda _, __, out, i=index: after(i, out))


def _note(trace: _Trace, index: int, read: Any, width: int, *, is_output: bool = False) -> None:
    if trace.problem is not None:
        return
    try:
        states: Tensor = read()
    except ModelError as error:
        trace.problem = str(error)
        return
    if states.shape != (*_PROBE, width):
        trace.problem = f"its states have shape {tuple(states.shape)}, not {(*_PROBE, width)}"
    elif is_output:
        trace.last = states.detach().clone()
    elif trace.last is not None and not torch.equal(trace.last.to(states), states):
        trace.problem = f"the input of {trace.path}.{index} isn't the output of the one called before it"


def _no_chain(hf: Any, traces: list[_Trace]) -> str:
    told = getattr(hf.config.get_text_config(), "num_hidden_layers", None)
    likely = [t for t in traces if t.order and "[" not in t.path]
    best = max(likely, key=lambda t: (len(t.children) == told, -t.path.count("."), len(t.children)), default=None)
    reason = "no list of blocks is called" if best is None else f"{best.path}: {best.judge()}"
    return (
        f"The model type {hf.config.model_type} is unknown, and its forward pass shows no chain of blocks with one "
        f"(B, S, d) stream ({reason.rstrip('.')}); it can't be measured."
    )


def _returns_tuple(hf: Any, block: nn.Module, ids: Tensor) -> bool:
    seen: list[bool] = []
    handle = block.register_forward_hook(lambda _, __, output: seen.append(isinstance(output, tuple)))
    try:
        with torch.no_grad():
            hf(input_ids=ids.to(input_device(hf.get_input_embeddings())), use_cache=False)
    finally:
        handle.remove()
    return seen[0]

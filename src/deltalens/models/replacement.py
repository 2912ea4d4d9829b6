"""A tokenwise map as a module that stands in for a block, and running a model with such modules, always undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from deltalens.core.maps.forms import form_of
from deltalens.core.maps.global_map import GlobalMap
from deltalens.errors import InputError, ModelError
from deltalens.models.blocks import block_input, call_arguments, hidden_states
from deltalens.models.bypass import OutputKind, learn_output_kinds, replaced_forward
from deltalens.models.interventions.backbone import Backbone, undisturbed
from deltalens.models.model import Model, ModelIdentity


@dataclass(frozen=True)
class ReplacementFacts:
    """What a replacement is of.

    Attributes:
        map: canonical name of the map.
        layer: the block it was fitted to stand in for, 0-based.
        width: components of a state.
        model: the model that it was fitted on.
        output: what the block returns.
        cache_layer: the block's own number in the model's cache, or None where it keeps no keys there.
    """

    map: str
    layer: int
    width: int
    model: ModelIdentity
    output: OutputKind
    cache_layer: int | None


class Replacement(nn.Module):
    """``h_{l+1} = T(h_l)`` in place of a block: the residual stream is part of T, and no other token is read.

    It takes what the block takes and returns what the block returns; masks, positions and keys are ignored, but for a
    cache, which is told how many tokens passed. Computes in its parameters' dtype, float32 at least, and returns the
    dtype of the states that come in.

    Example:
        >>> import torch
        >>> import deltalens as dl
        >>> kept = dl.load_replacement("maps/03.linear.safetensors")  # doctest: +SKIP
        >>> with dl.replaced_blocks(model, {3: kept}):  # doctest: +SKIP
        ...     model.hf.generate(ids)
    """

    def __init__(self, parameters: GlobalMap, facts: ReplacementFacts) -> None:
        super().__init__()
        self.facts = facts
        for name, tensor in parameters.tensors().items():
            self.register_buffer(name, tensor.detach().clone().contiguous())

    @property
    def parameters_by_name(self) -> dict[str, Tensor]:
        """The map's parameters, as `core.maps.forms` names them."""
        return dict(self.named_buffers())

    @property
    def formula(self) -> str:
        """T in terms of the parameters' names."""
        return form_of(self.facts.map).formula

    def states(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """``T(x)``, in the dtype of x."""
        tensors = self.parameters_by_name
        at_least = [torch.float32, *(tensor.dtype for tensor in tensors.values())]
        wide = x.to(torch.float64 if torch.float64 in at_least else torch.float32)
        rows = wide.reshape(-1, x.shape[-1])
        form = form_of(self.facts.map).kind(**tensors)
        return (rows + form.update(rows)).reshape(wide.shape).to(x.dtype)

    def forward(self, *args: object, **kwargs: object) -> object:
        """What the block would return, with ``T(h_l)`` as hidden states."""
        x = block_input(args, kwargs)
        count_in_cache((*args, *kwargs.values()), self.facts.cache_layer, x)
        return self.facts.output.pack(self.states(x), kwargs)

    def extra_repr(self) -> str:
        """Map, layer and model."""
        facts = self.facts
        return f"{facts.map}, layer {facts.layer}→{facts.layer + 1} of {facts.model.name}, width {facts.width}"


@contextmanager
def replaced_blocks(model: Model, replacements: Mapping[int, nn.Module]) -> Iterator[None]:
    """Run a model with modules in place of some of its blocks, ``h_{l+1} = module(h_l)``, undone on leaving.

    Args:
        model: a loaded model.
        replacements: block index -> a `Replacement`, or any module from states (B, S, d) to states (B, S, d).

    Yields:
        None.

    Raises:
        InputError: a layer that doesn't exist, or a replacement of another layer or another model.
        ModelError: other blocks read the keys of a replaced one.

    Source:
        Replacing a layer's output after arXiv 2604.02459, for all positions and with a cache.

    Example:
        >>> import torch
        >>> import deltalens as dl
        >>> model = dl.load("tiny-gpt2")
        >>> ids = torch.tensor([[5, 6, 7]])
        >>> with dl.replaced_blocks(model, {2: torch.nn.Identity()}):
        ...     skipped = model.hf(ids).logits
        >>> bool((skipped == model.hf(ids).logits).all())
        False
    """
    for layer, module in replacements.items():
        _require_fitting(model, layer, module)
    if getattr(model.hf.config.get_text_config(), "num_kv_shared_layers", 0):
        raise ModelError(f"{model.identity.name} shares keys between blocks; none of them can be replaced.")
    with ExitStack() as undo:
        kinds = output_kinds(model) if replacements else ()
        for layer, module in replacements.items():
            block = model.blocks[layer]
            undo.enter_context(replaced_forward(block, _stand_in(block, layer, module, kinds[layer])))
        yield


def output_kinds(model: Model) -> tuple[OutputKind, ...]:
    """What each block returns beside its hidden states, learnt from one pass over two tokens."""
    with undisturbed(model.hf), learn_output_kinds(model.blocks) as kinds:
        Backbone.of(model).run(torch.zeros((1, 2), dtype=torch.long, device=model.device), use_cache=True)
    return tuple(kinds[index] for index in range(model.n_layers))


def cache_layer(block: nn.Module, layer: int) -> int | None:
    """The number under which a block keeps keys in a cache; None for a block that keeps none, such as a recurrent one.

    Args:
        block: the block.
        layer: its index among the blocks.
    """
    numbers = [found for part in block.modules() if isinstance(found := getattr(part, "layer_idx", None), int)]
    return numbers[0] if numbers else layer


def count_in_cache(arguments: tuple[object, ...], layer: int | None, states: Float[Tensor, "b s d"]) -> None:
    """Let a cache know that tokens passed a layer that keeps no keys, by keys of one component.

    Models read positions and mask lengths off a layer's entry, often the first one's; an empty entry would put every
    new token at position 0.
    """
    from transformers.cache_utils import Cache, CacheLayerMixin

    cache = next((value for value in arguments if isinstance(value, Cache)), None)
    if cache is None or layer is None:
        return
    if layer < len(cache.layers) and not isinstance(cache.layers[layer], CacheLayerMixin):
        return
    nothing = states.new_zeros((states.shape[0], 1, states.shape[1], 1))
    cache.update(nothing, nothing, layer)


def _stand_in(block: nn.Module, layer: int, module: nn.Module, kind: OutputKind) -> Callable[..., object]:
    number = cache_layer(block, layer)

    def forward(*args: object, **kwargs: object) -> object:
        x = block_input(args, kwargs)
        count_in_cache((*args, *kwargs.values()), number, x)
        states = hidden_states(module(x))
        if states.shape != x.shape:
            raise ModelError(
                f"The module in place of block {layer} turned {tuple(x.shape)} into {tuple(states.shape)}."
            )
        return kind.pack(states.to(x.dtype), call_arguments(block, args, kwargs))

    return forward


def _require_fitting(model: Model, layer: int, module: nn.Module) -> None:
    if not 0 <= layer < model.n_layers:
        raise InputError(f"Layer {layer} doesn't exist; the model has layers 0 to {model.n_layers - 1}.")
    if not isinstance(module, Replacement):
        return
    facts, identity = module.facts, model.identity
    if facts.layer != layer:
        raise InputError(f"The replacement is of layer {facts.layer}, but layer {layer} was to be replaced by it.")
    if facts.width != model.width or facts.model.weight_hash != identity.weight_hash:
        raise InputError(
            f"The replacement was fitted on {facts.model.name} with weights {facts.model.weight_hash[:12]}…, but this "
            f"is {identity.name} with weights {identity.weight_hash[:12]}…; fit one on this model."
        )

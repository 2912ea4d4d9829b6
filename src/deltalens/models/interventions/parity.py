"""The gate: a fast scheme is compared with patch-and-rerun on the windows at hand before its numbers are used."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.errors import ModelError
from deltalens.models.blocks import override_output, watch_blocks
from deltalens.models.interventions.backbone import undisturbed
from deltalens.models.interventions.choice import choose_scheme
from deltalens.models.interventions.session import InterventionSession
from deltalens.models.model import Model

_LOG = logging.getLogger(__name__)

#: Largest difference of a logit that a fast scheme may show in float32, as a share of the logits' range.
TOLERANCE = 1e-4
#: The same in half precision, where rerun and fast scheme round differently; float32 is what proves a scheme.
HALF_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Parity:
    """How far a scheme is from patch-and-rerun.

    Attributes:
        scheme: Its name.
        max_relative_difference: Largest difference of a logit in float32, as a share of the logits' range.
        in_dtype: The same in the model's own dtype.
        tolerance: Limit in float32.
        dtype_tolerance: Limit in the model's own dtype.
        holds: Whether both are within their limits.
        layers: Layers that were compared.
        positions: How many positions were compared in each.
    """

    scheme: str
    max_relative_difference: float
    in_dtype: float
    tolerance: float
    dtype_tolerance: float
    holds: bool
    layers: tuple[int, ...]
    positions: int


def check_parity(
    model: Model,
    input_ids: Int[Tensor, "windows tokens"],
    attention_mask: Int[Tensor, "windows tokens"] | Bool[Tensor, "windows tokens"] | None = None,
    *,
    layers: Sequence[int],
    positions: Bool[Tensor, "windows tokens"],
    scheme: str,
) -> Parity:
    """Compare a scheme with patch-and-rerun, in float32 and in the model's dtype.

    Each token gets the state of its neighbour, a large and natural change. The judge is the plain model with one hook,
    run once per position for scope `single` and once for scope `all`.

    Args:
        model: A loaded model.
        input_ids: `(B, S)` windows, best those of the run itself.
        attention_mask: `(B, S)`; padding on the right.
        layers: Layers to compare.
        positions: `(B, S)` positions to compare.
        scheme: The scheme's name.

    Returns:
        The largest differences and whether they're within the tolerances.

    Raises:
        ModelError: The model is in half precision and can't be copied in float32.
    """
    own = _largest_difference(model, input_ids, attention_mask, layers, positions, scheme)
    exact = own
    if model.dtype != torch.float32 and model.dtype != torch.float64:
        exact = _largest_difference(in_float32(model), input_ids, attention_mask, layers, positions, scheme)
    limit = HALF_TOLERANCE if model.dtype in (torch.float16, torch.bfloat16) else TOLERANCE
    return Parity(
        scheme=scheme,
        max_relative_difference=exact,
        in_dtype=own,
        tolerance=TOLERANCE,
        dtype_tolerance=limit,
        holds=exact <= TOLERANCE and own <= limit,
        layers=tuple(layers),
        positions=int(positions.sum()),
    )


def trusted_scheme(
    model: Model,
    input_ids: Int[Tensor, "windows tokens"],
    attention_mask: Int[Tensor, "windows tokens"] | Bool[Tensor, "windows tokens"] | None = None,
    *,
    layers: Sequence[int],
    positions: Bool[Tensor, "windows tokens"],
    scheme: str | None = None,
) -> tuple[str, Parity]:
    """Return the scheme to use and its parity: the structure's choice if it holds, else `rerun` with a warning.

    Args:
        model: A loaded model.
        input_ids: `(B, S)` windows, as many as in the batches to come: whether states can be kept depends on it.
        attention_mask: `(B, S)`; padding on the right.
        layers: Layers to compare.
        positions: `(B, S)` positions to compare.
        scheme: A scheme's name instead of the structure's choice.

    Returns:
        Name of a scheme, and the parity of the one that was tried.
    """
    chosen = choose_scheme(model, (input_ids.shape[0], input_ids.shape[1])) if scheme is None else scheme
    try:
        parity = check_parity(model, input_ids, attention_mask, layers=layers, positions=positions, scheme=chosen)
    except Exception as error:
        if chosen == "rerun":
            raise
        _LOG.warning("Scheme %s fails on %s (%s); using rerun.", chosen, type(model.hf).__name__, error)
        nothing = float("nan")
        return "rerun", Parity(
            chosen, nothing, nothing, TOLERANCE, HALF_TOLERANCE, False, tuple(layers), int(positions.sum())
        )
    if parity.holds or chosen == "rerun":
        return chosen, parity
    _LOG.warning(
        "Scheme %s differs from patch-and-rerun by %.1e of the logits' range on %s; using rerun.",
        chosen, max(parity.max_relative_difference, parity.in_dtype), type(model.hf).__name__,
    )  # fmt: skip
    return "rerun", parity


def in_float32(model: Model) -> Model:
    """Return a float32 copy of a model, its blocks found by name; the model itself stays."""
    names = {id(module): name for name, module in model.hf.named_modules()}
    try:
        upcast = copy.deepcopy(model.hf).float()
    except Exception as error:  # noqa: BLE001 (what fails depends on how the weights are stored)
        raise ModelError(
            f"{type(model.hf).__name__} can't be copied in float32 for the parity check: {error}"
        ) from None
    blocks = tuple(upcast.get_submodule(names[id(block)]) for block in model.blocks)
    return dataclasses.replace(model, hf=upcast, blocks=blocks)


def patch_and_rerun(
    model: Model,
    input_ids: Int[Tensor, "windows tokens"],
    *,
    layer: int,
    states: Float[Tensor, "windows tokens width"],
    positions: Bool[Tensor, "windows tokens"],
) -> Float[Tensor, "n vocabulary"]:
    """Return the logits of asked tokens, one plain run of the whole model per token: the obvious way.

    Args:
        model: A loaded model.
        input_ids: `(B, S)` windows.
        layer: The block whose output is patched.
        states: `(B, S, d)` replacements.
        positions: `(B, S)` tokens that are asked for.

    Returns:
        `(n, V)` logits in the order of `positions.nonzero()`.
    """
    rows = []
    for window, position in positions.nonzero().tolist():
        with override_output(model.blocks[layer], _one_token(states[window, position], position)):
            ids = input_ids[window : window + 1, : max(position + 1, min(2, input_ids.shape[1]))]
            rows.append(model.hf(input_ids=ids.to(model.device), use_cache=False).logits[0, position])
    return torch.stack(rows)


def _one_token(state: Tensor, position: int) -> Callable[[Tensor], Tensor]:
    def patch(original: Tensor) -> Tensor:
        changed = original.clone()
        changed[:, position] = state.to(original)
        return changed

    return patch


def _largest_difference(
    model: Model,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    layers: Sequence[int],
    positions: Tensor,
    scheme: str,
) -> float:
    input_ids = input_ids.to(model.device)
    single, together, patches = {}, {}, _neighbours(model, input_ids, layers)
    with undisturbed(model.hf):
        for layer in layers:
            single[layer] = patch_and_rerun(model, input_ids, layer=layer, states=patches[layer], positions=positions)
            with override_output(model.blocks[layer], patches[layer]):
                together[layer] = model.hf(input_ids=input_ids, use_cache=False).logits[positions]
    differences = []
    with InterventionSession(model, input_ids, attention_mask, scheme=scheme) as session:
        for layer, states in patches.items():
            alone = session.replace(layer, states, "single", positions)[positions]
            everywhere = session.replace(layer, states, "all")[positions]
            differences += [
                _relative_difference(alone, single[layer]),
                _relative_difference(everywhere, together[layer]),
            ]
    return max(differences)


def _neighbours(model: Model, input_ids: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """Block outputs in which each token has its neighbour's state."""
    outputs: dict[int, Tensor] = {}
    with undisturbed(model.hf), watch_blocks(model.blocks, on_output=outputs.__setitem__):
        model.hf(input_ids=input_ids, use_cache=False)
    return {layer: outputs[layer].roll(1, dims=1) for layer in layers}


def _relative_difference(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).abs().max() / (expected.max() - expected.min()).double()
    return float("inf") if bool(torch.isnan(difference)) else float(difference)

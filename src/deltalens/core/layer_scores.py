"""Scores of a layer that need no intervention: Block Influence and linearity."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.core.checks import require_matrix


def block_influence(x: Float[Tensor, "n d"], y: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """``1 - cos(x, y)`` of each token; its mean over tokens is the layer's Block Influence.

    Args:
        x: Layer inputs (n, d).
        y: Layer outputs (n, d).

    Returns:
        From 0 to 2, float64; NaN where a state is zero.

    Raises:
        InputError: An argument is malformed.

    Source:
        Men et al., ShortGPT, arXiv 2403.03853, equation 1.

    Example:
        >>> block_influence(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])).tolist()
        [1.0]
    """
    require_matrix("x", x)
    require_matrix("y", y, width=x.shape[1], rows=x.shape[0])
    # 1 - cos = ‖x/‖x‖ - y/‖y‖‖² / 2, without the cancellation of 1 - cos.
    directions = [states.double() / torch.linalg.vector_norm(states.double(), dim=1, keepdim=True) for states in (x, y)]
    influence: Tensor = (directions[0] - directions[1]).square().sum(1) / 2
    return influence


@dataclass(frozen=True)
class Linearity:
    """How well one linear map of centred inputs gives centred outputs.

    Attributes:
        states: The score of outputs, ``1 - min_A ‖X̃A - Ỹ‖²``; NaN where it is undefined.
        updates: The same of updates, ``D̃`` in place of ``Ỹ``.
        floor: What unrelated outputs would reach on average: the inputs' rank over n - 1.
    """

    states: float
    updates: float
    floor: float


def linearity(x: Float[Tensor, "n d"], y: Float[Tensor, "n d"]) -> Linearity:
    """``1 - min_A ‖X̃A - Ỹ‖²_F`` with ``X̃ = (X - x̄) / ‖X - x̄‖_F``, ``Ỹ`` alike: Procrustes without its rotation.

    Args:
        x: Layer inputs (n, d).
        y: Layer outputs (n, d).

    Returns:
        Scores from 0 to 1, in float64. NaN where outputs (or updates) are all equal, and where n - 1 is no more than
        the rank of the centred inputs, since the score is 1 by construction there.

    Raises:
        InputError: An argument is malformed.

    Source:
        Razzhigaev et al., arXiv 2405.12250, section 3.

    Example:
        >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        >>> round(linearity(x, x @ torch.ones(3, 3) + 5).states, 6)
        1.0
    """
    require_matrix("x", x)
    require_matrix("y", y, width=x.shape[1], rows=x.shape[0])
    wide_x, wide_y = x.double(), y.double()
    inputs, outputs, updates = (_centered(states) for states in (wide_x, wide_y, wide_y - wide_x))
    values, vectors = torch.linalg.eigh(inputs.mT @ inputs)
    kept = values > max(x.shape) * torch.finfo(values.dtype).eps * values[-1].clamp_min(0)
    rank = int(kept.sum())
    if rank >= x.shape[0] - 1:
        return Linearity(torch.nan, torch.nan, 1.0)
    # Columns of the projector's orthonormal basis: U = X̃ V σ⁻¹; the score is the share of Ỹ inside it.
    basis = (inputs @ vectors[:, kept]) / values[kept].sqrt() if rank else inputs[:, :0]
    return Linearity(_share(basis, outputs), _share(basis, updates), rank / (x.shape[0] - 1))


def _centered(states: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Rows without their mean; zero where they are equal but for the rounding of that mean."""
    apart: Tensor = states - states.mean(0)
    rounding = 8 * torch.finfo(states.dtype).eps * torch.linalg.vector_norm(states)
    return apart if bool(torch.linalg.vector_norm(apart) > rounding) else torch.zeros_like(apart)


def _share(basis: Float[Tensor, "n r"], centered: Float[Tensor, "n d"]) -> float:
    energy = centered.square().sum()
    if not bool(energy > 0):
        return float("nan")
    return min(1.0, float((basis.mT @ centered).square().sum() / energy))

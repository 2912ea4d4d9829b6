"""Sizes, angles and projections of updates and residuals, per token, and their levels by chance."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.core.decomposition import Decomposition


@dataclass(frozen=True)
class Geometry:
    """Per-token geometric measures in float64, NaN where one is undefined.

    Norms are in state units, errors and projections are shares, cosines are absolute (``_signed``: signed), angles
    are those of the absolute cosines, in degrees.
    """

    state_norm: Float[Tensor, " n"]
    next_norm: Float[Tensor, " n"]
    update_norm: Float[Tensor, " n"]
    tokenwise_norm: Float[Tensor, " n"]
    residual_norm: Float[Tensor, " n"]
    relative_error: Float[Tensor, " n"]
    relative_update_error: Float[Tensor, " n"]
    cos_full_tokenwise: Float[Tensor, " n"]
    cos_full_tokenwise_signed: Float[Tensor, " n"]
    cos_residual_tokenwise: Float[Tensor, " n"]
    cos_residual_tokenwise_signed: Float[Tensor, " n"]
    angle_full_tokenwise: Float[Tensor, " n"]
    angle_residual_tokenwise: Float[Tensor, " n"]
    proj_full: Float[Tensor, " n"]
    proj_tokenwise: Float[Tensor, " n"]
    proj_residual: Float[Tensor, " n"]


def measure_geometry(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n d"],
    decomposition: Decomposition[Tensor],
    *,
    proj_tokenwise_trivial: bool,
) -> Geometry:
    """Measure ``Δ_full = y - x``, ``Δ_tok = T(x) - x`` and ``r = y - T(x)`` of every token.

    Args:
        x: Layer inputs (n, d).
        y: Layer outputs (n, d).
        decomposition: Of the same tokens.
        proj_tokenwise_trivial: Whether ``proj_tokenwise`` is 1 by construction (it is NaN then).

    Returns:
        The measures.

    Source:
        Section 3 of arXiv 2604.02459.

    Example:
        >>> import torch
        >>> from deltalens.core.decompose import decompose
        >>> x = torch.eye(3)
        >>> y = x + torch.tensor([1.0, 1.0, 1.0])
        >>> found = decompose(x, y, protocol="in_sample", map="mean", neighbors=3)
        >>> measure_geometry(x, y, found, proj_tokenwise_trivial=True).cos_full_tokenwise.tolist()
        [1.0, 1.0, 1.0]
    """
    return _measure(x, y, decomposition, decomposition.residual.double(), proj_tokenwise_trivial)


def chance_geometry(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n d"],
    decomposition: Decomposition[Tensor],
    partner: Int[Tensor, " n"],
    *,
    proj_tokenwise_trivial: bool = True,
) -> Geometry:
    """The same measures with each token's residual taken from its partner, ``r_i := r_partner(i)``.

    Args:
        x: Layer inputs (n, d).
        y: Layer outputs (n, d).
        decomposition: Of the same tokens.
        partner: A token of another window for each, -1 for none (its residual's measures are NaN then).
        proj_tokenwise_trivial: As in ``measure_geometry``.

    Returns:
        The measures.

    Source:
        Real states are far from isotropic, so that 0.67/√d is no chance level.

    Example:
        >>> import torch
        >>> from deltalens.core.decompose import decompose
        >>> x, y = torch.eye(3), torch.ones(3, 3)
        >>> found = decompose(x, y, protocol="in_sample", map="mean", neighbors=3)
        >>> chance_geometry(x, y, found, torch.tensor([1, 2, -1])).residual_norm.isnan().tolist()
        [False, False, True]
    """
    residual = decomposition.residual.double()
    taken = torch.where((partner >= 0).unsqueeze(1), residual[partner.clamp_min(0)], torch.nan)
    return _measure(x, y, decomposition, taken, proj_tokenwise_trivial)


def split_residual(decomposition: Decomposition[Tensor]) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """Split the residual by the dominant subspace: ``r_in = V Vᵀ r`` and ``r_out = r - r_in``.

    Args:
        decomposition: Of n tokens.

    Returns:
        r_in and r_out; an empty V gives ``r_in = 0``.

    Source:
        The future work that arXiv 2604.02459 names.

    Example:
        >>> import torch
        >>> from deltalens.core.decompose import decompose
        >>> x, y = torch.eye(3), torch.ones(3, 3)
        >>> inside, _ = split_residual(decompose(x, y, protocol="in_sample", map="identity", neighbors=3))
        >>> inside.abs().max().item()
        0.0
    """
    basis, residual = decomposition.basis, decomposition.residual
    inside = torch.einsum("ndm,nm->nd", basis, torch.einsum("ndm,nd->nm", basis, residual))
    return inside, residual - inside


def _measure(
    x: Tensor, y: Tensor, decomposition: Decomposition[Tensor], residual: Tensor, proj_tokenwise_trivial: bool
) -> Geometry:
    full = decomposition.update.double()
    # y - x - r is exact where T(x) - x would cancel: T(x) was rounded to the size of x.
    tokenwise = full - decomposition.residual.double()
    x, y = x.double(), y.double()
    norms = [_norm(vectors) for vectors in (x, y, full, tokenwise, residual)]
    state, following, update, moved, left = norms
    cos_full, angle_full = _cosine_and_angle(full, tokenwise)
    cos_residual, angle_residual = _cosine_and_angle(residual, tokenwise)
    tokenwise_share = _share_inside(tokenwise, decomposition)
    return Geometry(
        state_norm=state,
        next_norm=following,
        update_norm=update,
        tokenwise_norm=moved,
        residual_norm=left,
        relative_error=_ratio(left, following),
        relative_update_error=_ratio(left, update),
        cos_full_tokenwise=cos_full.abs(),
        cos_full_tokenwise_signed=cos_full,
        cos_residual_tokenwise=cos_residual.abs(),
        cos_residual_tokenwise_signed=cos_residual,
        angle_full_tokenwise=angle_full,
        angle_residual_tokenwise=angle_residual,
        proj_full=_share_inside(full, decomposition),
        proj_tokenwise=torch.full_like(tokenwise_share, torch.nan) if proj_tokenwise_trivial else tokenwise_share,
        proj_residual=_share_inside(residual, decomposition),
    )


def _norm(vectors: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=1)
    return lengths


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator > 0, numerator / denominator, torch.nan)


def _cosine_and_angle(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The signed cosine, and the angle of its absolute value by atan2, in degrees."""
    first, second = (_ratio(v, _norm(v).unsqueeze(1)) for v in (first, second))
    cosine = (first * second).sum(1)
    sine = _norm(first - cosine.unsqueeze(1) * second)
    return cosine.clamp(-1, 1), torch.rad2deg(torch.atan2(sine, cosine.abs()))


def _share_inside(vectors: Tensor, decomposition: Decomposition[Tensor]) -> Tensor:
    """``‖Vᵀ v‖² / ‖v‖²``; NaN for an empty V or a zero v."""
    direction = _ratio(vectors, _norm(vectors).unsqueeze(1)).to(decomposition.basis.dtype)
    inside = torch.einsum("ndm,nd->nm", decomposition.basis, direction).double()
    share = inside.square().sum(1).clamp_max(1)
    return torch.where(decomposition.subspace_rank > 0, share, torch.nan)

"""Structure over the residuals of many tokens: spectrum, effective rank, shared directions, shares by part."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Spectrum:
    """How the directions of n vectors are spread over d dimensions; all vectors count alike, zero ones not at all.

    ``shares`` are ``p_k = σ_k² / Σ σ²`` of the unit vectors stacked, largest first; ``effective_rank`` is
    ``exp(-Σ p_k log p_k)``, ``participation`` is ``1 / Σ p_k²``; NaN where every vector is zero.
    """

    shares: Float[Tensor, " r"]
    effective_rank: float
    participation: float

    def leading(self, count: int) -> float:
        """``Σ p_k`` of the first ``count`` directions."""
        return float(self.shares[:count].sum()) if len(self.shares) else float("nan")


def spectrum(vectors: Float[Tensor, "n d"]) -> Spectrum:
    """The spectrum of the vectors' directions, in float64.

    Args:
        vectors: Residuals or updates (n, d).

    Returns:
        Shares, effective rank and participation ratio.

    Source:
        Roy & Vetterli (2007), "The effective rank: a measure of effective dimensionality", on squared singular values.

    Example:
        >>> import torch
        >>> found = spectrum(torch.eye(3).repeat(2, 1))
        >>> round(found.effective_rank, 6), round(found.participation, 6)
        (3.0, 3.0)
    """
    units = _units(vectors)
    if len(units) == 0:
        return Spectrum(units.new_empty(0), float("nan"), float("nan"))
    gram = units.mT @ units if units.shape[0] > units.shape[1] else units @ units.mT
    energies = torch.linalg.eigvalsh(gram).flip(0).clamp_min(0)
    shares = energies / energies.sum()
    entropy = -torch.special.xlogy(shares, shares).sum()
    return Spectrum(shares.cpu(), float(entropy.exp()), float(1 / shares.square().sum()))


@dataclass(frozen=True)
class SharedDirections:
    """Agreement between vectors of different windows, over all such pairs; NaN where there are none.

    ``mean_cosine`` is the mean of ``cos(r_i, r_j)``: what they have in common as a vector. ``mean_squared_cosine`` is
    that of ``cos²``: what they have in common up to sign, 1/d for isotropic ones.
    """

    mean_cosine: float
    mean_squared_cosine: float


def shared_directions(vectors: Float[Tensor, "n d"], windows: Int[Tensor, " n"]) -> SharedDirections:
    """Mean cosine and mean squared cosine over all pairs of tokens in different windows.

    Args:
        vectors: Residuals (n, d); zero ones are left out.
        windows: Each token's window (n,). Tokens of one window share their context and are never paired.

    Returns:
        Both means, exact: through sums per window, not through n² pairs.

    Source:
        This package; compare `permuted_coordinates` for the level that large components alone give.

    Example:
        >>> import torch
        >>> shared_directions(torch.tensor([[1.0, 0.0], [-2.0, 0.0]]), torch.tensor([0, 1]))
        SharedDirections(mean_cosine=-1.0, mean_squared_cosine=1.0)
    """
    kept = vectors.double().norm(dim=1) > 0
    units, labels = _units(vectors), torch.unique(windows[kept], return_inverse=True)[1]
    count, width = units.shape
    sizes = torch.bincount(labels) if count else labels
    pairs = count**2 - int(sizes.square().sum())
    if pairs == 0:
        return SharedDirections(float("nan"), float("nan"))
    sums = units.new_zeros((len(sizes), width)).index_add_(0, labels, units)
    cosines = float(sums.sum(0).square().sum() - sums.square().sum())
    squares = _gram_energy(units) - sum(_gram_energy(units[labels == label]) for label in range(len(sizes)))
    return SharedDirections(cosines / pairs, squares / pairs)


def permuted_coordinates(vectors: Float[Tensor, "n d"], seed: int) -> Float[Tensor, "n d"]:
    """Each column permuted on its own: which components are large stays, how they vary together goes.

    Args:
        vectors: Residuals (n, d).
        seed: Seeds the permutations.

    Returns:
        Vectors with the same values in every column.

    Source:
        The null of `shared_directions`: a few large components make any two states alike.

    Example:
        >>> import torch
        >>> permuted_coordinates(torch.tensor([[1.0, 5.0], [2.0, 5.0]]), seed=0)[:, 1].tolist()
        [5.0, 5.0]
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(vectors.shape, generator=generator).argsort(dim=0)
    return vectors.gather(0, order.to(vectors.device))


def explained_share(residual: Float[Tensor, "n d"], part: Float[Tensor, "n d"]) -> float:
    """``Σ ⟨r_i, p_i⟩ / Σ ‖r_i‖²``: the share of the residuals' energy that a part of them accounts for.

    Shares of parts that sum to the residual sum to 1; one is negative where a part points against the residual.

    Args:
        residual: Residuals (n, d).
        part: One summand of each (n, d).

    Returns:
        The share; NaN where all residuals are zero.

    Source:
        The covariance decomposition of a sum's variance.

    Example:
        >>> import torch
        >>> r = torch.tensor([[2.0, 0.0]])
        >>> explained_share(r, 0.75 * r)
        0.75
    """
    energy = float(residual.double().square().sum())
    return float((residual.double() * part.double()).sum()) / energy if energy > 0 else float("nan")


def squared_cosines(first: Float[Tensor, "n d"], second: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """``cos²`` of each pair of rows in float64: the share of one that the other's direction explains; NaN for zeros."""
    first, second = first.double(), second.double()
    sizes = first.square().sum(1) * second.square().sum(1)
    found: Tensor = torch.where(sizes > 0, (first * second).sum(1).square() / sizes, torch.nan)
    return found


def _units(vectors: Tensor) -> Tensor:
    """The non-zero rows at length 1, in float64."""
    wide = vectors.double()
    sizes = wide.norm(dim=1, keepdim=True)
    kept = sizes[:, 0] > 0
    units: Tensor = wide[kept] / sizes[kept]
    return units


def _gram_energy(units: Tensor) -> float:
    """``Σ_ij ⟨u_i, u_j⟩²``, through the smaller Gram matrix."""
    gram = units.mT @ units if units.shape[0] > units.shape[1] else units @ units.mT
    return float(gram.square().sum())

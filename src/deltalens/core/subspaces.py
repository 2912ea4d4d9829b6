"""Dominant subspaces of batches of matrices, by small Gram matrices and a refinement without squares."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Subspace:
    """Orthonormal columns, zero-padded, how many of them there are, and their singular values, zero-padded."""

    basis: Float[Tensor, "b d m"]
    rank: Int[Tensor, " b"]
    sigma: Float[Tensor, "b m"]


def dominant_subspace(rows: Float[Tensor, "b k d"], size: int) -> Subspace:
    """The right singular vectors of each matrix with ``σ > max(k, d) · eps · σ₁``, at most ``size`` of them.

    Candidates come from the Gram matrix of the smaller side, in float64 since squares of small singular values vanish
    in float32; their singular values come from a QR factorisation of the projected rows, without squaring.

    Args:
        rows: Matrices (b, k, d); their dtype sets ``eps``.
        size: The most columns to keep.

    Returns:
        The subspaces; columns past the rank are zero.
    """
    _, k, d = rows.shape
    found = min(size, k, d)
    if k <= d:
        candidates = rows.mT @ _top_eigenvectors(_gram(rows), found).to(rows.dtype)
        return _orthonormal(candidates, size, max(k, d))
    vectors = _top_eigenvectors(_gram(rows.mT), found).to(rows.dtype)
    coordinates = rows @ vectors
    return dominant_factored(coordinates, vectors, size, max(k, d))


def dominant_factored(
    left: Float[Tensor, "b k r"], right: Float[Tensor, "b d r"], size: int, largest_side: int
) -> Subspace:
    """The dominant right singular vectors of ``left @ right.mT``, where ``right`` has orthonormal columns."""
    triangle = torch.linalg.qr(left.double(), mode="r").R
    _, sigma, rotation = torch.linalg.svd(triangle, full_matrices=False)
    basis = right @ rotation.mT.to(right.dtype)
    return _kept(basis, sigma, size, largest_side * torch.finfo(right.dtype).eps)


def _gram(rows: Tensor) -> Tensor:
    wide = rows.double()
    return wide @ wide.mT


def _top_eigenvectors(gram: Tensor, count: int) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return vectors[..., -count:].flip(-1)


def _orthonormal(candidates: Tensor, size: int, largest_side: int) -> Subspace:
    q, triangle = torch.linalg.qr(candidates)
    left, sigma, _ = torch.linalg.svd(triangle)
    return _kept(q @ left, sigma, size, largest_side * torch.finfo(candidates.dtype).eps)


def _kept(basis: Tensor, sigma: Tensor, size: int, tolerance: float) -> Subspace:
    keep = (sigma > tolerance * sigma[..., :1])[..., :size]
    missing = (0, size - keep.shape[-1])
    kept, values = basis[..., :size] * keep.unsqueeze(-2), sigma[..., :size] * keep
    pad = torch.nn.functional.pad
    return Subspace(pad(kept, missing), keep.sum(-1), pad(values, missing).to(basis.dtype))

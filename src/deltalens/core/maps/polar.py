"""Polar factors of batches of square matrices."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Polar:
    """``A = U diag(σ) Vᵀ``: the orthogonal factor ``U Vᵀ``, σ and V."""

    factor: Float[Tensor, "b q q"]
    sigma: Float[Tensor, "b q"]
    right: Float[Tensor, "b q q"]


def polar(matrix: Float[Tensor, "b q q"], dtype: torch.dtype) -> Polar:
    """The polar decomposition of float64 matrices, to the precision of ``dtype``.

    By the eigenvectors of ``AᵀA``, twice as fast as singular vectors, where squaring costs no more than ``dtype``'s
    precision; by singular vectors elsewhere.
    """
    if dtype == torch.float64:
        return _by_singular_vectors(matrix)
    squared, right = torch.linalg.eigh(matrix.mT @ matrix)
    sigma = squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()
    loss = torch.finfo(torch.float64).eps * (sigma[:, -1] / sigma[:, 0]).square() * matrix.shape[1] ** 0.5
    factor = ((matrix @ right) / sigma.unsqueeze(1)) @ right.mT
    poor = ~(loss <= torch.finfo(dtype).eps)
    if bool(poor.any()):
        exact = _by_singular_vectors(matrix[poor])
        factor[poor], sigma[poor], right[poor] = exact.factor, exact.sigma, exact.right
    return Polar(factor, sigma, right)


def _by_singular_vectors(matrix: Tensor) -> Polar:
    left, values, transposed = torch.linalg.svd(matrix)
    return Polar(left @ transposed, values, transposed.mT)

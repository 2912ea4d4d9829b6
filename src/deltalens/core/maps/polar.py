"""Polar factors of batches of square matrices."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Polar:
    """``A = U diag(σ) Vᵀ``: σ, V and the factor ``Q = U Vᵀ``, held as ``left · V diag(1 / divisor) Vᵀ``."""

    left: Float[Tensor, "b q q"]
    divisor: Float[Tensor, "b q"]
    sigma: Float[Tensor, "b q"]
    right: Float[Tensor, "b q q"]

    def turned(self, points: Float[Tensor, "b a q"]) -> Float[Tensor, "b a q"]:
        """``Q p`` of each point, by products with few points rather than of whole matrices."""
        scaled = (points @ self.right) / self.divisor.unsqueeze(1)
        return (scaled @ self.right.mT) @ self.left.mT


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
    poor = ~(loss <= torch.finfo(dtype).eps)
    if not bool(poor.any()):
        return Polar(matrix, sigma, sigma, right)
    left, divisor, exact = matrix.clone(), sigma.clone(), _by_singular_vectors(matrix[poor])
    left[poor], divisor[poor], sigma[poor], right[poor] = exact.left, exact.divisor, exact.sigma, exact.right
    return Polar(left, divisor, sigma, right)


def _by_singular_vectors(matrix: Tensor) -> Polar:
    left, values, transposed = torch.linalg.svd(matrix)
    return Polar(left @ transposed, torch.ones_like(values), values, transposed.mT)

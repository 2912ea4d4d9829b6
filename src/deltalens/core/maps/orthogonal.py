"""The maps ``orthogonal`` and ``orthogonal:scaled``: a rotation, found in the span of the rows' inputs and outputs."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from deltalens.core.maps.global_map import Matrix
from deltalens.core.maps.polar import Polar, polar
from deltalens.core.maps.protocol import FitProblem, TokenwiseMap
from deltalens.core.subspaces import Subspace, dominant_subspace


@dataclass(frozen=True)
class Orthogonal(TokenwiseMap):
    """``T(x) = Q x`` (scaled: ``s Q x``), Q the polar factor of ``YᵀX + λI``, the identity outside span(X, Y)."""

    scaled: bool = False
    fitted: ClassVar[bool] = True
    update_rank: ClassVar[None] = None

    @property
    def name(self) -> str:
        """``orthogonal`` or ``orthogonal:scaled``."""
        return "orthogonal:scaled" if self.scaled else "orthogonal"

    def fit(self, problem: FitProblem) -> "OrthogonalFit":
        """Fit in an orthonormal basis of span(X, Y), or in all coordinates where those are fewer."""
        return OrthogonalFit(problem, self.scaled)


@dataclass(frozen=True)
class OrthogonalFit:
    """A batch of rotations, in coordinates of a basis E (b, d, q) of span(X, Y); E is None for all coordinates."""

    problem: FitProblem
    scaled: bool

    @cached_property
    def _span(self) -> "Span | None":
        problem = self.problem
        if 2 * problem.count >= problem.width:
            return None
        return span_of(torch.cat([problem.inputs, problem.updates], 1).double(), problem.dtype)

    @property
    def _basis(self) -> Float[Tensor, "b d q"] | None:
        return None if self._span is None else self._span.basis

    def _inside(self, points: Tensor) -> Tensor:
        wide = points.double()
        return wide if self._basis is None else wide @ self._basis

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        """The rows' inputs and outputs inside the span."""
        if self._span is None:
            inputs, updates = self.problem.inputs.double(), self.problem.updates.double()
        else:
            inputs, updates = self._span.coordinates.chunk(2, 1)
        return inputs, inputs + updates

    @cached_property
    def _some(self) -> Bool[Tensor, " b"]:
        return self.problem.energy > 0

    @cached_property
    def _polar(self) -> Polar:
        inputs, outputs = self._rows
        matrix = outputs.mT @ inputs
        strength = torch.where(self._some, self.problem.strength, 1.0)
        matrix.diagonal(dim1=-2, dim2=-1).add_(strength.unsqueeze(1))
        # Zero inputs leave no rotation to find.
        return polar(matrix, self.problem.dtype)

    @cached_property
    def _scale(self) -> Float[Tensor, " b"]:
        """The least-squares s of ``Σ ‖s Q x_j - y_j‖² + λ ‖s Q - I‖²``: ``‖YᵀX + λI‖_* / (Σ ‖x_j‖² + dλ)``."""
        if not self.scaled:
            return torch.ones_like(self.problem.energy)
        sigma = self._polar.sigma
        nuclear = sigma.sum(1) + (self.problem.width - sigma.shape[1]) * self.problem.strength
        denominator = self.problem.energy + self.problem.width * self.problem.strength
        return torch.where(self._some, nuclear / denominator, 1.0)

    def _moved(self, points: Float[Tensor, "b a d"]) -> Float[Tensor, "b a d"]:
        inside = self._inside(points)
        turned = inside @ self._polar.factor.mT - inside
        moved = turned if self._basis is None else turned @ self._basis.mT
        scale = self._scale.view(-1, 1, 1)
        return (scale * moved + (scale - 1) * points).to(self.problem.dtype)

    def update(self) -> Float[Tensor, "b a d"]:
        """``s Q x - x`` at the anchors."""
        return self._moved(self.problem.anchors)

    def subspace(self, size: int) -> Subspace:
        """Dominant directions of ``s Q x_j - x_j``."""
        if self._basis is None or self.scaled:
            return dominant_subspace(self._moved(self.problem.inputs), size)
        inputs = self._rows[0]
        inside = dominant_subspace((inputs @ self._polar.factor.mT - inputs).to(self.problem.dtype), size)
        return Subspace(self._basis.to(self.problem.dtype) @ inside.basis, inside.rank, inside.sigma)

    def degrees_of_freedom(self) -> Float[Tensor, " b"]:
        """The exact divergence: ``(1/d) Σ_b w_b Σ_{a≠b} 1 / (σ_a + σ_b)``, ``w_b = Σ_j (v_b·x_j)²``.

        σ and v are the singular values and right singular vectors of ``YᵀX + λI``, over all d coordinates (σ = λ
        outside span(X, Y)). A scaled map adds ``Σ ‖x_j‖² / (d (Σ ‖x_j‖² + dλ))``.
        """
        problem, found = self.problem, self._polar
        energies = (self._rows[0] @ found.right).square().sum(1)
        sums = found.sigma.unsqueeze(2) + found.sigma.unsqueeze(1)
        sums.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
        outside = problem.width - found.sigma.shape[1]
        inverse = (1 / sums).sum(1) + outside / (found.sigma + problem.strength.unsqueeze(1))
        freedom = self._scale * (energies * inverse).sum(1)
        if self.scaled:
            freedom = freedom + problem.energy / (problem.energy + problem.width * problem.strength)
        return torch.where(self._some, freedom / problem.width, 0.0).to(problem.dtype)

    def parameters(self) -> Matrix:
        """``s Q - I``."""
        return Matrix(self._moved(self.problem.at_unit_vectors().anchors)[0].mT)


@dataclass(frozen=True)
class Span:
    """Orthonormal columns whose span holds every row, and the rows' coordinates in them."""

    basis: Float[Tensor, "b d s"]
    coordinates: Float[Tensor, "b s s"]


def span_of(rows: Float[Tensor, "b s d"], dtype: torch.dtype) -> Span:
    """The span of float64 rows, s at most d.

    By the Cholesky factor of the rows' Gram matrix where that is as exact as ``dtype``, else by Householder's QR, which
    completes rank-deficient rows by harmless orthogonal directions.
    """
    factor, failed = torch.linalg.cholesky_ex(rows @ rows.mT)
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    loss = torch.finfo(torch.float64).eps * (diagonal.amax(1) / diagonal.amin(1)).square() * rows.shape[1]
    poor = (failed > 0) | ~(loss <= torch.finfo(dtype).eps)
    basis: Tensor = torch.linalg.solve_triangular(factor, rows, upper=False).mT
    if bool(poor.any()):
        exact, triangle = torch.linalg.qr(rows[poor].mT)
        basis[poor], factor[poor] = exact, triangle.mT
    return Span(basis, factor)

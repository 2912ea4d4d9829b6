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
    """A batch of rotations, in coordinates of a basis of span(X, Y), or in all coordinates where those are fewer."""

    problem: FitProblem
    scaled: bool

    @cached_property
    def _span(self) -> "Span | None":
        problem = self.problem
        if 2 * problem.count >= problem.width:
            return None
        return span_of(torch.cat([problem.inputs, problem.updates], 1).double(), problem.dtype)

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
        wide = points.double()
        inside = wide if self._span is None else self._span.inside(wide)
        turned = self._polar.turned(inside) - inside
        moved = turned if self._span is None else self._span.outside(turned)
        scale = self._scale.view(-1, 1, 1)
        return (scale * moved + (scale - 1) * points).to(self.problem.dtype)

    def update(self) -> Float[Tensor, "b a d"]:
        """``s Q x - x`` at the anchors."""
        return self._moved(self.problem.anchors)

    def subspace(self, size: int) -> Subspace:
        """Dominant directions of ``s Q x_j - x_j``."""
        if self._span is None or self.scaled:
            return dominant_subspace(self._moved(self.problem.inputs), size)
        inputs = self._rows[0]
        inside = dominant_subspace((self._polar.turned(inputs) - inputs).to(self.problem.dtype), size)
        basis = self._span.outside(inside.basis.double().mT).mT
        return Subspace(basis.to(self.problem.dtype), inside.rank, inside.sigma)

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
    """The span of rows R (b, s, d): orthonormal columns E (d, s) and the rows' coordinates C in them, ``R = C Eᵀ``.

    Where the rows are independent enough, C is the Cholesky factor of ``R Rᵀ`` and E is never formed; where they
    aren't, ``exact`` marks the fit and ``columns`` holds E itself.
    """

    rows: Float[Tensor, "b s d"]
    coordinates: Float[Tensor, "b s s"]
    exact: Bool[Tensor, " b"]
    columns: Float[Tensor, "c d s"]

    def inside(self, points: Float[Tensor, "b a d"]) -> Float[Tensor, "b a s"]:
        """``p E``."""
        products = points @ self.rows.mT
        found: Tensor = torch.linalg.solve_triangular(self.coordinates, products.mT, upper=False).mT
        if self.columns.shape[0]:
            found[self.exact] = points[self.exact] @ self.columns
        return found

    def outside(self, points: Float[Tensor, "b a s"]) -> Float[Tensor, "b a d"]:
        """``q Eᵀ``."""
        weights: Tensor = torch.linalg.solve_triangular(self.coordinates.mT, points.mT, upper=True).mT
        found = weights @ self.rows
        if self.columns.shape[0]:
            found[self.exact] = points[self.exact] @ self.columns.mT
        return found


def span_of(rows: Float[Tensor, "b s d"], dtype: torch.dtype) -> Span:
    """The span of float64 rows, s at most d.

    By the Cholesky factor of the rows' Gram matrix where that is as exact as ``dtype``, else by Householder's QR, which
    completes rank-deficient rows by harmless orthogonal directions.
    """
    factor, failed = torch.linalg.cholesky_ex(rows @ rows.mT)
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    loss = torch.finfo(torch.float64).eps * (diagonal.amax(1) / diagonal.amin(1)).square() * rows.shape[1]
    poor = (failed > 0) | ~(loss <= torch.finfo(dtype).eps)
    if not bool(poor.any()):
        return Span(rows, factor, poor, rows.new_empty(0, rows.shape[2], rows.shape[1]))
    exact, triangle = torch.linalg.qr(rows[poor].mT)
    coordinates = factor.clone()
    coordinates[poor] = triangle.mT
    return Span(rows, coordinates, poor, exact)

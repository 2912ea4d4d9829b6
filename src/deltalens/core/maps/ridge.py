"""Linear ridge regression of updates on inputs, through the smaller of its two forms, for batches of small problems."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.core.maps.global_map import Matrix
from deltalens.core.maps.protocol import FitProblem
from deltalens.core.subspaces import Subspace, dominant_subspace
from deltalens.errors import InputError

FLOAT32_CONDITION = 1e4
"""Up to this condition number, k / ridge at most, a float32 Gram matrix gives float32 accuracy in T(x)."""

MOST_SHIFTS = 40
"""Tenfold shifts after which a Gram matrix is past mending."""


def scaled_strength(problem: FitProblem) -> Float[Tensor, " b"]:
    """λ, but 1 where all inputs are zero, so that the systems stay solvable and B is zero."""
    return torch.where(problem.strength > 0, problem.strength, 1.0)


def gram_dtype(problem: FitProblem) -> torch.dtype:
    """The dtype of Gram matrices: float32 only where the ridge bounds their condition well enough."""
    dual = problem.count <= problem.width
    if problem.dtype == torch.float32 and dual and problem.count / problem.ridge <= FLOAT32_CONDITION:
        return torch.float32
    return torch.float64


@dataclass(frozen=True)
class RidgeFit:
    """``B = Dᵀ (XXᵀ + λI)⁻¹ X``, held as a Cholesky factor UᵀU of the smaller of ``XXᵀ + λI`` and ``XᵀX + λI``."""

    problem: FitProblem

    @cached_property
    def _rows(self) -> Tensor:
        return self.problem.inputs.to(gram_dtype(self.problem))

    @property
    def _dual(self) -> bool:
        return self.problem.count <= self.problem.width

    @cached_property
    def _factor(self) -> Tensor:
        gram = self._gram()
        gram.diagonal(dim1=-2, dim2=-1).add_(scaled_strength(self.problem).to(gram.dtype).unsqueeze(1))
        # A lower triangle by rows is an upper one by columns, which the factorisation takes as it lies.
        factor, failed = torch.linalg.cholesky_ex(gram.mT, upper=True)
        return factor if not bool(failed.any()) else _shifted_cholesky(gram, factor, failed)

    @property
    def _in_state_dtype(self) -> bool:
        return gram_dtype(self.problem) == self.problem.dtype

    def _gram(self) -> Tensor:
        if not self._dual:
            return self._rows.mT @ self._rows
        return self.problem.row_gram() if self._in_state_dtype else self._rows @ self._rows.mT

    @cached_property
    def _coefficients(self) -> Float[Tensor, "b d d"]:
        # The primal form's Bᵀ = (XᵀX + λI)⁻¹ XᵀD.
        cross = self._rows.mT @ self.problem.updates.to(self._rows.dtype)
        return torch.cholesky_solve(cross, self._factor, upper=True)

    def update(self) -> Float[Tensor, "b a d"]:
        """``B x`` at the anchors."""
        anchors = self.problem.anchors
        if not self._dual:
            return (anchors.to(self._rows.dtype) @ self._coefficients).to(anchors.dtype)
        return self.problem.weighted_updates(self._weights.to(anchors.dtype))

    def solved(self, products: Float[Tensor, "b k a"]) -> Float[Tensor, "b k a"]:
        """``(XXᵀ + λI)⁻¹`` times right-hand sides, in the dual form."""
        found: Tensor = torch.cholesky_solve(products, self._factor, upper=True)
        return found

    @property
    def _weights(self) -> Float[Tensor, "b k a"]:
        shared, anchors = self.problem.shared.weights, self.problem.anchors
        if shared is not None:
            return shared.unsqueeze(2)
        if self._in_state_dtype:
            return self.solved(self.problem.anchor_products())
        return self.solved(self._rows @ anchors.to(self._rows.dtype).mT)

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.cholesky_inverse(self._factor, upper=True)

    def fitted_updates(self) -> Float[Tensor, "b k d"]:
        """``B x_j`` at the rows, ``H D`` with ``H = I - λ (XXᵀ + λI)⁻¹``."""
        if not self._dual:
            return (self._rows @ self._coefficients).to(self.problem.dtype)
        strength = scaled_strength(self.problem).to(self._inverse.dtype)
        hat = torch.eye(self.problem.count, dtype=strength.dtype, device=strength.device)
        hat = hat - strength.view(-1, 1, 1) * self._inverse
        return hat.to(self.problem.dtype) @ self.problem.updates

    def subspace(self, size: int) -> Subspace:
        """Dominant directions of ``H D``, from ``Dᵀ H² D``."""
        return self.shifted_subspace(size, self.problem.updates.new_zeros(1, 1))

    def shifted_subspace(self, size: int, shift: Float[Tensor, "b d"]) -> Subspace:
        """Dominant directions of ``H D`` plus one vector per fit.

        The factor's rounding, up to ``eps / ridge``, can pass for a direction where H lacks rank; fits in which it
        might are redone by eigenvectors, which tell the two apart.
        """
        found = dominant_subspace(self.fitted_updates() + shift.unsqueeze(1), size)
        rounding = torch.finfo(gram_dtype(self.problem)).eps * self.problem.count / self.problem.ridge
        doubtful = ((found.sigma > 0) & (found.sigma < rounding * found.sigma[:, :1])).any(1).nonzero()[:, 0]
        if doubtful.numel() == 0:
            return found
        fitted = fitted_by_eigenvectors(self.problem, doubtful)
        redone = dominant_subspace(fitted + shift.expand(found.rank.shape[0], -1)[doubtful].unsqueeze(1), size)
        found.basis[doubtful], found.rank[doubtful] = redone.basis, redone.rank
        found.sigma[doubtful] = redone.sigma
        return found

    def degrees_of_freedom(self) -> Float[Tensor, " b"]:
        """``tr H``."""
        strength = scaled_strength(self.problem).to(self._inverse.dtype)
        trace = self._inverse.diagonal(dim1=-2, dim2=-1).sum(-1)
        return (min(self.problem.count, self.problem.width) - strength * trace).clamp_min(0).to(self.problem.dtype)

    def parameters(self) -> Matrix:
        """B."""
        return Matrix(replace(self, problem=self.problem.at_unit_vectors()).update()[0].mT)


def without_noise(values: Float[Tensor, "b s"]) -> Float[Tensor, "b s"]:
    """Ascending eigenvalues of Gram matrices, with zeros for those that are no more than rounding."""
    noise = values[:, -1:] * (values.shape[1] * torch.finfo(values.dtype).eps)
    return torch.where(values > noise, values, 0.0)


def fitted_by_eigenvectors(problem: FitProblem, chosen: Int[Tensor, " c"]) -> Float[Tensor, "c k d"]:
    """``H D`` of chosen fits in float64, H by the eigenvectors of the smaller of ``XXᵀ`` and ``XᵀX``."""
    x, updates = problem.inputs[chosen].double(), problem.updates[chosen].double()
    strength = scaled_strength(problem)[chosen].unsqueeze(1)
    dual = problem.count <= problem.width
    values, vectors = torch.linalg.eigh(x @ x.mT if dual else x.mT @ x)
    values = without_noise(values)
    left = vectors if dual else (x @ vectors) * (values > 0).unsqueeze(1)
    weights = values / (values + strength) if dual else 1 / (values + strength)
    fitted: Tensor = (left * weights.unsqueeze(1)) @ (left.mT @ updates)
    return fitted.to(problem.dtype)


def _shifted_cholesky(gram: Tensor, factor: Tensor, failed: Tensor) -> Tensor:
    """Factors of the matrices that rounding left indefinite, shifted by a few units of their own rounding."""
    factor = factor.clone()
    bad = failed.nonzero()[:, 0]
    stubborn = gram[bad]
    shift = stubborn.diagonal(dim1=-2, dim2=-1).sum(-1) * torch.finfo(gram.dtype).eps
    for _ in range(MOST_SHIFTS):
        stubborn.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(1))
        again, still = torch.linalg.cholesky_ex(stubborn.mT, upper=True)
        if not bool(still.any()):
            factor[bad] = again
            return factor
        shift = shift * 10
    raise InputError("a fit's Gram matrix can't be factored at any shift; its states are too large or not finite")

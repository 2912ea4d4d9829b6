"""The map ``low_rank:r``: reduced-rank ridge regression, exact."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.core.maps.global_map import Factored
from deltalens.core.maps.protocol import FitProblem, TokenwiseMap
from deltalens.core.maps.ridge import scaled_strength, without_noise
from deltalens.core.subspaces import Subspace, dominant_factored


@dataclass(frozen=True)
class LowRank(TokenwiseMap):
    """``T(x) = x + B x``: the linear map's update projected on the top-r eigenvectors of ``Dᵀ H D``."""

    rank: int = 8
    fitted: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """``low_rank:r``."""
        return f"low_rank:{self.rank}"

    @property
    def update_rank(self) -> int:
        """The rank r itself."""
        return self.rank

    @property
    def fewest_rows(self) -> int:
        """The rank r."""
        return self.rank

    def fit(self, problem: FitProblem) -> "LowRankFit":
        """Fit by the smaller of the dual and the primal form, in float64."""
        self.require_rows(problem.count)
        form = DualForm(problem) if problem.count <= problem.width else PrimalForm(problem)
        return LowRankFit(problem, form, min(self.rank, problem.width))


@dataclass(frozen=True)
class DualForm:
    """Everything in the k-dimensional space of rows, by the eigenvectors of ``XXᵀ``."""

    problem: FitProblem

    @cached_property
    def _inputs(self) -> Tensor:
        return self.problem.inputs.double()

    @cached_property
    def _updates(self) -> Tensor:
        return self.problem.updates.double()

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self._inputs @ self._inputs.mT)
        return without_noise(values), vectors

    @cached_property
    def _shrinkage(self) -> Tensor:
        """Eigenvalues of H."""
        values, _ = self._spectrum
        return values / (values + scaled_strength(self.problem).unsqueeze(1))

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Descending eigenvalues θ of ``Dᵀ H D`` and the left singular vectors of ``H^½ D`` in H's own basis."""
        vectors = self._spectrum[1] * self._shrinkage.sqrt().unsqueeze(1)
        values, left = torch.linalg.eigh(vectors.mT @ (self._updates @ self._updates.mT) @ vectors)
        return values.flip(-1).clamp_min(0), left.flip(-1)

    def directions(self, rank: int) -> Float[Tensor, "b d r"]:
        """Unnormalised top-r eigenvectors of ``Dᵀ H D``."""
        vectors = self._spectrum[1] * self._shrinkage.sqrt().unsqueeze(1)
        return self._updates.mT @ (vectors @ self.moments[1][..., :rank])

    def linear_update(self) -> Float[Tensor, "b a d"]:
        """The linear map's ``B x`` at the anchors."""
        values, vectors = self._spectrum
        products = self._inputs @ self.problem.anchors.double().mT
        shifted = values + scaled_strength(self.problem).unsqueeze(1)
        weights = vectors @ ((vectors.mT @ products) / shifted.unsqueeze(2))
        return weights.mT @ self._updates

    def linear_coordinates(self, basis: Float[Tensor, "b d r"]) -> Float[Tensor, "b k r"]:
        """The linear map's fitted updates ``H D`` in a basis."""
        vectors = self._spectrum[1]
        return (vectors * self._shrinkage.unsqueeze(1)) @ (vectors.mT @ (self._updates @ basis))

    def hat_weights(self) -> tuple[Tensor, Tensor]:
        """``u_aᵀ H u_a`` for the left singular vectors u_a of ``H^½ D``, and ``tr H``."""
        return (self.moments[1].square() * self._shrinkage.unsqueeze(2)).sum(1), self._shrinkage.sum(1)


@dataclass(frozen=True)
class PrimalForm:
    """Everything in the d-dimensional space of states, where there are more rows than coordinates."""

    problem: FitProblem

    @cached_property
    def _inputs(self) -> Tensor:
        return self.problem.inputs.double()

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self._inputs.mT @ self._inputs)
        return without_noise(values), vectors

    @cached_property
    def _shifted(self) -> Tensor:
        """Eigenvalues of ``XᵀX + λI``; infinite where X has nothing, so that its rounding is left out."""
        values = self._spectrum[0]
        return torch.where(values > 0, values + scaled_strength(self.problem).unsqueeze(1), torch.inf)

    @cached_property
    def _cross(self) -> Tensor:
        """``XᵀD`` in eigenvectors of ``XᵀX``."""
        return (self._inputs @ self._spectrum[1]).mT @ self.problem.updates.double()

    @cached_property
    def _coefficients(self) -> Tensor:
        return self._spectrum[1] @ (self._cross / self._shifted.unsqueeze(2))

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Descending eigenvalues θ of ``Dᵀ H D`` and its eigenvectors."""
        half = self._cross / self._shifted.sqrt().unsqueeze(2)
        values, vectors = torch.linalg.eigh(half.mT @ half)
        return values.flip(-1).clamp_min(0), vectors.flip(-1)

    def directions(self, rank: int) -> Float[Tensor, "b d r"]:
        """Top-r eigenvectors of ``Dᵀ H D``."""
        return self.moments[1][..., :rank]

    def linear_update(self) -> Float[Tensor, "b a d"]:
        """The linear map's ``B x`` at the anchors."""
        return self.problem.anchors.double() @ self._coefficients

    def linear_coordinates(self, basis: Float[Tensor, "b d r"]) -> Float[Tensor, "b k r"]:
        """The linear map's fitted updates in a basis."""
        return self._inputs @ (self._coefficients @ basis)

    def hat_weights(self) -> tuple[Tensor, Tensor]:
        """``u_aᵀ H u_a = v_aᵀ Dᵀ H² D v_a / θ_a``, and ``tr H``."""
        values, vectors = self.moments
        spectrum = self._spectrum[0]
        squared = ((self._cross @ vectors) / self._shifted.unsqueeze(2)).square() * spectrum.unsqueeze(2)
        safe = values.clamp_min(torch.finfo(values.dtype).tiny)
        weights = torch.where(values > relative_tolerance(values), squared.sum(1) / safe, 0.0)
        return weights, (spectrum / self._shifted).sum(1)


def relative_tolerance(values: Float[Tensor, "b s"]) -> Float[Tensor, "b 1"]:
    """The size under which a descending eigenvalue is rounding."""
    return values[:, :1] * (values.shape[1] * torch.finfo(values.dtype).eps)


@dataclass(frozen=True)
class LowRankFit:
    """A batch of reduced-rank fits."""

    problem: FitProblem
    form: DualForm | PrimalForm
    rank: int

    @cached_property
    def _basis(self) -> Float[Tensor, "b d r"]:
        # Householder's QR completes directions that vanished in a rank-deficient fit by harmless orthogonal ones.
        basis: Tensor = torch.linalg.qr(self.form.directions(self.rank)).Q
        return basis

    def update(self) -> Float[Tensor, "b a d"]:
        """``P B x`` at the anchors."""
        return ((self.form.linear_update() @ self._basis) @ self._basis.mT).to(self.problem.dtype)

    def subspace(self, size: int) -> Subspace:
        """Dominant directions of ``H D P``."""
        left = self.form.linear_coordinates(self._basis).to(self.problem.dtype)
        largest = max(self.problem.count, self.problem.width)
        return dominant_factored(left, self._basis.to(self.problem.dtype), size, largest)

    def degrees_of_freedom(self) -> Float[Tensor, " b"]:
        """The exact divergence of the rank-r truncation of ``H^½ D``, after Mukherjee et al. (2015).

        With θ the eigenvalues of ``Dᵀ H D``, u the left singular vectors of ``H^½ D`` and ``h_a = u_aᵀ H u_a``:
        ``(1/d) [Σ_{a≤r} h_a (r + Σ_{b>r} θ_a / (θ_a - θ_b)) + Σ_{a>r} h_a Σ_{b≤r} θ_b / (θ_b - θ_a)]``,
        b running over d coordinates and a over k rows (θ = 0 past the rank).
        """
        values = self.form.moments[0]
        weights, trace = self.form.hat_weights()
        tolerance = relative_tolerance(values)
        alive = values > tolerance
        kept = alive.clone()
        kept[:, self.rank :] = False
        gap = (values.unsqueeze(2) - values.unsqueeze(1)).clamp_min(tolerance.unsqueeze(2))
        gap = torch.where(gap > 0, gap, 1.0)
        # ratio[a, b] = θ_a / (θ_a - θ_b) for a kept and b dropped.
        ratio = values.unsqueeze(2) / gap * (kept.unsqueeze(2) & ~kept.unsqueeze(1))
        rank = kept.sum(1, keepdim=True)
        beyond = self.problem.width - values.shape[1]
        inside = (weights * kept * (rank + ratio.sum(2) + beyond)).sum(1)
        outside = (weights * (alive & ~kept) * ratio.sum(1)).sum(1)
        rest = (trace - (weights * alive).sum(1)).clamp_min(0) * rank[:, 0]
        return ((inside + outside + rest) / self.problem.width).to(self.problem.dtype)

    def parameters(self) -> Factored:
        """U, the r columns that the projection P is made of, and ``V = Uᵀ B``."""
        at_units = replace(self.form, problem=self.problem.at_unit_vectors())
        left = self._basis[0]
        right = (at_units.linear_update()[0] @ left).mT
        return Factored(left.to(self.problem.dtype), right.to(self.problem.dtype))

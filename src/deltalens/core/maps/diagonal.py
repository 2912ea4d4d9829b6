"""The map ``diagonal``: one non-negative factor per coordinate."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.core.maps.global_map import Factors
from deltalens.core.maps.protocol import FitProblem, TokenwiseMap
from deltalens.core.subspaces import Subspace, dominant_subspace


@dataclass(frozen=True)
class Diagonal(TokenwiseMap):
    """``T(x) = a ⊙ x`` with ``a_c = max(0, (Σ_j x_jc y_jc + λ_d) / (Σ_j x_jc² + λ_d))``."""

    name: ClassVar[str] = "diagonal"
    fitted: ClassVar[bool] = True
    update_rank: ClassVar[None] = None

    def prepared(self, problem: FitProblem) -> FitProblem:
        """With every fit's ``Σ_j x_j ⊙ δ_j``, and the squares that all draw from."""
        _ = problem.table.products, problem.table.squares
        problem = problem.sharing(energy=problem.energy)
        return problem.sharing(
            sums=problem.for_all(lambda part: problem.part(part).sums(problem.table.products), problem.row_bytes)
        )

    def fit(self, problem: FitProblem) -> "DiagonalFit":
        """Fit in closed form."""
        return DiagonalFit(problem)


@dataclass(frozen=True)
class DiagonalFit:
    """A batch of diagonals."""

    problem: FitProblem

    @cached_property
    def _strength(self) -> Float[Tensor, "b 1"]:
        # λ_d = ridge · (1/d) Σ_j ‖x_j‖²; 1 where all inputs are zero, so that a = 1 there.
        energy = self.problem.energy
        strength = torch.where(energy > 0, self.problem.ridge * energy / self.problem.width, 1.0)
        return strength.to(self.problem.dtype).unsqueeze(1)

    @cached_property
    def _excess(self) -> Float[Tensor, "b d"]:
        # a - 1 = Σ x_jc δ_jc / (Σ x_jc² + λ_d), at least -1.
        shared = self.problem.shared.sums
        products = self.problem.sums(self.problem.table.products) if shared is None else shared
        return (products / (self._squares + self._strength)).clamp_min(-1)

    @cached_property
    def _squares(self) -> Float[Tensor, "b d"]:
        return self.problem.sums(self.problem.table.squares)

    def update(self) -> Float[Tensor, "b a d"]:
        """``(a - 1) ⊙ x`` at the anchors."""
        return self._excess.unsqueeze(1) * self.problem.anchors

    def subspace(self, size: int) -> Subspace:
        """Dominant directions of ``(a - 1) ⊙ x_j``."""
        return dominant_subspace(self._excess.unsqueeze(1) * self.problem.inputs, size)

    def degrees_of_freedom(self) -> Float[Tensor, " b"]:
        """``(1/d) Σ_c [a_c > 0] Σ_j x_jc² / (Σ_j x_jc² + λ_d)``."""
        shares = self._squares / (self._squares + self._strength) * (self._excess > -1)
        return shares.mean(1)

    def parameters(self) -> Factors:
        """``a - 1`` by coordinate."""
        return Factors(self._excess[0])

"""The map ``scalar``: one factor for the whole state."""

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
class Scalar(TokenwiseMap):
    """``T(x) = a x`` with ``a = (Σ x_j·y_j + kλ) / (Σ x_j·x_j + kλ)``."""

    name: ClassVar[str] = "scalar"
    fitted: ClassVar[bool] = True
    update_rank: ClassVar[None] = None

    def prepared(self, problem: FitProblem) -> FitProblem:
        """With the products that all fits draw from."""
        _ = problem.table.alignment
        return problem.sharing(energy=problem.energy)

    def fit(self, problem: FitProblem) -> "ScalarFit":
        """Fit in closed form."""
        return ScalarFit(problem)


@dataclass(frozen=True)
class ScalarFit:
    """A batch of factors."""

    problem: FitProblem

    @cached_property
    def _excess(self) -> Float[Tensor, " b"]:
        # a - 1 = Σ x_j·δ_j / (Σ x_j·x_j + kλ), without the cancellation of a - 1.
        problem = self.problem
        denominator = problem.energy * (1 + problem.ridge)
        return torch.where(denominator > 0, problem.totals(problem.table.alignment) / denominator, 0.0).to(
            problem.dtype
        )

    def update(self) -> Float[Tensor, "b a d"]:
        """``(a - 1) x`` at the anchors."""
        return self._excess.view(-1, 1, 1) * self.problem.anchors

    def subspace(self, size: int) -> Subspace:
        """Dominant directions of ``(a - 1) x_j``."""
        return dominant_subspace(self._excess.view(-1, 1, 1) * self.problem.inputs, size)

    def degrees_of_freedom(self) -> Float[Tensor, " b"]:
        """``Σ ‖x_j‖² / (d (Σ ‖x_j‖² + kλ)) = 1 / (d (1 + ridge))``."""
        some = (self.problem.energy > 0).to(self.problem.dtype)
        return some / (self.problem.width * (1 + self.problem.ridge))

    def parameters(self) -> Factors:
        """``a - 1``."""
        return Factors(self._excess[:1])

"""The map ``mean``: every token of a neighbourhood moves by the mean update."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.core.maps.global_map import Shift
from deltalens.core.maps.protocol import FitProblem, TokenwiseMap
from deltalens.core.subspaces import Subspace


@dataclass(frozen=True)
class Mean(TokenwiseMap):
    """``T(x) = x + δ̄``."""

    name: ClassVar[str] = "mean"
    fitted: ClassVar[bool] = True
    update_rank: ClassVar[int] = 1

    def prepared(self, problem: FitProblem) -> FitProblem:
        """With every fit's ``Σ_j δ_j``."""
        return problem.sharing(
            sums=problem.for_all(lambda part: problem.part(part).sums(problem.table.updates), problem.row_bytes)
        )

    def fit(self, problem: FitProblem) -> "MeanFit":
        """Average the updates; there is no ridge."""
        return MeanFit(problem)


@dataclass(frozen=True)
class MeanFit:
    """A batch of mean updates."""

    problem: FitProblem

    @cached_property
    def _mean(self) -> Float[Tensor, "b d"]:
        sums = self.problem.shared.sums
        return self.problem.mean_update if sums is None else sums / self.problem.count

    def update(self) -> Float[Tensor, "b a d"]:
        """``δ̄``."""
        return self._mean.unsqueeze(1).expand_as(self.problem.anchors)

    def subspace(self, size: int) -> Subspace:
        """The direction of δ̄, if it isn't zero."""
        wide = self._mean.double()
        length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        direction = torch.where(length > 0, wide / length, 0.0).to(self.problem.dtype)
        basis = direction.new_zeros(*direction.shape, size)
        basis[..., 0] = direction
        sigma = basis.new_zeros(basis.shape[0], size)
        sigma[:, 0] = length[:, 0] * self.problem.count**0.5
        return Subspace(basis, (length[:, 0] > 0).long(), sigma)

    def degrees_of_freedom(self) -> Float[Tensor, " b"]:
        """One."""
        return torch.ones_like(self._mean[:, 0])

    def parameters(self) -> Shift:
        """``δ̄``."""
        return Shift(self._mean[0])

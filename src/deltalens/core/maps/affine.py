"""The map ``affine``: the mean update plus ridge regression on centred rows."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.core.maps.global_map import CenteredMatrix
from deltalens.core.maps.protocol import FitProblem, TokenwiseMap
from deltalens.core.maps.ridge import RidgeFit
from deltalens.core.subspaces import Subspace


@dataclass(frozen=True)
class Affine(TokenwiseMap):
    """``T(x) = x + δ̄ + B (x - x̄)``, B fitted on centred rows, λ from the centred norms."""

    name: ClassVar[str] = "affine"
    fitted: ClassVar[bool] = True
    update_rank: ClassVar[None] = None

    def fit(self, problem: FitProblem) -> "AffineFit":
        """Fit by the smaller of the dual and the primal form."""
        return AffineFit(problem, RidgeFit(problem.centered()))


@dataclass(frozen=True)
class AffineFit:
    """A batch of affine fits; the zero update where all inputs are zero."""

    problem: FitProblem
    centered: RidgeFit

    @property
    def _mean(self) -> Tensor:
        return self.problem.mean_update * (self.problem.energy > 0).unsqueeze(1)

    def update(self) -> Float[Tensor, "b a d"]:
        """``δ̄ + B (x - x̄)`` at the anchors."""
        return self.centered.update() + self._mean.unsqueeze(1)

    def subspace(self, size: int) -> Subspace:
        """Dominant directions of the fitted updates."""
        return self.centered.shifted_subspace(size, self._mean)

    def degrees_of_freedom(self) -> Float[Tensor, " b"]:
        """``1 + tr H`` of the centred rows."""
        some = self.problem.energy > 0
        return torch.where(some, 1 + self.centered.degrees_of_freedom(), 0.0).to(self.problem.dtype)

    def parameters(self) -> CenteredMatrix:
        """B, x̄ and δ̄."""
        return CenteredMatrix(self.centered.parameters().matrix, self.problem.inputs[0].mean(0), self._mean[0])

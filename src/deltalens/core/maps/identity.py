"""The map ``identity``: the layer is skipped."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.core.maps.global_map import Still
from deltalens.core.maps.protocol import FitProblem, TokenwiseMap
from deltalens.core.subspaces import Subspace


@dataclass(frozen=True)
class Identity(TokenwiseMap):
    """``T(x) = x``."""

    name: ClassVar[str] = "identity"
    fitted: ClassVar[bool] = False
    update_rank: ClassVar[int] = 0

    def prepared(self, problem: FitProblem) -> FitProblem:
        """Nothing is shared."""
        return problem

    def fit(self, problem: FitProblem) -> "IdentityFit":
        """Nothing to fit."""
        return IdentityFit(problem)


@dataclass(frozen=True)
class IdentityFit:
    """A batch of identities."""

    problem: FitProblem

    def update(self) -> Float[Tensor, "b a d"]:
        """Zero."""
        return torch.zeros_like(self.problem.anchors)

    def subspace(self, size: int) -> Subspace:
        """Empty."""
        b, _, d = self.problem.anchors.shape
        zero = self.problem.anchors.new_zeros(())
        none = torch.zeros(b, dtype=torch.long, device=zero.device)
        return Subspace(zero.expand(b, d, size), none, zero.expand(b, size))

    def degrees_of_freedom(self) -> Float[Tensor, " b"]:
        """Zero."""
        return self.problem.anchors.new_zeros(self.problem.anchors.shape[0])

    def parameters(self) -> Still:
        """None."""
        return Still()

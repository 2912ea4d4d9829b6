"""The map ``linear``: ridge regression of updates on inputs."""

from dataclasses import dataclass
from typing import ClassVar

from deltalens.core.maps.protocol import FitProblem, TokenwiseMap
from deltalens.core.maps.ridge import RidgeFit


@dataclass(frozen=True)
class Linear(TokenwiseMap):
    """``T(x) = x + B x`` with ``B = Dᵀ (XXᵀ + λI)⁻¹ X``."""

    name: ClassVar[str] = "linear"
    fitted: ClassVar[bool] = True
    update_rank: ClassVar[None] = None

    def fit(self, problem: FitProblem) -> RidgeFit:
        """Fit by the smaller of the dual and the primal form."""
        return RidgeFit(problem)

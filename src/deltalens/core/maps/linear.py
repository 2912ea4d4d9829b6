"""The map ``linear``: ridge regression of updates on inputs."""

from dataclasses import dataclass

from deltalens.core.maps.protocol import FitProblem
from deltalens.core.maps.ridge import RidgeFit


@dataclass(frozen=True)
class Linear:
    """``T(x) = x + B x`` with ``B = Dᵀ (XXᵀ + λI)⁻¹ X``."""

    name: str = "linear"
    fitted: bool = True
    update_rank: None = None

    def fit(self, problem: FitProblem) -> RidgeFit:
        """Fit by the smaller of the dual and the primal form."""
        return RidgeFit(problem)

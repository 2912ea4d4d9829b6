"""The map ``linear``: ridge regression of updates on inputs."""

from dataclasses import dataclass, replace
from typing import ClassVar

from deltalens.core.maps.protocol import FitProblem, TokenwiseMap
from deltalens.core.maps.ridge import RidgeFit, gram_dtype


@dataclass(frozen=True)
class Linear(TokenwiseMap):
    """``T(x) = x + B x`` with ``B = Dᵀ (XXᵀ + λI)⁻¹ X``."""

    name: ClassVar[str] = "linear"
    fitted: ClassVar[bool] = True
    update_rank: ClassVar[None] = None

    def prepared(self, problem: FitProblem) -> FitProblem:
        """With the pool's Gram matrix, where gathering from it is exact enough and pays."""
        gram = problem.table.gram
        if gram is None or problem.rows is None:
            return problem
        if gram_dtype(problem) != gram.inputs.dtype or not gram.pays(problem.rows):
            return replace(problem, table=replace(problem.table, gram=None))
        gram.make()
        return problem

    def fit(self, problem: FitProblem) -> RidgeFit:
        """Fit by the smaller of the dual and the primal form."""
        return RidgeFit(problem)

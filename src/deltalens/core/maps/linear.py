"""The map ``linear``: ridge regression of updates on inputs."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from deltalens.core.maps.protocol import FitProblem, TokenwiseMap
from deltalens.core.maps.ridge import RidgeFit, gram_dtype


@dataclass(frozen=True)
class Linear(TokenwiseMap):
    """``T(x) = x + B x`` with ``B = Dᵀ (XXᵀ + λI)⁻¹ X``."""

    name: ClassVar[str] = "linear"
    fitted: ClassVar[bool] = True
    update_rank: ClassVar[None] = None

    def prepared(self, problem: FitProblem) -> FitProblem:
        """With the pool's Gram matrix and all fits' weights, where gathering from it is exact enough and pays."""
        problem = problem.sharing(energy=problem.energy)
        gram = problem.table.gram
        if gram is None or problem.count > problem.width:
            return problem
        if gram_dtype(problem) != gram.inputs.dtype or problem.rows is None or not gram.pays(problem.rows):
            return replace(problem, table=replace(problem.table, gram=None))
        gram.make()
        products = problem.for_all(lambda part: problem.part(part).anchor_products(), problem.row_bytes)

        def weights(part: slice) -> Tensor:
            return RidgeFit(problem.part(part)).solved(products[part])[..., 0]

        return problem.sharing(weights=problem.for_all(weights, problem.count**2 * problem.anchors.element_size()))

    def fit(self, problem: FitProblem) -> RidgeFit:
        """Fit by the smaller of the dual and the primal form."""
        return RidgeFit(problem)

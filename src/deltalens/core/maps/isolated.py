"""The map ``isolated``: the layer itself, run on each token alone. The model supplies it; nothing is fitted."""

from dataclasses import dataclass
from typing import ClassVar, NoReturn

from deltalens.core.maps.protocol import FitProblem, TokenwiseMap
from deltalens.errors import InputError


@dataclass(frozen=True)
class Isolated(TokenwiseMap):
    """``T(x)`` = the layer run on the token alone, at its own position, without context."""

    name: ClassVar[str] = "isolated"
    fitted: ClassVar[bool] = False
    update_rank: ClassVar[None] = None

    def fit(self, problem: FitProblem) -> NoReturn:
        """Arrays alone don't define it: refused."""
        raise InputError(
            f"the map 'isolated' needs a model's layer, but arrays of width {problem.width} were given; use it in a run"
        )

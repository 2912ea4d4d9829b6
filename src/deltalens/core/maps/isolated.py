"""The map ``isolated``: the layer itself, run on each token alone. The model supplies it; nothing is fitted."""

from dataclasses import dataclass
from typing import NoReturn

from deltalens.core.maps.protocol import FitProblem
from deltalens.errors import InputError


@dataclass(frozen=True)
class Isolated:
    """``T(x)`` = the layer run on the token alone, at its own position, without context."""

    name: str = "isolated"
    fitted: bool = False

    def spans_updates(self, subspace: int) -> bool:
        """Never: the block is free to move a token anywhere."""
        return False

    def fit(self, problem: FitProblem) -> NoReturn:
        """Arrays alone don't define it: refused."""
        raise InputError("the map 'isolated' needs the model's own layer; use it in a run, not on arrays alone")

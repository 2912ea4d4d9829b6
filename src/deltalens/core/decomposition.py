"""What a decomposition is: the tokenwise part and the residual of n tokens, with what the fits say of themselves."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array", Tensor, NDArray[Any])


@dataclass(frozen=True)
class Decomposition(Generic[Array]):
    """``update = (T(x) - x) + residual`` for n tokens, with what the fits say of themselves.

    ``tokenwise`` is T(x), ``residual`` is y - T(x), ``update`` is y - x; ``basis`` holds the orthonormal columns of
    each token's dominant subspace, zero-padded past ``subspace_rank``; ``neighbors`` are pool indices (none for a
    global fit); ``distinct_neighbors`` counts distinct inputs that a fit used.
    """

    tokenwise: Float[Array, "n d"]
    residual: Float[Array, "n d"]
    update: Float[Array, "n d"]
    basis: Float[Array, "n d m"]
    subspace_rank: Int[Array, " n"]
    neighbors: Int[Array, "n k"]
    distinct_neighbors: Int[Array, " n"]
    degrees_of_freedom: Float[Array, " n"]

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"Decomposition({facts})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in self._facts().items())
        return f"<table><caption>Decomposition: y = T(x) + r</caption>{rows}</table>"

    def _facts(self) -> dict[str, str]:
        tokenwise, residual, update = map(_norms, (self.update - self.residual, self.residual, self.update))
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = residual / update
        return {
            "tokens": str(len(update)),
            "width": str(self.update.shape[1]),
            "median ‖Δ_tok‖": _median(tokenwise),
            "median ‖r‖": _median(residual),
            "median ‖r‖ / ‖Δ_full‖": _median(shares),
            "median degrees of freedom": _median(_numpy(self.degrees_of_freedom)),
        }


def _numpy(values: Any) -> NDArray[np.float64]:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    return np.asarray(array, dtype=np.float64)


def _norms(states: Any) -> NDArray[np.float64]:
    norms: NDArray[np.float64] = np.linalg.norm(_numpy(states), axis=1)
    return norms


def _median(values: NDArray[np.float64]) -> str:
    kept = values[np.isfinite(values)]
    return f"{np.median(kept):.4g}" if len(kept) else "undefined"

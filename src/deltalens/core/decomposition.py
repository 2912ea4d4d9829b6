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

    States are in the units of the inputs; floating-point fields have the inputs' dtype, at least float32.

    Attributes:
        tokenwise: T(x), (n, d).
        residual: y - T(x), (n, d).
        update: y - x, (n, d).
        basis: Orthonormal columns of each token's dominant subspace, (n, d, m), zero-padded past ``subspace_rank``.
        subspace_rank: How many columns there are, (n,), integers.
        neighbors: Indices into the pool as given, (n, k), integers, nearest first; k = 0 for a global fit.
        distinct_neighbors: How many distinct inputs a fit used, (n,), integers.
        degrees_of_freedom: Effective ones, ``(1/d) Σ_j tr ∂ŷ_j/∂y_j``, (n,); NaN where they weren't estimated.

    Source:
        arXiv 2604.02459, "Procedure"; subspaces and degrees of freedom are defined in docs/method.md.

    Example:
        >>> import deltalens as dl, numpy as np
        >>> x = np.random.default_rng(0).normal(size=(40, 3))
        >>> parts = dl.decompose(x, 2 * x, protocol="in_sample", map="diagonal", neighbors=8)
        >>> bool(np.allclose(parts.tokenwise + parts.residual, 2 * x))
        True
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

"""One map for a whole pool, kept as the parameters that decide it."""

from jaxtyping import Float
from torch import Tensor

from deltalens.core.batches import over_batches
from deltalens.core.checks import require_matrix, require_positive, working_dtype
from deltalens.core.maps import FitProblem, GlobalMap, Table, TokenwiseMap
from deltalens.core.products import power_of_two
from deltalens.errors import InputError


def fit_global(
    pool_x: Float[Tensor, "p d"],
    pool_y: Float[Tensor, "p d"],
    map: TokenwiseMap,
    *,
    ridge: float = 1e-2,
    seed: int = 0,
) -> GlobalMap:
    """Fit one map on a whole pool and keep its parameters: what ``decompose_layer(fit="global")`` uses at each token.

    Args:
        pool_x: Pool inputs (p, d).
        pool_y: Pool outputs (p, d).
        map: The map.
        ridge: The penalty relative to the mean squared input norm, above 0.
        seed: Seeds whatever is drawn.

    Returns:
        The map's parameters, in the pool's dtype, at least float32.

    Raises:
        InputError: An argument is malformed.

    Source:
        Section 3 of arXiv 2604.02459, with one neighbourhood for all tokens.

    Example:
        >>> import torch
        >>> from deltalens.core.maps import parse_map
        >>> x = torch.eye(3)
        >>> fit_global(x, x + 1, parse_map("mean")).update(torch.zeros(1, 3)).tolist()
        [[1.0, 1.0, 1.0]]
    """
    require_matrix("pool inputs", pool_x)
    require_matrix("pool outputs", pool_y, width=pool_x.shape[1], rows=pool_x.shape[0])
    require_positive("ridge", ridge, "without it a fit isn't unique")
    if pool_x.shape[0] == 0:
        raise InputError("the pool is empty; give it more text")
    dtype = working_dtype(pool_x, pool_y)
    pool_x, pool_y = pool_x.detach().to(dtype), pool_y.detach().to(dtype)
    unit = power_of_two(pool_x, pool_y)
    table = Table(pool_x / unit, (pool_y - pool_x) / unit)

    def fit(_: slice) -> GlobalMap:
        return map.fit(FitProblem(table.inputs[:1].unsqueeze(0), table, None, ridge, seed)).parameters()

    return over_batches(fit, 1, 1, pool_x.device)[0].rescaled(unit)

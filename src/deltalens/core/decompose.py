"""The decomposition ``y = T(x) + r`` of a layer's updates into a tokenwise part and a residual."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from deltalens.core.batches import batch_size, over_batches
from deltalens.core.checks import (
    require_choice,
    require_matrix,
    require_ridge,
    require_some_rows,
    require_whole,
    working_dtype,
)
from deltalens.core.decomposition import Array, Decomposition
from deltalens.core.duplicates import group_equal_rows
from deltalens.core.maps import FitProblem, Table, TokenwiseMap, parse_map
from deltalens.core.nearest import Metric
from deltalens.core.neighbors import Neighborhoods, find_neighborhoods
from deltalens.core.products import power_of_two
from deltalens.core.subspaces import Subspace, dominant_subspace
from deltalens.errors import InputError

Protocol = Literal["held_out", "leave_one_out", "in_sample"]
Fit = Literal["local", "global"]

PROBED_ANCHORS = 256
"""The most anchors of a layer whose degrees of freedom are estimated where they have no closed form."""


def decompose(
    x: Float[Array, "n d"],
    y: Float[Array, "n d"],
    *,
    pool: tuple[Float[Array, "p d"], Float[Array, "p d"]] | None = None,
    protocol: Protocol = "held_out",
    map: str | TokenwiseMap,
    neighbors: int = 64,
    ridge: float = 1e-2,
    subspace: int = 8,
    metric: Metric = "euclidean",
    distinct: bool = True,
    fit: Fit = "local",
    seed: int = 0,
) -> Decomposition[Array]:
    """Split each token's layer update ``y - x`` into ``T(x) - x`` and the residual ``r = y - T(x)``.

    Args:
        x: Layer inputs (n, d), numpy or torch.
        y: Layer outputs (n, d).
        pool: The pairs (inputs, outputs) that maps are fitted on, for ``held_out``.
        protocol: ``held_out`` fits on ``pool``; ``in_sample`` on (x, y) itself; ``leave_one_out`` on (x, y) without
            the token's own pair.
        map: A map, or its name.
        neighbors: k, how many nearest pool inputs a local fit uses.
        ridge: The penalty relative to the mean squared input norm, above 0.
        subspace: The most columns of a dominant subspace.
        metric: ``euclidean`` or ``cosine``.
        distinct: Merge bitwise-equal pool inputs first.
        fit: ``local`` fits one map per token, ``global`` one map on the whole pool.
        seed: Seeds whatever is drawn.

    Returns:
        The decomposition, in the inputs' kind of array and dtype (at least float32).

    Raises:
        InputError: An argument is malformed, unknown or inconsistent.

    Source:
        Section 3 of arXiv 2604.02459.

    Example:
        >>> import numpy as np
        >>> x = np.random.default_rng(0).normal(size=(50, 4))
        >>> found = decompose(x, 2 * x, protocol="in_sample", map="scalar", neighbors=10, ridge=1e-9)
        >>> bool(np.abs(found.residual).max() < 1e-6)
        True
    """
    inputs, outputs = _as_tensor("x", x), _as_tensor("y", y)
    pool_inputs, pool_outputs = _pool(inputs, outputs, pool, protocol, fit)
    chosen = _as_map(map)
    _require_layer(inputs, outputs, pool_inputs, pool_outputs)
    _require_settings(fit, ridge, subspace, seed)
    require_choice("metric", metric, ("euclidean", "cosine"))
    require_whole("neighbors", neighbors, least=1)
    chosen.require_rows(neighbors if fit == "local" else pool_inputs.shape[0])
    neighborhoods = None
    if fit == "local":
        own = torch.arange(inputs.shape[0], device=inputs.device).unsqueeze(1)
        neighborhoods = find_neighborhoods(
            inputs,
            pool_inputs,
            neighbors=neighbors,
            metric=metric,
            distinct=distinct,
            excluded=own if protocol == "leave_one_out" else None,
        )
    found = decompose_layer(
        inputs,
        outputs,
        pool_inputs,
        pool_outputs,
        neighborhoods,
        chosen,
        ridge=ridge,
        subspace=subspace,
        fit=fit,
        seed=seed,
    )
    return _as_given(found, x)


def decompose_layer(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n d"],
    pool_x: Float[Tensor, "p d"],
    pool_y: Float[Tensor, "p d"],
    neighborhoods: Neighborhoods | None,
    map: TokenwiseMap,
    *,
    ridge: float = 1e-2,
    subspace: int = 8,
    fit: Fit = "local",
    seed: int = 0,
    probes: int = 1,
    probed: Bool[Tensor, " n"] | None = None,
) -> Decomposition[Tensor]:
    """Decompose one layer's updates with neighbourhoods that are already known: ``y = T(x) + r``.

    Args:
        x: Layer inputs (n, d).
        y: Layer outputs (n, d).
        pool_x: Pool inputs (p, d).
        pool_y: Pool outputs (p, d).
        neighborhoods: Of x in ``pool_x``, shared by maps and nulls; None for a global fit.
        map: The map.
        ridge: The penalty relative to the mean squared input norm, above 0.
        subspace: The most columns of a dominant subspace.
        fit: ``local`` or ``global``.
        seed: Seeds whatever is drawn.
        probes: Random directions per fit for degrees of freedom without a closed form; 0 leaves all of those NaN.
        probed: Local fits whose degrees of freedom are estimated where they have no closed form, the others' being
            NaN; by default `probed_anchors`.

    Returns:
        The decomposition.

    Raises:
        InputError: An argument is malformed or inconsistent.

    Source:
        Section 3 of arXiv 2604.02459.

    Example:
        >>> import torch
        >>> x = torch.eye(3)
        >>> found = decompose_layer(x, 2 * x, x, 2 * x, None, parse_map("mean"), fit="global")
        >>> found.degrees_of_freedom.tolist()
        [1.0, 1.0, 1.0]
    """
    _require_layer(x, y, pool_x, pool_y)
    _require_settings(fit, ridge, subspace, seed)
    if (neighborhoods is None) != (fit == "global"):
        raise InputError("a local fit needs neighborhoods and a global fit takes none; pass neighborhoods accordingly")
    dtype = working_dtype(x, y, pool_x, pool_y)
    x, y, pool_x, pool_y = (states.detach().to(dtype) for states in (x, y, pool_x, pool_y))
    scale = power_of_two(x, y, pool_x, pool_y)
    pool_x, updates = pool_x / scale, (pool_y - pool_x) / scale
    if neighborhoods is None:
        parts = _fit_globally(x / scale, Table(pool_x, updates), map, ridge, subspace, seed, probes)
        distinct = torch.full((x.shape[0],), group_equal_rows(pool_x).count, device=x.device)
        neighbors = distinct.new_empty((x.shape[0], 0))
    else:
        merged = neighborhoods.merged
        inputs = pool_x[merged.representative]
        gram = merged.gram if torch.equal(inputs * scale, merged.gram.inputs) else None
        table = Table(inputs, merged.averaged(updates), gram, scale)
        parts = _fit_locally(x / scale, table, neighborhoods, map, ridge, subspace, seed, probes, probed)
        distinct, neighbors = neighborhoods.distinct_neighbors, neighborhoods.indices
    tokenwise = x + parts.update * scale
    return Decomposition(
        tokenwise=tokenwise,
        residual=y - tokenwise,
        update=y - x,
        basis=parts.subspace.basis,
        subspace_rank=parts.subspace.rank,
        neighbors=neighbors,
        distinct_neighbors=distinct,
        degrees_of_freedom=parts.degrees_of_freedom,
    )


def decomposition_from_tokenwise(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n d"],
    tokenwise: Float[Tensor, "n d"],
    pool_updates: Float[Tensor, "p d"],
    neighborhoods: Neighborhoods | None,
    *,
    subspace: int = 8,
) -> Decomposition[Tensor]:
    """Decompose with a tokenwise map that is known at every token, as ``isolated`` is: ``r = y - T(x)``.

    Args:
        x: Layer inputs (n, d).
        y: Layer outputs (n, d).
        tokenwise: T(x) (n, d).
        pool_updates: ``T(x_j) - x_j`` of the pool (p, d), whose neighbourhood rows span the dominant subspaces.
        neighborhoods: Of x in the pool; None for one subspace from all of it.
        subspace: The most columns of a dominant subspace.

    Returns:
        The decomposition, with zero degrees of freedom.

    Raises:
        InputError: An argument is malformed.

    Source:
        Section 3 of arXiv 2604.02459.

    Example:
        >>> import torch
        >>> x = torch.eye(2)
        >>> decomposition_from_tokenwise(x, 2 * x, 2 * x, x, None).residual.abs().max().item()
        0.0
    """
    require_matrix("x", x)
    require_matrix("y", y, width=x.shape[1], rows=x.shape[0])
    require_matrix("tokenwise", tokenwise, width=x.shape[1], rows=x.shape[0])
    require_matrix("pool_updates", pool_updates, width=x.shape[1])
    dtype = working_dtype(x, y, tokenwise, pool_updates)
    x, y, tokenwise, updates = (states.detach().to(dtype) for states in (x, y, tokenwise, pool_updates))
    if neighborhoods is None:
        found = _repeated(dominant_subspace(updates.unsqueeze(0), subspace), x.shape[0])
        distinct = torch.full((x.shape[0],), updates.shape[0], device=x.device)
        neighbors = distinct.new_empty((x.shape[0], 0))
    else:
        table = neighborhoods.merged.averaged(updates)
        found = _neighborhood_subspaces(table, neighborhoods.rows, subspace)
        distinct, neighbors = neighborhoods.distinct_neighbors, neighborhoods.indices
    return Decomposition(
        tokenwise=tokenwise,
        residual=y - tokenwise,
        update=y - x,
        basis=found.basis,
        subspace_rank=found.rank,
        neighbors=neighbors,
        distinct_neighbors=distinct,
        degrees_of_freedom=torch.zeros_like(x[:, 0]),
    )


@dataclass(frozen=True)
class _Parts:
    """What fits give for n tokens."""

    update: Tensor
    subspace: Subspace
    degrees_of_freedom: Tensor


def _fit_locally(
    anchors: Tensor,
    table: Table,
    neighborhoods: Neighborhoods,
    map: TokenwiseMap,
    ridge: float,
    subspace: int,
    seed: int,
    probes: int,
    probed: Tensor | None,
) -> _Parts:
    n, d = anchors.shape
    update = torch.empty_like(anchors)
    basis = anchors.new_empty((n, d, subspace))
    rank, sigma = torch.empty(n, dtype=torch.long, device=anchors.device), anchors.new_empty((n, subspace))
    freedom = anchors.new_empty(n)

    sample = (probed_anchors(n, seed) if probed is None else probed).to(anchors.device)
    problem = map.prepared(FitProblem.local(anchors, table, neighborhoods.rows, ridge, seed, probes, sample))

    def fill(part: slice) -> None:
        fitted = map.fit(problem.part(part))
        update[part] = fitted.update()[:, 0]
        found = fitted.subspace(subspace)
        basis[part], rank[part], sigma[part] = found.basis, found.rank, found.sigma
        freedom[part] = fitted.degrees_of_freedom()

    size = batch_size(neighborhoods.rows.shape[1] * d * anchors.element_size(), anchors.device)
    over_batches(fill, n, size, anchors.device)
    return _Parts(update, Subspace(basis, rank, sigma), freedom)


def probed_anchors(count: int, seed: int) -> Bool[Tensor, " n"]:
    """A seeded sample of at most 256 anchors: an average needs no more, and each probe costs as much as a fit."""
    marked = torch.zeros(count, dtype=torch.bool)
    marked[torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:PROBED_ANCHORS]] = True
    return marked


def _fit_globally(
    anchors: Tensor, table: Table, map: TokenwiseMap, ridge: float, subspace: int, seed: int, probes: int
) -> _Parts:
    n = anchors.shape[0]

    def fit(_: slice) -> _Parts:
        fitted = map.fit(FitProblem(anchors.unsqueeze(0), table, None, ridge, seed, probes))
        found = _repeated(fitted.subspace(subspace), n)
        return _Parts(fitted.update()[0], found, fitted.degrees_of_freedom().expand(n))

    return over_batches(fit, 1, 1, anchors.device)[0]


def _neighborhood_subspaces(table: Tensor, rows: Tensor, size: int) -> Subspace:
    n, k = rows.shape
    basis = table.new_empty((n, table.shape[1], size))
    rank, sigma = torch.empty(n, dtype=torch.long, device=table.device), table.new_empty((n, size))

    def fill(part: slice) -> None:
        gathered = table.index_select(0, rows[part].reshape(-1)).view(*rows[part].shape, table.shape[1])
        found = dominant_subspace(gathered, size)
        basis[part], rank[part], sigma[part] = found.basis, found.rank, found.sigma

    over_batches(fill, n, batch_size(k * table.shape[1] * table.element_size(), table.device), table.device)
    return Subspace(basis, rank, sigma)


def _repeated(one: Subspace, count: int) -> Subspace:
    return Subspace(one.basis.expand(count, -1, -1), one.rank.expand(count), one.sigma.expand(count, -1))


def _require_layer(x: Tensor, y: Tensor, pool_x: Tensor, pool_y: Tensor) -> None:
    require_matrix("x", x)
    require_some_rows("x", x)
    require_matrix("y", y, width=x.shape[1], rows=x.shape[0])
    require_matrix("pool inputs", pool_x, width=x.shape[1])
    require_matrix("pool outputs", pool_y, width=x.shape[1], rows=pool_x.shape[0])
    if pool_x.shape[0] == 0:
        raise InputError("the pool is empty; give it more text")


def _require_settings(fit: object, ridge: object, subspace: object, seed: object) -> None:
    require_ridge(ridge)
    require_whole("subspace", subspace, least=1, unit=" column")
    require_whole("seed", seed, least=0)
    require_choice("fit", fit, ("local", "global"))


def _pool(x: Tensor, y: Tensor, pool: object, protocol: object, fit: object) -> tuple[Tensor, Tensor]:
    require_choice("protocol", protocol, ("held_out", "leave_one_out", "in_sample"))
    if protocol == "leave_one_out" and fit == "global":
        raise InputError("leave_one_out needs one fit per token; use fit='local', or another protocol")
    if protocol == "held_out":
        if pool is None:
            raise InputError("held_out needs pool=(inputs, outputs); give one, or use 'in_sample' or 'leave_one_out'")
        if not isinstance(pool, (tuple, list)) or len(pool) != 2:
            raise InputError("pool must be the pair (inputs, outputs) of matrices; give both, and nothing else")
        return _as_tensor("pool inputs", pool[0]), _as_tensor("pool outputs", pool[1])
    if pool is not None:
        raise InputError(f"{protocol} fits on x and y themselves; leave out pool, or use 'held_out'")
    return x, y


def _as_map(value: object) -> TokenwiseMap:
    if isinstance(value, str):
        return parse_map(value)
    if isinstance(value, TokenwiseMap) and not isinstance(value, type):
        return value
    raise InputError(f"map must be the name of a map or a map, but {value!r} was given; use one as 'low_rank:8'")


def _as_tensor(name: str, value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        if value.dtype.itemsize > 8:
            raise InputError(f"{name} is an array of {value.dtype}; give float16, float32 or float64")
        native = value.astype(value.dtype.newbyteorder("="), copy=not value.flags.writeable)
        return torch.from_numpy(np.ascontiguousarray(native))
    kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise InputError(f"{name} must be a floating-point numpy array or torch tensor, but a {kind} was given")


def _as_given(found: Decomposition[Tensor], given: Array) -> Decomposition[Array]:
    if isinstance(given, Tensor):
        return found
    return Decomposition(**{name: value.numpy() for name, value in vars(found).items()})

"""Exact nearest neighbours, in blocks: float64 distances, ties to the lower pool index, equal inputs merged."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.core.batches import batch_size, over_batches
from deltalens.core.checks import require_choice, require_matrix, require_some_rows, require_whole, working_dtype
from deltalens.core.duplicates import Groups, MergedRows, group_equal_rows
from deltalens.core.products import power_of_two
from deltalens.errors import InputError

Metric = Literal["euclidean", "cosine"]

SPARE_CANDIDATES = 16
"""Candidates kept beyond k by the fast pass; their exact distances prove that none nearer was missed."""

BLOCK_ENTRIES = 2**23
"""Entries of one block of the anchor-by-pool distance matrix."""


@dataclass(frozen=True)
class Neighborhoods:
    """Each anchor's k nearest pool inputs, shared by every map and every null of a layer.

    ``indices`` point into the pool as given (a merged group shows its lowest usable member); ``distances`` are exact
    float64 distances in ascending order; ``input_groups`` number the neighbours' inputs, equal ones alike; ``rows``
    point into ``merged``, which says how updates are averaged.
    """

    indices: Int[Tensor, "n k"]
    distances: Float[Tensor, "n k"]
    input_groups: Int[Tensor, "n k"]
    rows: Int[Tensor, "n k"]
    merged: MergedRows

    @property
    def distinct_neighbors(self) -> Int[Tensor, " n"]:
        """How many distinct inputs there are among the k."""
        found = self.input_groups.sort(dim=1).values
        return 1 + (found[:, 1:] != found[:, :-1]).sum(1)

    def of(self, anchors: Int[Tensor, " chosen"]) -> "Neighborhoods":
        """The neighbourhoods of some anchors."""
        return self._each(lambda table: table[anchors])

    def nearest(self, neighbors: int) -> "Neighborhoods":
        """The nearest of each anchor's neighbours: what a search for fewer would have found.

        Raises:
            InputError: More were asked than were found.
        """
        if not 1 <= neighbors <= self.indices.shape[1]:
            raise InputError(f"{neighbors} neighbors were asked of {self.indices.shape[1]} that were found; find more")
        return self if neighbors == self.indices.shape[1] else self._each(lambda t: t[:, :neighbors].contiguous())

    def _each(self, take: Callable[[Tensor], Tensor]) -> "Neighborhoods":
        indices, distances, groups, rows = map(take, (self.indices, self.distances, self.input_groups, self.rows))
        return Neighborhoods(indices, distances, groups, rows, self.merged)


def find_neighborhoods(
    anchors: Float[Tensor, "n d"],
    pool_inputs: Float[Tensor, "p d"],
    *,
    neighbors: int,
    metric: Metric = "euclidean",
    distinct: bool = True,
    excluded: Int[Tensor, "n e"] | None = None,
) -> Neighborhoods:
    """Find each anchor's k nearest pool inputs, ``argmin_j ‖x - x_j‖`` (or ``1 - cos``), exactly.

    Args:
        anchors: Anchor states (n, d).
        pool_inputs: Pool states (p, d) of the same layer.
        neighbors: k, at least 1 and at most the pool's (distinct) rows that every anchor may use.
        metric: ``euclidean`` or ``cosine`` (distance ``1 - cos``; a zero vector is at distance 1).
        distinct: Merge bitwise-equal inputs first, so that each counts as one neighbour.
        excluded: Pool rows that an anchor may not use (n, e), -1 for none.

    Returns:
        The neighbourhoods.

    Raises:
        InputError: An argument is malformed, or the pool is too small for k.

    Source:
        Section 3 of arXiv 2604.02459.

    Example:
        >>> import torch
        >>> pool = torch.tensor([[0.0], [1.0], [1.0], [5.0]])
        >>> find_neighborhoods(torch.tensor([[0.9]]), pool, neighbors=2).indices.tolist()
        [[1, 0]]
    """
    require_matrix("anchors", anchors)
    require_matrix("pool_inputs", pool_inputs, width=anchors.shape[1])
    _require_request(anchors, pool_inputs, neighbors, metric, excluded)
    pool = pool_inputs.detach().to(working_dtype(anchors, pool_inputs))
    return PoolIndex.of(pool, metric=metric, distinct=distinct).neighborhoods(
        anchors, neighbors=neighbors, excluded=excluded
    )


@dataclass(frozen=True)
class PoolIndex:
    """A pool that is searched several times: its equal rows are found once, and its Gram matrix is shared.

    Attributes:
        inputs: Pool states (p, d).
        metric: ``euclidean`` or ``cosine``.
        groups: Equal rows.
        merging: Whether equal rows count as one neighbour and there are any.
    """

    inputs: Float[Tensor, "p d"]
    metric: Metric
    groups: Groups
    merging: bool

    @classmethod
    def of(
        cls, pool_inputs: Float[Tensor, "p d"], *, metric: Metric = "euclidean", distinct: bool = True
    ) -> "PoolIndex":
        """Prepare a pool, finite and in the dtype of the fits; arguments as in `find_neighborhoods`."""
        groups = group_equal_rows(pool_inputs)
        return cls(pool_inputs, metric, groups, distinct and groups.count < pool_inputs.shape[0])

    def neighborhoods(
        self, anchors: Float[Tensor, "n d"], *, neighbors: int, excluded: Int[Tensor, "n e"] | None = None
    ) -> Neighborhoods:
        """Find some anchors' k nearest rows; arguments as in `find_neighborhoods`."""
        anchors, units = anchors.detach().to(self.inputs.dtype), self._units
        forbidden = _forbidden_units(units, excluded)
        _require_enough(units, forbidden, neighbors, self.merging)
        points = _Points.of(anchors, self.inputs[units.representative], self.metric)
        chosen, distances = _nearest(points, neighbors, forbidden)
        input_groups = self.groups.of_row[units.representative][chosen]
        if not self.merging:
            return Neighborhoods(chosen, distances, input_groups, chosen, self._merged)
        if excluded is None:
            return Neighborhoods(units.representative[chosen], distances, input_groups, chosen, self._merged)
        indices, rows, merged = _without_excluded_members(self.inputs, units, chosen, excluded)
        return Neighborhoods(indices, distances, input_groups, rows, merged)

    @cached_property
    def _units(self) -> Groups:
        return self.groups if self.merging else _each_row_alone(self.inputs)

    @cached_property
    def _merged(self) -> MergedRows:
        none = torch.empty(0, dtype=torch.long, device=self.inputs.device)
        groups = self.groups if self.merging else None
        return MergedRows(self.inputs, groups, self._units.representative, none, none, none)


def _require_request(
    anchors: Tensor, pool_inputs: Tensor, neighbors: int, metric: str, excluded: Tensor | None
) -> None:
    require_choice("metric", metric, ("euclidean", "cosine"))
    require_whole("neighbors", neighbors, least=1)
    require_some_rows("anchors", anchors)
    if pool_inputs.shape[0] == 0:
        raise InputError("the pool is empty; give it more text")
    if excluded is not None and excluded.shape[0] != anchors.shape[0]:
        raise InputError(f"excluded has {excluded.shape[0]} rows, but there are {anchors.shape[0]} anchors")
    if excluded is not None and excluded.numel() and int(excluded.max()) >= pool_inputs.shape[0]:
        raise InputError(f"excluded names pool row {int(excluded.max())}, but the pool has {pool_inputs.shape[0]} rows")


def _each_row_alone(pool_inputs: Tensor) -> Groups:
    everything = torch.arange(pool_inputs.shape[0], device=pool_inputs.device)
    return Groups(everything, everything, torch.ones_like(everything))


@dataclass(frozen=True)
class _Pairs:
    """Sparse (anchor, unit) pairs."""

    anchor: Tensor
    unit: Tensor


def _excluded_triples(excluded: Tensor | None) -> tuple[Tensor, Tensor]:
    """Distinct (anchor, pool row) pairs of an exclusion table."""
    if excluded is None:
        none = torch.empty(0, dtype=torch.long)
        return none, none
    pairs = torch.stack([(excluded >= 0).nonzero()[:, 0], excluded[excluded >= 0]])
    pairs = torch.unique(pairs, dim=1)
    return pairs[0], pairs[1]


def _forbidden_units(units: Groups, excluded: Tensor | None) -> _Pairs:
    """Units all of whose members an anchor may not use."""
    anchor, member = _excluded_triples(excluded)
    if anchor.numel() == 0:
        return _Pairs(anchor, member)
    keys, counts = torch.unique(anchor * units.count + units.of_row[member], return_counts=True)
    whole = counts == units.size[keys % units.count]
    keys = keys[whole]
    return _Pairs(keys // units.count, keys % units.count)


def _require_enough(units: Groups, forbidden: _Pairs, neighbors: int, merging: bool) -> None:
    lost = int(torch.bincount(forbidden.anchor).max()) if forbidden.anchor.numel() else 0
    usable = units.count - lost
    if neighbors > usable:
        kind = "distinct inputs" if merging else "inputs"
        raise InputError(
            f"neighbors={neighbors} was asked, but the pool has only {usable} {kind} that every anchor may use; "
            "lower neighbors or enlarge the pool"
        )


@dataclass(frozen=True)
class _Points:
    """Anchors and candidates as points whose squared Euclidean distance orders them as the metric does.

    Points are in units of ``unit``, a power of two, so that squares of float64 states stay in range.
    """

    anchors: Tensor
    candidates: Tensor
    cosine: bool
    unit: float

    @staticmethod
    def of(anchors: Tensor, candidates: Tensor, metric: Metric) -> "_Points":
        if metric == "euclidean":
            # Squares of float32 states are in float64's range as they are.
            unit = power_of_two(anchors, candidates) if anchors.dtype == torch.float64 else 1.0
            return _Points(anchors / unit, candidates / unit, False, unit)
        return _Points(_unit(anchors), _unit(candidates), True, 1.0)

    def squared(self, anchor_rows: Tensor, candidate_rows: Tensor) -> Tensor:
        """Squared distances (b, c) of chosen anchors (b,) to their chosen candidates (b, c), by differences."""
        chosen = self.candidates.index_select(0, candidate_rows.reshape(-1)).double()
        difference = chosen.view(*candidate_rows.shape, -1).sub_(self.anchors[anchor_rows].double().unsqueeze(1))
        squares: Tensor = torch.linalg.vecdot(difference, difference)
        if not self.cosine:
            return squares
        # A zero vector has no direction: 1 - cos is taken as 1 from everything.
        zero = ~self.candidates.any(1)[candidate_rows] | ~self.anchors.any(1)[anchor_rows].unsqueeze(1)
        return torch.where(zero, 2.0, squares)

    def distances(self, squared: Tensor) -> Tensor:
        return squared / 2 if self.cosine else torch.sqrt(squared) * self.unit


def _unit(points: Tensor) -> Tensor:
    wide = points.double()
    _, exponent = torch.frexp(wide.abs().amax(1, keepdim=True))
    wide = torch.ldexp(wide, -exponent)
    length: Tensor = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    return wide / length.clamp_min(torch.finfo(torch.float64).tiny)


def _nearest(points: _Points, neighbors: int, forbidden: _Pairs) -> tuple[Tensor, Tensor]:
    """The k nearest candidates of every anchor and their distances, ordered by (distance, index)."""
    count = points.anchors.shape[0]
    kept = min(neighbors + SPARE_CANDIDATES, points.candidates.shape[0])
    candidates, bound = _candidates(points, kept, forbidden)
    everyone = torch.arange(count, device=points.anchors.device)
    chosen, squared = _ranked(points, everyone, candidates, neighbors, forbidden)
    if kept < points.candidates.shape[0]:
        doubtful = (~(squared[:, -1] < bound)).nonzero()[:, 0]
        _settle(points, doubtful, chosen, squared, forbidden)
    return chosen, points.distances(squared)


def _candidates(points: _Points, kept: int, forbidden: _Pairs) -> tuple[Tensor, Tensor]:
    """The ``kept`` apparently nearest candidates, and a bound under the true distances of all others."""
    # Any centre will do, as long as each difference is rounded once.
    centre = points.candidates.mean(0)
    anchors, pool = points.anchors - centre, points.candidates - centre
    lowest, highest = torch.aminmax(pool)
    scale = torch.stack([-lowest, highest, anchors.abs().max()]).max().clamp_min(torch.finfo(pool.dtype).tiny)
    anchors, pool = anchors.div_(scale), pool.div_(scale)
    pool_square = torch.linalg.vecdot(pool, pool)
    anchor_square = torch.linalg.vecdot(anchors, anchors)
    reach = (anchor_square.sqrt() + pool_square.max().sqrt()) ** 2
    error = 4 * (anchors.shape[1] + 4) * torch.finfo(pool.dtype).eps * reach.double()
    found = torch.empty((anchors.shape[0], kept), dtype=torch.long, device=anchors.device)
    bound = torch.empty(anchors.shape[0], dtype=torch.float64, device=anchors.device)
    step = max(1, BLOCK_ENTRIES // pool.shape[0])
    for start in range(0, anchors.shape[0], step):
        part = slice(start, start + step)
        apparent = torch.addmm(pool_square, anchors[part], pool.T, alpha=-2)
        inside = (forbidden.anchor >= start) & (forbidden.anchor < start + step)
        apparent[forbidden.anchor[inside] - start, forbidden.unit[inside]] = torch.inf
        least = apparent.topk(kept, dim=1, largest=False, sorted=False)
        found[part] = least.indices
        bound[part] = least.values.max(1).values.double() + anchor_square[part].double() - error[part]
    return found, bound * scale.double() ** 2


def _ranked(
    points: _Points, anchor_rows: Tensor, candidates: Tensor, neighbors: int, forbidden: _Pairs
) -> tuple[Tensor, Tensor]:
    ascending = candidates.sort(dim=1).values
    squared = torch.empty(ascending.shape, dtype=torch.float64, device=ascending.device)
    size = batch_size(8 * ascending.shape[1] * points.anchors.shape[1], ascending.device)

    def fill(part: slice) -> None:
        squared[part] = points.squared(anchor_rows[part], ascending[part])

    over_batches(fill, ascending.shape[0], size, ascending.device)
    if forbidden.anchor.numel():
        keys = anchor_rows.unsqueeze(1) * points.candidates.shape[0] + ascending
        barred = torch.isin(keys, forbidden.anchor * points.candidates.shape[0] + forbidden.unit)
        squared.masked_fill_(barred, torch.inf)
    # Candidates ascend, so a stable sort leaves ties to the lower index.
    values, order = squared.sort(dim=1, stable=True)
    return ascending.gather(1, order)[:, :neighbors], values[:, :neighbors]


def _settle(points: _Points, doubtful: Tensor, chosen: Tensor, squared: Tensor, forbidden: _Pairs) -> None:
    """Redo anchors whose candidates aren't proven complete, against every candidate."""
    everything = torch.arange(points.candidates.shape[0], device=chosen.device)
    step = max(1, BLOCK_ENTRIES // points.candidates.numel())
    for rows in torch.split(doubtful, step):
        candidates = everything.expand(rows.shape[0], -1)
        chosen[rows], squared[rows] = _ranked(points, rows, candidates, chosen.shape[1], forbidden)


def _without_excluded_members(
    pool_inputs: Tensor, units: Groups, chosen: Tensor, excluded: Tensor | None
) -> tuple[Tensor, Tensor, MergedRows]:
    """Pool indices, merged rows and their averaging, where anchors may not use some members of a group."""
    indices, rows = units.representative[chosen], chosen.clone()
    anchor, member = _excluded_triples(excluded)
    if anchor.numel():
        at = chosen[anchor] == units.of_row[member].unsqueeze(1)
        touched = at.any(1)
        anchor, member, slot = anchor[touched], member[touched], at[touched].int().argmax(1)
    else:
        slot = anchor
    keys, excluded_from = torch.unique(anchor * chosen.shape[1] + slot, return_inverse=True)
    where, column = keys // chosen.shape[1], keys % chosen.shape[1]
    reduced = chosen[where, column]
    rows[where, column] = units.count + torch.arange(keys.shape[0], device=chosen.device)
    indices[where, column] = _lowest_members_left(units, reduced, member, excluded_from)
    representative = torch.cat([units.representative, units.representative[reduced]])
    return indices, rows, MergedRows(pool_inputs, units, representative, reduced, member, excluded_from)


def _lowest_members_left(units: Groups, reduced: Tensor, member: Tensor, excluded_from: Tensor) -> Tensor:
    ordered = torch.argsort(units.of_row, stable=True)
    first = torch.cumsum(units.size, 0) - units.size
    barred = excluded_from * units.of_row.shape[0] + member
    lowest = units.representative[reduced].clone()
    offset = torch.zeros_like(lowest)
    while True:
        taken = torch.isin(torch.arange(lowest.shape[0], device=lowest.device) * units.of_row.shape[0] + lowest, barred)
        if not bool(taken.any()):
            return lowest
        offset = offset + taken.long()
        lowest = ordered[first[reduced] + offset]

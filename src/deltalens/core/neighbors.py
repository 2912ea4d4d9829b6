"""Exact nearest neighbours, in blocks: float64 distances, ties to the lower pool index, equal inputs merged."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.core.approximate import InvertedLists
from deltalens.core.checks import require_choice, require_matrix, require_some_rows, require_whole, working_dtype
from deltalens.core.duplicates import Groups, MergedRows, group_equal_rows
from deltalens.core.nearest import SPARE_CANDIDATES, Metric, Pairs, Points, nearest, nearest_among
from deltalens.errors import InputError

Search = Literal["exact", "faiss"]


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
        search: ``exact``, or ``faiss`` for approximate candidates from inverted lists, whose distances are exact.
    """

    inputs: Float[Tensor, "p d"]
    metric: Metric
    groups: Groups
    merging: bool
    search: Search = "exact"

    @classmethod
    def of(
        cls,
        pool_inputs: Float[Tensor, "p d"],
        *,
        metric: Metric = "euclidean",
        distinct: bool = True,
        search: Search = "exact",
    ) -> "PoolIndex":
        """Prepare a pool, finite and in the dtype of the fits; arguments as in `find_neighborhoods`."""
        groups = group_equal_rows(pool_inputs)
        return cls(pool_inputs, metric, groups, distinct and groups.count < pool_inputs.shape[0], search)

    def neighborhoods(
        self, anchors: Float[Tensor, "n d"], *, neighbors: int, excluded: Int[Tensor, "n e"] | None = None
    ) -> Neighborhoods:
        """Find some anchors' k nearest rows; arguments as in `find_neighborhoods`."""
        anchors, units = anchors.detach().to(self.inputs.dtype), self._units
        forbidden = _forbidden_units(units, excluded)
        _require_enough(units, forbidden, neighbors, self.merging)
        points = Points.of(anchors, self.inputs[units.representative], self.metric)
        if self.search == "exact":
            chosen, distances = nearest(points, neighbors, forbidden)
        else:
            lost = int(torch.bincount(forbidden.anchor).max()) if forbidden.anchor.numel() else 0
            candidates = self._lists.candidates(points.anchors, neighbors + lost + SPARE_CANDIDATES)
            chosen, distances = nearest_among(points, candidates, neighbors, forbidden)
        input_groups = self.groups.of_row[units.representative][chosen]
        if not self.merging:
            return Neighborhoods(chosen, distances, input_groups, chosen, self._merged)
        if excluded is None:
            return Neighborhoods(units.representative[chosen], distances, input_groups, chosen, self._merged)
        indices, rows, merged = _without_excluded_members(self.inputs, units, chosen, excluded)
        return Neighborhoods(indices, distances, input_groups, rows, merged)

    def recall(
        self, anchors: Float[Tensor, "n d"], found: Neighborhoods, *, excluded: Int[Tensor, "n e"] | None = None
    ) -> Float[Tensor, " n"]:
        """The share of each anchor's exact neighbours that are among those found."""
        exact = replace(self, search="exact").neighborhoods(
            anchors, neighbors=found.indices.shape[1], excluded=excluded
        )
        equal = exact.indices.unsqueeze(2) == found.indices.unsqueeze(1)
        return equal.any(2).double().mean(1)

    @cached_property
    def _lists(self) -> InvertedLists:
        candidates = self.inputs[self._units.representative]
        return InvertedLists.of(Points.of(candidates[:1], candidates, self.metric).candidates)

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


def _excluded_triples(excluded: Tensor | None) -> tuple[Tensor, Tensor]:
    """Distinct (anchor, pool row) pairs of an exclusion table."""
    if excluded is None:
        none = torch.empty(0, dtype=torch.long)
        return none, none
    pairs = torch.stack([(excluded >= 0).nonzero()[:, 0], excluded[excluded >= 0]])
    pairs = torch.unique(pairs, dim=1)
    return pairs[0], pairs[1]


def _forbidden_units(units: Groups, excluded: Tensor | None) -> Pairs:
    """Units all of whose members an anchor may not use."""
    anchor, member = _excluded_triples(excluded)
    if anchor.numel() == 0:
        return Pairs(anchor, member)
    keys, counts = torch.unique(anchor * units.count + units.of_row[member], return_counts=True)
    whole = counts == units.size[keys % units.count]
    keys = keys[whole]
    return Pairs(keys // units.count, keys % units.count)


def _require_enough(units: Groups, forbidden: Pairs, neighbors: int, merging: bool) -> None:
    lost = int(torch.bincount(forbidden.anchor).max()) if forbidden.anchor.numel() else 0
    usable = units.count - lost
    if neighbors > usable:
        kind = "distinct inputs" if merging else "inputs"
        raise InputError(
            f"neighbors={neighbors} was asked, but the pool has only {usable} {kind} that every anchor may use; "
            "lower neighbors or enlarge the pool"
        )


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

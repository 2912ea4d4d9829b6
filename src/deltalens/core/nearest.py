"""The search behind neighbourhoods: a fast pass for candidates, and their exact distances in float64."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deltalens.core.batches import batch_size, over_batches
from deltalens.core.products import power_of_two

Metric = Literal["euclidean", "cosine"]

SPARE_CANDIDATES = 16
"""Candidates kept beyond k by the fast pass; their exact distances prove that none nearer was missed."""

BLOCK_ENTRIES = 2**23
"""Entries of one block of the anchor-by-pool distance matrix."""


COLUMN_ENTRIES = 2**21
"""Entries of gathered candidates at a time, where an anchor has so many that they'd not fit in memory together."""


@dataclass(frozen=True)
class Pairs:
    """Sparse (anchor, unit) pairs."""

    anchor: Tensor
    unit: Tensor


@dataclass(frozen=True)
class Points:
    """Anchors and candidates as points whose squared Euclidean distance orders them as the metric does.

    Points are in units of ``unit``, a power of two, so that squares of float64 states stay in range.
    """

    anchors: Tensor
    candidates: Tensor
    cosine: bool
    unit: float

    @staticmethod
    def of(anchors: Tensor, candidates: Tensor, metric: Metric) -> "Points":
        """Points for a metric."""
        if metric == "euclidean":
            # Squares of float32 states are in float64's range as they are.
            unit = power_of_two(anchors, candidates) if anchors.dtype == torch.float64 else 1.0
            return Points(anchors / unit, candidates / unit, False, unit)
        return Points(_unit(anchors), _unit(candidates), True, 1.0)

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
        """Distances in the metric."""
        return squared / 2 if self.cosine else torch.sqrt(squared) * self.unit


def _unit(points: Tensor) -> Tensor:
    wide = points.double()
    _, exponent = torch.frexp(wide.abs().amax(1, keepdim=True))
    wide = torch.ldexp(wide, -exponent)
    length: Tensor = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    return wide / length.clamp_min(torch.finfo(torch.float64).tiny)


def nearest(points: Points, neighbors: int, forbidden: Pairs) -> tuple[Tensor, Tensor]:
    """The k nearest candidates of every anchor and their distances, ordered by (distance, index)."""
    count = points.anchors.shape[0]
    kept = min(neighbors + SPARE_CANDIDATES, points.candidates.shape[0])
    candidates, bound = _candidates(points, kept, forbidden)
    everyone = torch.arange(count, device=points.anchors.device)
    chosen, squared = ranked(points, everyone, candidates, neighbors, forbidden)
    if kept < points.candidates.shape[0]:
        doubtful = (~(squared[:, -1] < bound)).nonzero()[:, 0]
        _settle(points, doubtful, chosen, squared, forbidden)
    return chosen, points.distances(squared)


def nearest_among(points: Points, candidates: Tensor, neighbors: int, forbidden: Pairs) -> tuple[Tensor, Tensor]:
    """The k nearest of each anchor's own candidates (n, c); anchors with too few usable ones search everything."""
    everyone = torch.arange(points.anchors.shape[0], device=points.anchors.device)
    chosen, squared = ranked(points, everyone, candidates, neighbors, forbidden)
    _settle(points, squared[:, -1].isinf().nonzero()[:, 0], chosen, squared, forbidden)
    return chosen, points.distances(squared)


def _candidates(points: Points, kept: int, forbidden: Pairs) -> tuple[Tensor, Tensor]:
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


def ranked(
    points: Points, anchor_rows: Tensor, candidates: Tensor, neighbors: int, forbidden: Pairs
) -> tuple[Tensor, Tensor]:
    """The k nearest of some anchors' candidates and their squared distances, ordered by (distance, index)."""
    ascending = candidates.sort(dim=1).values
    squared = torch.empty(ascending.shape, dtype=torch.float64, device=ascending.device)
    size = batch_size(8 * ascending.shape[1] * points.anchors.shape[1], ascending.device)

    columns = max(1, COLUMN_ENTRIES // points.anchors.shape[1])

    def fill(part: slice) -> None:
        for start in range(0, ascending.shape[1], columns):
            some = slice(start, start + columns)
            squared[part, some] = points.squared(anchor_rows[part], ascending[part, some])

    over_batches(fill, ascending.shape[0], size, ascending.device)
    if forbidden.anchor.numel():
        keys = anchor_rows.unsqueeze(1) * points.candidates.shape[0] + ascending
        barred = torch.isin(keys, forbidden.anchor * points.candidates.shape[0] + forbidden.unit)
        squared.masked_fill_(barred, torch.inf)
    # Candidates ascend, so a stable sort leaves ties to the lower index.
    values, order = squared.sort(dim=1, stable=True)
    return ascending.gather(1, order)[:, :neighbors], values[:, :neighbors]


def _settle(points: Points, doubtful: Tensor, chosen: Tensor, squared: Tensor, forbidden: Pairs) -> None:
    """Redo anchors whose candidates aren't proven complete, against every candidate."""
    everything = torch.arange(points.candidates.shape[0], device=chosen.device)
    step = max(1, BLOCK_ENTRIES // points.candidates.numel())
    for rows in torch.split(doubtful, step):
        candidates = everything.expand(rows.shape[0], -1)
        chosen[rows], squared[rows] = ranked(points, rows, candidates, chosen.shape[1], forbidden)

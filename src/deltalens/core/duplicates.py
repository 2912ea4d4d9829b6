"""Bitwise-equal pool rows, merged: their updates are averaged, without the members that an anchor may not use."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.core.products import PoolGram


@dataclass(frozen=True)
class Groups:
    """Groups of equal pool rows, numbered by their lowest member."""

    of_row: Int[Tensor, " p"]
    representative: Int[Tensor, " u"]
    size: Int[Tensor, " u"]

    @property
    def count(self) -> int:
        """How many distinct rows there are."""
        return self.representative.shape[0]


@dataclass(frozen=True)
class MergedRows:
    """The rows that fits draw from: one per group, then one per group that lacks members for some anchor.

    ``averaged`` turns per-pool-row updates into per-merged-row ones. ``representative`` is the pool row whose input a
    merged row has. Without duplicates merged rows are the pool rows themselves.
    """

    pool_inputs: Float[Tensor, "p d"]
    groups: Groups | None
    representative: Int[Tensor, " rows"]
    reduced_group: Int[Tensor, " c"]
    excluded_member: Int[Tensor, " e"]
    excluded_from: Int[Tensor, " e"]

    @cached_property
    def gram(self) -> PoolGram:
        """The Gram matrix of merged rows, shared by every map and every null."""
        return PoolGram(self.pool_inputs[self.representative])

    def averaged(self, updates: Float[Tensor, "p d"]) -> Float[Tensor, "rows d"]:
        """Average updates over each merged row's members, in float64."""
        if self.groups is None:
            return updates
        groups = self.groups
        total = updates.new_zeros((groups.count, updates.shape[1]), dtype=torch.float64)
        total.index_add_(0, groups.of_row, updates.double())
        means = total / groups.size.unsqueeze(1)
        if self.reduced_group.shape[0] == 0:
            return means.to(updates.dtype)
        reduced = total[self.reduced_group]
        reduced.index_add_(0, self.excluded_from, updates[self.excluded_member].double(), alpha=-1)
        members = groups.size[self.reduced_group] - torch.bincount(
            self.excluded_from, minlength=self.reduced_group.shape[0]
        )
        return torch.cat([means, reduced / members.unsqueeze(1)]).to(updates.dtype)


def group_equal_rows(rows: Float[Tensor, "p d"]) -> Groups:
    """Group bitwise-equal rows, each group numbered in the order of its lowest member."""
    bits = rows.contiguous().view(torch.int64 if rows.dtype == torch.float64 else torch.int32)
    _, inverse = torch.unique(bits, dim=0, return_inverse=True)
    count = int(inverse.max()) + 1
    positions = torch.arange(rows.shape[0], device=rows.device)
    lowest = positions.new_full((count,), rows.shape[0]).scatter_reduce_(0, inverse, positions, "amin")
    order = lowest.argsort()
    renumbered = torch.empty_like(order)
    renumbered[order] = torch.arange(count, device=rows.device)
    of_row = renumbered[inverse]
    return Groups(of_row, lowest[order], torch.bincount(of_row, minlength=count))

"""Inner products of table rows chosen by index, without gathering the rows."""

import math
import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.core.batches import over_batches

LARGEST_GRAM = 2**28
"""The most bytes that a pool's Gram matrix may take; fits on larger pools multiply their own rows."""

GRAM_BLOCK = 256
"""Rows of the Gram matrix that one worker makes at a time."""

with warnings.catch_warnings():
    # Torch says once per process that sparse tensors are in beta; no user of a fit can do anything about it.
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


def power_of_two(*states: Tensor) -> float:
    """A power of two near the largest entry: dividing by it is exact and keeps squares from over- or underflowing."""
    largest = max(float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in states)
    return math.ldexp(1.0, min(math.frexp(largest)[1], 1023)) if largest > 0 else 1.0


@dataclass(frozen=True)
class PoolGram:
    """``x_i · x_j`` of a pool's rows: made once, at the first use, and gathered per neighbourhood."""

    inputs: Float[Tensor, "rows d"]

    def pays(self, rows: Int[Tensor, "b k"]) -> bool:
        """Whether it fits in memory and costs no more than the products of every neighbourhood by itself."""
        count = self.inputs.shape[0]
        return count * count <= min(LARGEST_GRAM // self.inputs.element_size(), rows.numel() * rows.shape[1])

    @cached_property
    def _unit(self) -> float:
        return power_of_two(self.inputs)

    @cached_property
    def _lower(self) -> Float[Tensor, "rows rows"]:
        """The lower triangle; what is above is unset."""
        count = self.inputs.shape[0]
        points = self.inputs / self._unit
        products = points.new_empty(count, count)

        def fill(part: slice) -> None:
            torch.mm(points[part], points[: part.stop].T, out=products[part, : part.stop])

        over_batches(fill, count, GRAM_BLOCK, points.device)
        return products

    def make(self) -> None:
        """Make the matrix now, with all workers, rather than in the first worker that asks for it."""
        _ = self._lower

    def of(self, rows: Int[Tensor, "b k"], unit: float) -> Float[Tensor, "b k k"]:
        """Each neighbourhood's ``XXᵀ``, of rows divided by a power of two."""
        # Entries are numbered well below 2³¹, and half as wide an index is read in less time.
        one, other = rows.int().unsqueeze(2), rows.int().unsqueeze(1)
        flat = torch.maximum(one, other) * self.inputs.shape[0] + torch.minimum(one, other)
        gram = self._lower.view(-1).index_select(0, flat.view(-1)).view(flat.shape)
        return gram if unit == self._unit else gram * (self._unit / unit) ** 2


def rows_times_points(
    table: Float[Tensor, "rows d"], rows: Int[Tensor, "b k"], points: Float[Tensor, "b d"]
) -> Float[Tensor, "b k"]:
    """``table[rows_ij] · point_i``."""
    b, k = rows.shape
    if table.device.type != "cpu":
        return (table[rows] @ points.unsqueeze(2)).squeeze(2)
    starts = torch.arange(b + 1) * k
    zeros = table.new_zeros(b * k)
    pattern = torch.sparse_csr_tensor(starts, rows.reshape(-1), zeros, (b, table.shape[0]), check_invariants=False)
    products: Tensor = torch.sparse.sampled_addmm(pattern, points, table.T, beta=0.0).values()
    return products.view(b, k)


def weighted_rows(
    table: Float[Tensor, "rows d"], rows: Int[Tensor, "b k"], weights: Float[Tensor, "b k"]
) -> Float[Tensor, "b d"]:
    """``Σ_j weight_ij table[rows_ij]``."""
    return torch.nn.functional.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)

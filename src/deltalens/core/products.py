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

GATHERED_ROWS = 16
"""Rows of a neighbourhood whose part of a triangle is gathered at a time."""

DOT_BLOCK_BYTES = 2**20
"""Rows in float64 that one worker multiplies at a time: few enough to stay in cache."""

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

    def lower(self, rows: Int[Tensor, "b k"], unit: float) -> Float[Tensor, "b k k"]:
        """The lower triangle of each neighbourhood's ``XXᵀ``, of rows divided by a power of two; the rest is unset.

        Rows ascend, so that the triangle of a neighbourhood lies in that of the pool.
        """
        b, k = rows.shape
        entries, columns = self._lower.view(-1), rows.long()
        starts = columns * self.inputs.shape[0]
        gram = entries.new_empty(b, k, k)
        for start in range(0, k, GATHERED_ROWS):
            stop = min(start + GATHERED_ROWS, k)
            flat = starts[:, start:stop].unsqueeze(2) + columns[:, :stop].unsqueeze(1)
            gram[:, start:stop, :stop] = entries.index_select(0, flat.view(-1)).view(flat.shape)
        return gram if unit == self._unit else gram.mul_((self._unit / unit) ** 2)


def row_products(one: Float[Tensor, "rows d"], other: Float[Tensor, "rows d"]) -> Float[Tensor, " rows"]:
    """``one_i · other_i`` in float64, without a float64 copy of the tables."""
    products = torch.empty(one.shape[0], dtype=torch.float64, device=one.device)

    def fill(part: slice) -> None:
        torch.linalg.vecdot(one[part].double(), other[part].double(), out=products[part])

    over_batches(fill, one.shape[0], max(1, DOT_BLOCK_BYTES // (8 * one.shape[1])), one.device)
    return products


def rows_times_points(
    table: Float[Tensor, "rows d"], rows: Int[Tensor, "b k"], points: Float[Tensor, "b d"]
) -> Float[Tensor, "b k"]:
    """``table[rows_ij] · point_i``."""
    b, k = rows.shape
    if table.device.type != "cpu":
        return (table[rows] @ points.unsqueeze(2)).squeeze(2)
    starts = torch.arange(b + 1, dtype=rows.dtype) * k
    zeros = table.new_zeros(b * k)
    pattern = torch.sparse_csr_tensor(starts, rows.reshape(-1), zeros, (b, table.shape[0]), check_invariants=False)
    products: Tensor = torch.sparse.sampled_addmm(pattern, points, table.T, beta=0.0).values()
    return products.view(b, k)


def weighted_rows(
    table: Float[Tensor, "rows d"], rows: Int[Tensor, "b k"], weights: Float[Tensor, "b k"]
) -> Float[Tensor, "b d"]:
    """``Σ_j weight_ij table[rows_ij]``."""
    return torch.nn.functional.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)

"""What a tokenwise map is, what it is fitted on, and what its fit can tell."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.core.batches import batch_size, over_batches
from deltalens.core.maps.global_map import GlobalMap
from deltalens.core.products import PoolGram, row_products, rows_times_points, weighted_rows
from deltalens.core.subspaces import Subspace
from deltalens.errors import InputError


@dataclass(frozen=True)
class Table:
    """Rows that fits draw from, and the products that several fits share.

    ``gram``, where there is one, is of the inputs before they were divided by ``unit``.
    """

    inputs: Float[Tensor, "rows d"]
    updates: Float[Tensor, "rows d"]
    gram: PoolGram | None = None
    unit: float = 1.0

    @cached_property
    def squares(self) -> Float[Tensor, "rows d"]:
        """``x ⊙ x``."""
        return self.inputs * self.inputs

    @cached_property
    def products(self) -> Float[Tensor, "rows d"]:
        """``x ⊙ δ``."""
        return self.inputs * self.updates

    @cached_property
    def energy(self) -> Float[Tensor, " rows"]:
        """``‖x‖²`` in float64."""
        return row_products(self.inputs, self.inputs)

    @cached_property
    def alignment(self) -> Float[Tensor, " rows"]:
        """``x · δ`` in float64."""
        return row_products(self.inputs, self.updates)


@dataclass(frozen=True)
class Shared:
    """What is made for all fits of a problem at once, one table after the other, so that each stays in cache.

    ``energy`` is ``Σ_j ‖x_j‖²``, ``sums`` a map's own sums over rows, ``weights`` those of the rows' updates in
    ``T(x) - x``.
    """

    energy: Float[Tensor, " b"] | None = None
    sums: Float[Tensor, "b d"] | None = None
    weights: Float[Tensor, "b k"] | None = None

    def part(self, chosen: slice) -> "Shared":
        """What some of the fits share."""
        cut = (None if made is None else made[chosen] for made in (self.energy, self.sums, self.weights))
        return Shared(*cut)


@dataclass(frozen=True)
class FitProblem:
    """A batch of b fits, each on k rows of a table and evaluated at a anchors.

    A local fit has a = 1 and its own rows, which ascend; a global one has b = 1 and all rows (``rows`` is None).
    ``probes`` random
    directions estimate degrees of freedom that have no closed form, of the fits that ``probed`` marks (all, if None);
    the others' are NaN.
    """

    anchors: Float[Tensor, "b a d"]
    table: Table
    rows: Int[Tensor, "b k"] | None
    ridge: float
    seed: int
    probes: int = 1
    probed: Bool[Tensor, " b"] | None = None
    shared: Shared = Shared()

    @staticmethod
    def local(
        anchors: Float[Tensor, "n d"],
        table: Table,
        rows: Int[Tensor, "n k"],
        ridge: float,
        seed: int,
        probes: int = 1,
        probed: Bool[Tensor, " n"] | None = None,
    ) -> "FitProblem":
        """One fit per anchor, on rows of the table in any order.

        Ascending and narrow, rows are gathered in half the time.
        """
        ascending = rows.sort(dim=1).values.int()
        return FitProblem(anchors.unsqueeze(1), table, ascending, ridge, seed, probes, probed)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of states."""
        return self.anchors.dtype

    @property
    def count(self) -> int:
        """k, the rows of one fit."""
        return self.table.inputs.shape[0] if self.rows is None else self.rows.shape[1]

    @property
    def width(self) -> int:
        """d, the width of states."""
        return self.anchors.shape[2]

    def part(self, chosen: slice) -> "FitProblem":
        """Some of the fits."""
        rows = None if self.rows is None else self.rows[chosen]
        probed = None if self.probed is None else self.probed[chosen]
        shared = self.shared.part(chosen)
        return replace(self, anchors=self.anchors[chosen], rows=rows, probed=probed, shared=shared)

    def sharing(self, **made: Tensor) -> "FitProblem":
        """The problem with more that its fits share."""
        return replace(self, shared=replace(self.shared, **made))

    def for_all(self, make: Callable[[slice], Tensor], bytes_per_fit: int) -> Tensor:
        """``make`` of consecutive slices of all fits, joined; slices are as long as their bytes allow."""
        size = batch_size(bytes_per_fit, self.anchors.device)
        return torch.cat(over_batches(make, len(self.anchors), size, self.anchors.device))

    def gathered(self, table: Float[Tensor, "rows d"]) -> Float[Tensor, "b k d"]:
        """Each fit's rows of a table."""
        if self.rows is None:
            return table.unsqueeze(0)
        return table.index_select(0, self.rows.reshape(-1)).view(*self.rows.shape, table.shape[1])

    def sums(self, table: Float[Tensor, "rows d"]) -> Float[Tensor, "b d"]:
        """``Σ_j table_j`` over each fit's rows, without gathering them."""
        if self.rows is None:
            return table.sum(0, dtype=torch.float64, keepdim=True).to(table.dtype)
        return torch.nn.functional.embedding_bag(self.rows, table, mode="sum")

    def row_gram(self) -> Float[Tensor, "b k k"]:
        """The lower triangle of ``XXᵀ`` in the states' dtype; what is above may be unset."""
        if self.rows is None or self.table.gram is None:
            return self.inputs @ self.inputs.mT
        return self.table.gram.lower(self.rows, self.table.unit)

    def anchor_products(self) -> Float[Tensor, "b k a"]:
        """``X x`` at the anchors, in the states' dtype."""
        if self.rows is None or self.anchors.shape[1] != 1:
            return self.inputs @ self.anchors.mT
        return rows_times_points(self.table.inputs, self.rows, self.anchors[:, 0]).unsqueeze(2)

    def weighted_updates(self, weights: Float[Tensor, "b k a"]) -> Float[Tensor, "b a d"]:
        """``wᵀ D``."""
        if self.rows is None or weights.shape[2] != 1:
            return weights.mT @ self.updates
        return weighted_rows(self.table.updates, self.rows, weights[..., 0]).unsqueeze(1)

    def totals(self, numbers: Float[Tensor, " rows"]) -> Float[Tensor, " b"]:
        """The sum of one number per row over each fit's rows."""
        return numbers.sum(0, keepdim=True) if self.rows is None else numbers[self.rows].sum(1)

    @cached_property
    def inputs(self) -> Float[Tensor, "b k d"]:
        """X, the rows' inputs."""
        return self.gathered(self.table.inputs)

    @cached_property
    def updates(self) -> Float[Tensor, "b k d"]:
        """D, the rows' updates."""
        return self.gathered(self.table.updates)

    @cached_property
    def energy(self) -> Float[Tensor, " b"]:
        """``Σ_j ‖x_j‖²`` in float64."""
        return self.totals(self.table.energy) if self.shared.energy is None else self.shared.energy

    @cached_property
    def strength(self) -> Float[Tensor, " b"]:
        """``λ = ridge · (1/k) Σ_j ‖x_j‖²`` in float64."""
        return self.ridge * self.energy / self.count

    @cached_property
    def mean_update(self) -> Float[Tensor, "b d"]:
        """δ̄."""
        return self.sums(self.table.updates) / self.count

    @property
    def row_bytes(self) -> int:
        """Bytes of one state and of its rows' numbers."""
        return (self.width + self.count) * self.anchors.element_size()

    def at_unit_vectors(self) -> "FitProblem":
        """The same fits evaluated at the d unit vectors, whose images are a linear map's columns."""
        unit = torch.eye(self.width, dtype=self.dtype, device=self.anchors.device)
        return replace(self, anchors=unit.expand(self.anchors.shape[0], -1, -1), shared=Shared())

    def centered(self) -> "FitProblem":
        """The same fits with each one's mean input and mean update subtracted, from rows and anchors."""
        middle = self.inputs.mean(1, keepdim=True)
        apart = self.inputs - middle
        # Equal rows leave their own rounding, which no ridge relative to it could tell from a spread.
        rounding = (8 * torch.finfo(self.dtype).eps) ** 2 * self.energy
        spread = torch.linalg.vector_norm(apart, dim=(1, 2)).double().square() > rounding
        x = apart * spread.view(-1, 1, 1)
        d = self.updates - self.updates.mean(1, keepdim=True)
        count = x.shape[0] * x.shape[1]
        rows = torch.arange(count, dtype=torch.int32, device=x.device).view(x.shape[0], x.shape[1])
        table = Table(x.flatten(0, 1), d.flatten(0, 1))
        return replace(self, anchors=self.anchors - middle, table=table, rows=rows, shared=Shared())


@runtime_checkable
class MapFit(Protocol):
    """A batch of fitted maps."""

    def update(self) -> Float[Tensor, "b a d"]:
        """``T(x) - x`` at the anchors."""

    def subspace(self, size: int) -> Subspace:
        """The dominant right singular vectors of the rows' fitted updates ``T(x_j) - x_j``, at most ``size``."""

    def degrees_of_freedom(self) -> Float[Tensor, " b"]:
        """``(1/d) Σ_j tr ∂ŷ_j/∂y_j``, estimated by the problem's probes where there is no closed form."""

    def parameters(self) -> GlobalMap:
        """The first map of the batch, without what it was fitted on; for a global fit, the only one."""


@runtime_checkable
class TokenwiseMap(Protocol):
    """A class of tokenwise maps: its canonical name and how it is fitted."""

    @property
    def name(self) -> str:
        """The canonical string, such as ``low_rank:8``."""

    @property
    def fitted(self) -> bool:
        """Whether anything is fitted."""

    @property
    def update_rank(self) -> int | None:
        """The most dimensions that one fit's updates span by construction; None for no such bound."""

    def __str__(self) -> str:
        """The canonical string."""
        return self.name

    def spans_updates(self, subspace: int) -> bool:
        """Whether ``T(x) - x`` lies in the dominant subspace of that size by construction, so that its share is 1."""
        return self.update_rank is not None and 0 < self.update_rank <= subspace

    @property
    def fewest_rows(self) -> int:
        """The fewest rows that it can be fitted on."""
        return 1

    def require_rows(self, count: int) -> None:
        """Refuse fits on fewer rows than the map needs."""
        if count < self.fewest_rows:
            raise InputError(
                f"{self.name} needs at least {self.fewest_rows} rows to fit, but a fit has {count}; "
                "lower the rank, or raise neighbors (local fit) or the pool (global fit)"
            )

    def prepared(self, problem: FitProblem) -> FitProblem:
        """The problem with whatever its batches are to share, made before workers divide them."""
        return problem.sharing(energy=problem.energy)

    def fit(self, problem: FitProblem) -> MapFit:
        """Fit one map per problem of the batch."""

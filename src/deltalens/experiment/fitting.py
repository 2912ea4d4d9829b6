"""One layer's decompositions: protocol by protocol, map by map, with the null and the chance level of each."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.core.controls import permuted_updates
from deltalens.core.decompose import decompose_layer, decomposition_from_tokenwise
from deltalens.core.decomposition import Decomposition
from deltalens.core.geometry import Geometry, chance_geometry, measure_geometry
from deltalens.core.maps import TokenwiseMap
from deltalens.core.neighbors import Neighborhoods, find_neighborhoods
from deltalens.experiment.captured import Captured
from deltalens.experiment.spec import Protocol, RunSpec
from deltalens.experiment.states import StateShards
from deltalens.experiment.sweep import SweepPoint
from deltalens.models import Model, isolated_outputs

_PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class LayerStates:
    """Included tokens of one transition: evaluation pairs, and pool pairs where a protocol needs them."""

    layer: int
    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n d"]
    windows: Int[Tensor, " n"]
    pool_x: Float[Tensor, "p d"] | None
    pool_y: Float[Tensor, "p d"] | None

    def with_pool_of(self, part: Bool[Tensor, " p"]) -> "LayerStates":
        """The same with some of the pool's tokens."""
        if self.pool_x is None or self.pool_y is None or bool(part.all()):
            return self
        return replace(self, pool_x=self.pool_x[part], pool_y=self.pool_y[part])


def layer_states(captured: Captured, layer: int) -> LayerStates:
    """The included tokens of one transition, on the model's device and in the precision of the fits."""
    precision, device = _PRECISIONS[captured.plan.spec.precision], captured.plan.model.device
    included = captured.exclusions.included

    def chosen(shards: StateShards, tokens: Tensor) -> list[Tensor]:
        return [states[tokens].to(device, precision) for states in shards.layer(layer)]

    x, y = chosen(captured.evaluation, included)
    pool_x, pool_y = None, None
    if captured.pool is not None and captured.pool_exclusions is not None:
        pool_x, pool_y = chosen(captured.pool, captured.pool_exclusions.included)
    return LayerStates(layer, x, y, torch.nonzero(included)[:, 0], pool_x, pool_y)


@dataclass(frozen=True)
class Fit:
    """One map's decomposition of a layer with its geometry; ``null`` and ``chance`` are None where left out."""

    decomposition: Decomposition[Tensor]
    geometry: Geometry
    null: Geometry | None
    chance: Geometry | None


class ProtocolFits:
    """The fits of one layer under one protocol; neighbourhoods and Gram matrix are made once for all maps and nulls.

    A spec that sweeps stands for its first point; `at` gives another with as much as can be shared.
    """

    def __init__(
        self,
        states: LayerStates,
        protocol: Protocol,
        spec: RunSpec,
        model: Model,
        partner: Int[Tensor, " n"],
        *,
        searched: "ProtocolFits | None" = None,
    ) -> None:
        self.states = states
        self.protocol = protocol
        self.spec = spec
        self._point = spec.point
        self._model = model
        self._partner = partner
        self._searched = searched or self

    def at(self, point: SweepPoint) -> "ProtocolFits":
        """The fits at another point with the same pool and metric, in which one search for neighbours serves all."""
        return ProtocolFits(
            self.states, self.protocol, self.spec.at(point), self._model, self._partner, searched=self._searched
        )

    def fit(self, map: TokenwiseMap) -> Fit:
        """Decompose the layer with one map."""
        states = self.states
        decomposition = self._decompose(map, states.x, states.y, self._pool_y, self.neighborhoods, probes=1)
        trivial = map.spans_updates(self.spec.subspace)
        geometry = measure_geometry(states.x, states.y, decomposition, proj_tokenwise_trivial=trivial)
        if not self.spec.controls:
            return Fit(decomposition, geometry, null=None, chance=None)
        chance = chance_geometry(states.x, states.y, decomposition, self._partner)
        return Fit(decomposition, geometry, null=self._null(map, trivial), chance=chance)

    @property
    def _pool_x(self) -> Tensor:
        pool = self.states.pool_x if self.protocol == "held_out" else self.states.x
        assert pool is not None
        return pool

    @property
    def _pool_y(self) -> Tensor:
        pool = self.states.pool_y if self.protocol == "held_out" else self.states.y
        assert pool is not None
        return pool

    @cached_property
    def neighborhoods(self) -> Neighborhoods | None:
        """Each anchor's neighbours in the pool; None for a global fit."""
        found = self._searched._most_neighbors
        return None if found is None else found.nearest(self._point.neighbors)

    @cached_property
    def _most_neighbors(self) -> Neighborhoods | None:
        """As many neighbours as any point of the sweep asks for."""
        if self.spec.fit == "global":
            return None
        return find_neighborhoods(
            self.states.x,
            self._pool_x,
            neighbors=max(self.spec.values("neighbors")),
            metric=self._point.metric,
            distinct=self.spec.distinct,
            excluded=self._excluded(),
        )

    def _excluded(self) -> Int[Tensor, "n e"] | None:
        if self.protocol != "leave_one_out":
            return None
        windows = self.states.windows
        if not self.spec.exclude_window:
            return torch.arange(len(windows))[:, None]
        largest = int(torch.bincount(windows).max())
        excluded = torch.full((len(windows), largest), -1)
        for window in torch.unique(windows):
            members = torch.nonzero(windows == window)[:, 0]
            excluded[members, : len(members)] = members
        return excluded

    def _null(self, map: TokenwiseMap, trivial: bool) -> Geometry | None:
        """The same fit on updates permuted over the pool; where that is the evaluation, so is the update judged."""
        if map.name == "isolated":
            return None
        states, spec = self.states, self.spec
        included = torch.ones(len(self._pool_x), dtype=torch.bool)
        shuffled = self._pool_x + permuted_updates(self._pool_y - self._pool_x, included, spec.seed)
        judged = (states.y if self.protocol == "held_out" else shuffled)[self._null_rows]
        x = states.x[self._null_rows]
        decomposition = self._decompose(map, x, judged, shuffled, self._null_neighborhoods, probes=0)
        return measure_geometry(x, judged, decomposition, proj_tokenwise_trivial=trivial)

    @cached_property
    def _null_rows(self) -> Int[Tensor, " rows"]:
        """A seeded sample of the anchors: a median needs no more, and a null's fits cost as much as real ones."""
        generator = torch.Generator().manual_seed(self.spec.seed)
        order = torch.randperm(len(self.states.x), generator=generator)
        return order[: self.spec.null_tokens].sort().values.to(self.states.x.device)

    @cached_property
    def _null_neighborhoods(self) -> Neighborhoods | None:
        return None if self.neighborhoods is None else self.neighborhoods.of(self._null_rows)

    def _decompose(
        self, map: TokenwiseMap, x: Tensor, y: Tensor, pool_y: Tensor, found: Neighborhoods | None, *, probes: int
    ) -> Decomposition[Tensor]:
        spec = self.spec
        if map.name == "isolated":
            updates = self._searched._isolated_pool_updates
            return decomposition_from_tokenwise(x, y, self._isolated(x), updates, found, subspace=spec.subspace)
        return decompose_layer(
            x,
            y,
            self._pool_x,
            pool_y,
            found,
            map,
            ridge=self._point.ridge,
            subspace=spec.subspace,
            fit=spec.fit,
            seed=spec.seed,
            probes=probes,
        )

    @cached_property
    def _isolated_pool_updates(self) -> Tensor:
        return self._isolated(self._pool_x) - self._pool_x

    def _isolated(self, x: Tensor) -> Tensor:
        return isolated_outputs(self._model, self.states.layer, x).to(x.dtype)

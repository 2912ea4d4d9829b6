"""One layer's decompositions: protocol by protocol, map by map, with the null and the chance level of each."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.core.controls import permuted_updates
from deltalens.core.decompose import Decomposition, decompose_layer, decomposition_from_tokenwise
from deltalens.core.geometry import Geometry, chance_geometry, measure_geometry
from deltalens.core.maps import TokenwiseMap
from deltalens.core.neighbors import Neighborhoods, find_neighborhoods
from deltalens.experiment.spec import Protocol, RunSpec
from deltalens.models import Model, isolated_outputs


@dataclass(frozen=True)
class LayerStates:
    """Included tokens of one transition: evaluation pairs, and pool pairs where a protocol needs them."""

    layer: int
    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n d"]
    windows: Int[Tensor, " n"]
    pool_x: Float[Tensor, "p d"] | None
    pool_y: Float[Tensor, "p d"] | None


@dataclass(frozen=True)
class Fit:
    """One map's decomposition of a layer with its geometry; ``null`` and ``chance`` are None where left out."""

    decomposition: Decomposition[Tensor]
    geometry: Geometry
    null: Geometry | None
    chance: Geometry | None


class ProtocolFits:
    """The fits of one layer under one protocol; neighbourhoods and Gram matrix are made once for all maps and nulls."""

    def __init__(
        self, states: LayerStates, protocol: Protocol, spec: RunSpec, model: Model, partner: Int[Tensor, " n"]
    ) -> None:
        self.states = states
        self.protocol = protocol
        self.spec = spec
        self._model = model
        self._partner = partner

    def fit(self, map: TokenwiseMap) -> Fit:
        """Decompose the layer with one map."""
        states = self.states
        decomposition = self._decompose(map, states.y, self._pool_y)
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
        if self.spec.fit == "global":
            return None
        return find_neighborhoods(
            self.states.x,
            self._pool_x,
            neighbors=self.spec.neighbors,
            metric=self.spec.metric,
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
        states = self.states
        included = torch.ones(len(self._pool_x), dtype=torch.bool)
        shuffled = self._pool_x + permuted_updates(self._pool_y - self._pool_x, included, self.spec.seed)
        judged = states.y if self.protocol == "held_out" else shuffled
        decomposition = self._decompose(map, judged, shuffled)
        return measure_geometry(states.x, judged, decomposition, proj_tokenwise_trivial=trivial)

    def _decompose(self, map: TokenwiseMap, y: Tensor, pool_y: Tensor) -> Decomposition[Tensor]:
        spec, states = self.spec, self.states
        if map.name == "isolated":
            return decomposition_from_tokenwise(
                states.x,
                y,
                self._isolated(states.x),
                self._isolated_pool_updates,
                self.neighborhoods,
                subspace=spec.subspace,
            )
        return decompose_layer(
            states.x,
            y,
            self._pool_x,
            pool_y,
            self.neighborhoods,
            map,
            ridge=spec.ridge,
            subspace=spec.subspace,
            fit=spec.fit,
            seed=spec.seed,
        )

    @cached_property
    def _isolated_pool_updates(self) -> Tensor:
        return self._isolated(self._pool_x) - self._pool_x

    def _isolated(self, x: Tensor) -> Tensor:
        return isolated_outputs(self._model, self.states.layer, x).to(x.dtype)

"""One layer's decompositions: protocol by protocol, map by map, with the null and the chance level of each."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.core.controls import permuted_updates
from deltalens.core.decompose import decompose_layer, decomposition_from_tokenwise, probed_anchors
from deltalens.core.decomposition import Decomposition
from deltalens.core.geometry import Geometry, chance_geometry, measure_geometry
from deltalens.core.maps import TokenwiseMap
from deltalens.core.neighbors import Neighborhoods, PoolIndex
from deltalens.experiment.captured import Captured
from deltalens.experiment.spec import Protocol, RunSpec
from deltalens.experiment.states import StateShards
from deltalens.experiment.sweep import SweepPoint
from deltalens.models import Model, isolated_outputs

_PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Pairs:
    """Inputs and outputs of one transition at some tokens."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n d"]

    def of(self, part: Bool[Tensor, " n"]) -> "Pairs":
        """Some of them."""
        return self if bool(part.all()) else Pairs(self.x[part], self.y[part])


@dataclass(frozen=True)
class Anchors:
    """Included evaluation tokens of one transition that are decomposed together.

    Attributes:
        pairs: their states.
        numbers: which of all included evaluation tokens they are.
        windows: the window of each.
        partner: for each the place, among these, of a token of another window; -1 for none.
    """

    pairs: Pairs
    numbers: Int[Tensor, " n"]
    windows: Int[Tensor, " n"]
    partner: Int[Tensor, " n"]


@dataclass(frozen=True)
class LayerStates:
    """Included tokens of one transition: evaluation pairs, and pool pairs where a protocol needs them."""

    layer: int
    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n d"]
    windows: Int[Tensor, " n"]
    pool_x: Float[Tensor, "p d"] | None
    pool_y: Float[Tensor, "p d"] | None

    def pool(self, protocol: Protocol) -> Pairs:
        """What a protocol's maps are fitted on."""
        if protocol != "held_out":
            return Pairs(self.x, self.y)
        assert self.pool_x is not None
        assert self.pool_y is not None
        return Pairs(self.pool_x, self.pool_y)


def layer_states(captured: Captured, layer: int) -> LayerStates:
    """The included tokens of one transition, on the model's device and in the precision of the fits."""
    own = evaluation_pairs(captured, layer, captured.exclusions.included)
    pool = None if captured.pool is None else pool_pairs(captured, layer, "held_out")
    windows = torch.nonzero(captured.exclusions.included)[:, 0]
    if pool is None:
        return LayerStates(layer, own.x, own.y, windows, None, None)
    return LayerStates(layer, own.x, own.y, windows, pool.x, pool.y)


def evaluation_pairs(captured: Captured, layer: int, tokens: Bool[Tensor, "windows length"]) -> Pairs:
    """Some evaluation tokens of one transition; only their shards are read."""
    return _pairs(captured, captured.evaluation, layer, tokens)


def pool_pairs(captured: Captured, layer: int, protocol: Protocol) -> Pairs:
    """What a protocol's maps are fitted on."""
    if protocol == "held_out":
        assert captured.pool is not None
        assert captured.pool_exclusions is not None
        return _pairs(captured, captured.pool, layer, captured.pool_exclusions.included)
    return evaluation_pairs(captured, layer, captured.exclusions.included)


def _pairs(captured: Captured, shards: StateShards, layer: int, tokens: Bool[Tensor, "windows length"]) -> Pairs:
    plan = captured.plan
    return Pairs(*shards.pairs(layer, tokens, plan.model.device, _PRECISIONS[plan.spec.precision]))


@dataclass(frozen=True)
class Fit:
    """One map's decomposition of some anchors with its geometry; ``null`` and ``chance`` are None where left out."""

    decomposition: Decomposition[Tensor]
    geometry: Geometry
    null: Geometry | None
    chance: Geometry | None


class PoolFits:
    """What the fits of one layer under one protocol share, whichever tokens they are made for.

    Args:
        layer: the transition.
        protocol: where maps are fitted and judged.
        pool: the pairs that maps are fitted on.
        windows: the window of each included evaluation token.
        spec: the run; where it sweeps what is searched for, at one metric.
        model: the model, for the map that runs its blocks.
    """

    def __init__(
        self, layer: int, protocol: Protocol, pool: Pairs, windows: Int[Tensor, " n"], spec: RunSpec, model: Model
    ) -> None:
        self.layer, self.protocol, self.pool, self.windows = layer, protocol, pool, windows
        self.spec, self._model = spec, model

    @cached_property
    def index(self) -> PoolIndex:
        """The pool, ready to be searched; its Gram matrix serves all maps and nulls."""
        spec = self.spec
        return PoolIndex.of(self.pool.x, metric=spec.point.metric, distinct=spec.distinct, search=spec.search)

    @cached_property
    def shuffled(self) -> Float[Tensor, "p d"]:
        """Pool outputs whose updates are other tokens'."""
        x, y = self.pool.x, self.pool.y
        return x + permuted_updates(y - x, torch.ones(len(x), dtype=torch.bool), self.spec.seed)

    @cached_property
    def probed(self) -> Bool[Tensor, " n"]:
        """The tokens whose degrees of freedom are estimated where they have no closed form."""
        return probed_anchors(len(self.windows), self.spec.seed)

    @cached_property
    def isolated_updates(self) -> Float[Tensor, "p d"]:
        """What the layer alone does to each pool token."""
        return self.isolated(self.pool.x) - self.pool.x

    def isolated(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The layer run on each token alone."""
        return isolated_outputs(self._model, self.layer, x).to(x.dtype)


class AnchorFits:
    """The fits of some tokens; one search for neighbours serves all maps, and all points of a sweep that share it.

    A spec that sweeps stands for its first point; `at` gives another.
    """

    def __init__(
        self,
        shared: PoolFits,
        anchors: Anchors,
        *,
        point: SweepPoint | None = None,
        searched: "AnchorFits | None" = None,
    ) -> None:
        self._shared, self._anchors, self._spec = shared, anchors, shared.spec
        self._point = point or shared.spec.point
        self._searched = searched or self

    def at(self, point: SweepPoint) -> "AnchorFits":
        """The fits at another point with the same pool and metric."""
        return AnchorFits(self._shared, self._anchors, point=point, searched=self._searched)

    def fit(self, map: TokenwiseMap) -> Fit:
        """Decompose the tokens with one map, without the null."""
        x, y = self._anchors.pairs.x, self._anchors.pairs.y
        decomposition = self._decompose(map, y, self._shared.pool.y, probes=1)
        trivial = map.spans_updates(self._spec.subspace)
        geometry = measure_geometry(x, y, decomposition, proj_tokenwise_trivial=trivial)
        chance = chance_geometry(x, y, decomposition, self._anchors.partner) if self._spec.controls else None
        return Fit(decomposition, geometry, null=None, chance=chance)

    def null(self, map: TokenwiseMap) -> Geometry | None:
        """The same fit on updates permuted over the pool; where that is the evaluation, so is the update judged."""
        if map.name == "isolated" or not self._spec.controls:
            return None
        anchors, shuffled = self._anchors, self._shared.shuffled
        held_out = self._shared.protocol == "held_out"
        judged = anchors.pairs.y if held_out else shuffled[anchors.numbers.to(shuffled.device)]
        decomposition = self._decompose(map, judged, shuffled, probes=0)
        trivial = map.spans_updates(self._spec.subspace)
        return measure_geometry(anchors.pairs.x, judged, decomposition, proj_tokenwise_trivial=trivial)

    @cached_property
    def neighborhoods(self) -> Neighborhoods | None:
        """The tokens' neighbours in the pool; None for a global fit."""
        found = self._searched._most_neighbors
        return None if found is None else found.nearest(self._point.neighbors)

    @cached_property
    def _most_neighbors(self) -> Neighborhoods | None:
        """As many neighbours as any point of the sweep asks for."""
        if self._spec.fit == "global":
            return None
        most = max(self._spec.values("neighbors"))
        return self._shared.index.neighborhoods(self._anchors.pairs.x, neighbors=most, excluded=self._excluded())

    @property
    def recall(self) -> Float[Tensor, " n"] | None:
        """The share of a token's exact neighbours that were found, of a seeded sample; None where search is exact."""
        return self._searched._sampled_recall

    @cached_property
    def _sampled_recall(self) -> Float[Tensor, " n"] | None:
        found = self._most_neighbors
        if found is None or self._spec.search == "exact":
            return None
        shares = torch.full((len(self._anchors.numbers),), torch.nan, dtype=torch.float64)
        chosen = self._shared.probed[self._anchors.numbers].nonzero()[:, 0]
        if len(chosen):
            excluded, x = self._excluded(), self._anchors.pairs.x
            on = chosen.to(x.device)
            shares[chosen] = self._shared.index.recall(
                x[on], found.of(on), excluded=None if excluded is None else excluded[chosen]
            ).cpu()
        return shares

    def _excluded(self) -> Int[Tensor, "n e"] | None:
        if self._shared.protocol != "leave_one_out":
            return None
        anchors, windows = self._anchors, self._shared.windows
        if not self._spec.exclude_window:
            return anchors.numbers[:, None]
        largest = int(torch.bincount(windows).max())
        excluded = torch.full((len(anchors.numbers), largest), -1)
        for window in torch.unique(anchors.windows):
            members = torch.nonzero(windows == window)[:, 0]
            excluded[anchors.windows == window, : len(members)] = members
        return excluded

    def _decompose(
        self, map: TokenwiseMap, y: Float[Tensor, "n d"], pool_y: Float[Tensor, "p d"], *, probes: int
    ) -> Decomposition[Tensor]:
        spec, shared, x = self._spec, self._shared, self._anchors.pairs.x
        if map.name == "isolated":
            return decomposition_from_tokenwise(
                x, y, shared.isolated(x), shared.isolated_updates, self.neighborhoods, subspace=spec.subspace
            )
        return decompose_layer(
            x,
            y,
            shared.pool.x,
            pool_y,
            self.neighborhoods,
            map,
            ridge=self._point.ridge,
            subspace=spec.subspace,
            fit=spec.fit,
            seed=spec.seed,
            probes=probes,
            probed=shared.probed[self._anchors.numbers],
        )


class ProtocolFits:
    """The fits of one layer under one protocol, all its tokens together: for studies whose tokens fit in memory."""

    def __init__(
        self, states: LayerStates, protocol: Protocol, spec: RunSpec, model: Model, partner: Int[Tensor, " n"]
    ) -> None:
        self.states, self.protocol, self.spec = states, protocol, spec
        own = Pairs(states.x, states.y)
        shared = PoolFits(states.layer, protocol, states.pool(protocol), states.windows, spec, model)
        self._all = AnchorFits(shared, Anchors(own, torch.arange(len(own.x)), states.windows, partner))
        rows = null_sample(len(own.x), spec)
        at = rows.to(own.x.device)
        sampled = Anchors(Pairs(own.x[at], own.y[at]), rows, states.windows[rows], torch.full_like(rows, -1))
        self._sample = AnchorFits(shared, sampled)

    def fit(self, map: TokenwiseMap) -> Fit:
        """Decompose the layer with one map."""
        return replace(self._all.fit(map), null=self._sample.null(map))

    @property
    def neighborhoods(self) -> Neighborhoods | None:
        """Each anchor's neighbours in the pool; None for a global fit."""
        return self._all.neighborhoods


def null_sample(count: int, spec: RunSpec) -> Int[Tensor, " rows"]:
    """A seeded sample of the anchors: a median needs no more, and a null's fits cost as much as real ones."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(spec.seed))
    return order[: spec.null_tokens].sort().values

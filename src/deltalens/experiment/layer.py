"""One layer measured block by block of evaluation windows, committed unit by unit; what units share is made once."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.core.controls import layer_seed
from deltalens.core.geometry import Geometry
from deltalens.core.maps import RIDGE_FREE, parse_map
from deltalens.experiment.blocks import Block
from deltalens.experiment.captured import Captured
from deltalens.experiment.fitting import (
    AnchorFits,
    Anchors,
    Fit,
    PoolFits,
    evaluation_pairs,
    null_sample,
    pool_pairs,
)
from deltalens.experiment.functional import Effect, FunctionalMeter
from deltalens.experiment.gate import Gate
from deltalens.experiment.patches import control_patches, spread
from deltalens.experiment.spec import Protocol, Scope
from deltalens.experiment.store import UnitKey
from deltalens.experiment.sweep import SEARCH_FIELDS
from deltalens.experiment.token_table import effect_columns, geometry_table, measured_rows, neighbor_rows


class LayerUnits:
    """Measures and commits units, layer by layer; a context manager, since the meter keeps sessions open.

    Args:
        captured: the run's states, and what is decided once for all layers.
        gate: what was proven before.
    """

    def __init__(self, captured: Captured, gate: Gate) -> None:
        self._captured, self._gate, self._meter = captured, gate, gate.meter()

    def __enter__(self) -> "LayerUnits":
        self._meter.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._meter.__exit__()

    def commit(self, keys: Sequence[UnitKey]) -> Iterator[UnitKey]:
        """Measure units of one layer, commit each, and yield it."""
        plan, captured = self._captured.plan, self._captured
        shared, twins = _LayerFits(captured, keys[0].layer), _twins(keys)
        for together in _searched_together(captured, list(twins)):
            parts: dict[UnitKey, list[_Part]] = {key: [] for key in together}
            for block in captured.blocks:
                measure = _BlockMeasure(captured, shared, self._meter, block)
                for key in together:
                    listed = any(plan.carries_neighbors(twin) for twin in twins[key])
                    parts[key].append(measure.part(key, neighbors=listed))
                    if block is captured.blocks[-1]:  # at once: what is committed outlives a kill
                        yield from self._written(twins[key], parts.pop(key), shared.null(key))
            shared.forget()

    def _written(self, twins: Sequence[UnitKey], parts: Sequence["_Part"], null: Geometry | None) -> Iterator[UnitKey]:
        """Commit a measured unit under each of its keys."""
        plan, neighbors = self._captured.plan, _neighbor_table(parts)
        rows, summary = self._unit(parts, null)
        for twin in twins:
            carried = neighbors if plan.carries_neighbors(twin) else None
            if carried is not None:
                carried = carried.assign(**_searched(twin))
            plan.folder.write_unit(twin, plan.fingerprint, rows, summary, carried)
            yield twin

    def _unit(self, parts: Sequence["_Part"], null: Geometry | None) -> tuple[pd.DataFrame, dict[str, float]]:
        """The token rows and the summary row of one unit."""
        captured = self._captured
        measured = pd.concat([part.rows for part in parts], ignore_index=True)
        rows = pd.concat([captured.tokens, measured], axis=1)
        rows["flags"] = self._gate.flags(rows)
        chance = [part.chance for part in parts if part.chance is not None]
        summary = captured.summarizer.summarize(
            rows[captured.included_rows.numpy()],
            null=None if null is None else geometry_table(null),
            chance=pd.concat(chance, ignore_index=True) if chance else None,
        )
        return rows, summary | {"n_excluded": float(captured.tokens["excluded"].sum())}


def _twins(keys: Sequence[UnitKey]) -> dict[UnitKey, list[UnitKey]]:
    """Units whose numbers are the same, since a sweep goes through fields that they don't depend on."""
    alike: dict[object, list[UnitKey]] = {}
    for key in keys:
        idle = {"ridge"} if key.map in RIDGE_FREE else set()
        idle |= {"pool_tokens"} if key.protocol != "held_out" else set()
        alike.setdefault((key.protocol, key.map, *(p for p in key.point if p[0] not in idle)), []).append(key)
    return {units[0]: units for units in alike.values()}


def _searched_together(captured: Captured, keys: Sequence[UnitKey]) -> list[list[UnitKey]]:
    """Units by what their neighbours are searched in and how; one group's pools are held at a time."""
    groups: dict[object, list[UnitKey]] = {}
    for key in keys:
        point = captured.plan.point_of(key)
        groups.setdefault(tuple(getattr(point, name) for name in SEARCH_FIELDS), []).append(key)
    return list(groups.values())


def _searched(key: UnitKey) -> dict[str, Any]:
    return {name: value for name, value in key.point if name in SEARCH_FIELDS}


def _neighbor_table(parts: Sequence["_Part"]) -> pd.DataFrame | None:
    listed = [part.neighbors for part in parts if part.neighbors is not None]
    return pd.concat(listed, ignore_index=True) if listed else None


@dataclass(frozen=True)
class _Part:
    """What one block adds to a unit: measures per token, chance levels per included token, nearest pool tokens."""

    rows: pd.DataFrame
    chance: pd.DataFrame | None = None
    neighbors: pd.DataFrame | None = None


class _LayerFits:
    """What a layer's blocks share: pools with all that depends on them, nulls, and effects that come again."""

    def __init__(self, captured: Captured, layer: int) -> None:
        self.layer, self._captured = layer, captured
        self._pools: dict[object, PoolFits] = {}
        self._samples: dict[object, AnchorFits] = {}
        self.known: dict[object, Effect] = {}

    def forget(self) -> None:
        """Let go of the pools."""
        self._pools.clear()
        self._samples.clear()

    def pool(self, key: UnitKey) -> PoolFits:
        """The fits that share a unit's protocol and pool."""
        captured, point = self._captured, self._captured.plan.point_of(key)
        search = self._search(key)
        if search not in self._pools:
            plan, protocol = captured.plan, cast(Protocol, key.protocol)
            windows = torch.nonzero(captured.exclusions.included)[:, 0]
            pairs = pool_pairs(captured, self.layer, protocol)
            if protocol == "held_out":
                pairs = pairs.of(captured.pool_part(point.pool_tokens))
            spec = plan.spec.model_copy(update={"pool_tokens": point.pool_tokens, "metric": point.metric})
            self._pools[search] = PoolFits(self.layer, protocol, pairs, windows, spec, plan.model)
        return self._pools[search]

    def null(self, key: UnitKey) -> Geometry | None:
        """The null of one unit, on a sample of all the layer's tokens."""
        if not self._captured.plan.spec.controls:
            return None
        search = self._search(key)
        if search not in self._samples:
            self._samples[search] = AnchorFits(self.pool(key), self._sampled())
        return self._samples[search].at(self._captured.plan.point_of(key)).null(parse_map(key.map))

    def _search(self, key: UnitKey) -> object:
        point = self._captured.plan.point_of(key)
        return key.protocol, point.pool_tokens if key.protocol == "held_out" else None, point.metric

    def _sampled(self) -> Anchors:
        included = self._captured.exclusions.included
        numbers = null_sample(int(included.sum()), self._captured.plan.spec)
        at = torch.nonzero(included)[numbers]
        chosen = torch.zeros_like(included)
        chosen[at[:, 0], at[:, 1]] = True
        pairs = evaluation_pairs(self._captured, self.layer, chosen)
        return Anchors(pairs, numbers, at[:, 0], torch.full_like(numbers, -1))


class _BlockMeasure:
    """One block of evaluation windows at one layer: its states, neighbourhoods and the effect of skipping the layer."""

    def __init__(self, captured: Captured, shared: _LayerFits, meter: FunctionalMeter, block: Block) -> None:
        self._captured, self._shared, self._meter, self._block = captured, shared, meter, block
        self._real = captured.real[block.windows]
        self._included = captured.exclusions.included[block.windows]
        self._empty = not bool(self._included.any())
        if self._empty:
            return
        pairs = evaluation_pairs(captured, shared.layer, block.among(captured.exclusions.included))
        numbers = torch.arange(block.tokens.start, block.tokens.stop)
        windows = torch.nonzero(self._included)[:, 0] + block.windows.start
        self._anchors = Anchors(pairs, numbers, windows, block.partner)
        self._outputs = captured.evaluation.outputs(shared.layer, block.windows)
        self._fits: dict[PoolFits, AnchorFits] = {}

    def part(self, key: UnitKey, *, neighbors: bool) -> _Part:
        """What this block adds to one unit."""
        spec = self._captured.plan.spec
        included = self._included[self._real]
        if self._empty:
            return _Part(pd.DataFrame(index=range(len(included))))
        map, fits = parse_map(key.map), self._anchor_fits(key)
        fit = fits.fit(map)
        controls = spec.controls and key.protocol == spec.protocol[0]
        functional = self._functional(fit, controls=controls, again=not map.fitted) | self._recall(fits)
        return _Part(
            measured_rows(included, fit.geometry, fit.decomposition, functional),
            None if fit.chance is None else geometry_table(fit.chance),
            self._neighbor_rows(key, fits) if neighbors else None,
        )

    def _recall(self, fits: AnchorFits) -> dict[str, np.ndarray]:
        """The recall of an approximate search at the sampled tokens; no column where search is exact."""
        if fits.recall is None:
            return {}
        column = np.full(int(self._real.sum()), np.nan)
        column[self._included[self._real].numpy()] = fits.recall.numpy()
        return {"neighbor_recall": column}

    def _anchor_fits(self, key: UnitKey) -> AnchorFits:
        pool = self._shared.pool(key)
        if pool not in self._fits:
            self._fits[pool] = AnchorFits(pool, self._anchors)
        return self._fits[pool].at(self._captured.plan.point_of(key))

    def _neighbor_rows(self, key: UnitKey, fits: AnchorFits) -> pd.DataFrame | None:
        """The nearest pool tokens of each included token; None for a global fit, which has no neighbourhoods."""
        captured, found = self._captured, fits.neighborhoods
        if found is None:
            return None
        included = captured.tokens[~captured.tokens["excluded"]]
        others = included
        if key.protocol == "held_out":
            part = captured.pool_part(captured.plan.point_of(key).pool_tokens)
            others = captured.pool_tokens[~captured.pool_tokens["excluded"]][part.numpy()]
        own = included.iloc[self._block.tokens]
        columns = {"layer": np.int32(self._shared.layer), "protocol": key.protocol} | _searched(key)
        return neighbor_rows(own, others, found.indices, found.distances, columns)

    def _functional(self, fit: Fit, *, controls: bool, again: bool) -> dict[str, np.ndarray]:
        """What a fit's patches do; with ``again`` other units patch the same states, so that effects are kept."""
        spec = self._captured.plan.spec
        columns: dict[str, np.ndarray] = {}
        if spec.scope:
            nll = self._meter.base_nll(self._block.windows)
            columns["nll"] = torch.where(self._included, nll, torch.nan)[self._real].numpy()
        own = {"own": fit.decomposition.tokenwise}
        if "all" in spec.scope:
            columns |= effect_columns(self._effects(own, "all", again=again)["own"], self._real, "all")
        if "single" in spec.scope:
            columns |= self._single(fit, controls=controls, again=again)
        return columns

    def _single(self, fit: Fit, *, controls: bool, again: bool) -> dict[str, np.ndarray]:
        rows = self._control_patches(fit) if controls else {}
        own = {"single": fit.decomposition.tokenwise}
        effects = self._effects(own | rows, "single", again=again, kl_only=rows.keys())
        columns = effect_columns(effects.pop("single"), self._real, "single")
        if controls:
            skipped = {"kl_skip": self._anchors.pairs.x}
            effects |= self._effects(skipped, "single", again=True)
        return columns | {name: effect.divergences["kl"][self._real].numpy() for name, effect in effects.items()}

    def _control_patches(self, fit: Fit) -> dict[str, Tensor]:
        spec, anchors = self._captured.plan.spec, self._anchors
        seed = self._block.seed(layer_seed(spec.seed, self._shared.layer))
        return control_patches(anchors.pairs.x, anchors.pairs.y, fit.decomposition, anchors.partner, spec, seed)

    def _effects(
        self,
        rows: Mapping[str, Float[Tensor, "n d"]],
        scope: Scope,
        *,
        again: bool,
        kl_only: Collection[str] = (),
    ) -> dict[str, Effect]:
        """What each patch does, NaN where its state isn't finite; with ``again`` the same patch is measured once."""
        windows, known = self._block.windows, self._shared.known
        patches = {name: spread(states, self._outputs, self._included) for name, states in rows.items()}
        same = {name: (windows.start, scope, patch.digest) for name, patch in patches.items() if again}
        # An effect of which only the KL was wanted serves no one who wants all of it.
        held = {name: known[key] for name, key in same.items() if key in known}
        held = {name: effect for name, effect in held.items() if name in kl_only or not effect.kl_only}
        missing = {name: patch for name, patch in patches.items() if name not in held}
        if missing:
            states = {name: patch.states for name, patch in missing.items()}
            found = self._meter.measure(self._shared.layer, states, scope, windows, kl_only)
            held |= {name: effect.without(patches[name].undefined_in(scope)) for name, effect in found.items()}
        known.update({key: held[name] for name, key in same.items()})
        return {name: held[name] for name in patches}

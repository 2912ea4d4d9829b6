"""One layer measured and committed unit by unit; what its units share is made once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from deltalens.core.maps import RIDGE_FREE, parse_map
from deltalens.experiment.captured import Captured
from deltalens.experiment.fitting import Fit, ProtocolFits, layer_states
from deltalens.experiment.functional import Effect, FunctionalMeter
from deltalens.experiment.gate import Gate
from deltalens.experiment.patches import control_patches, spread
from deltalens.experiment.spec import Protocol, Scope
from deltalens.experiment.store import UnitKey
from deltalens.experiment.sweep import SEARCH_FIELDS
from deltalens.experiment.token_table import effect_columns, geometry_table, neighbor_rows, unit_rows

#: The token rows and the summary row of a unit.
Measured = tuple[pd.DataFrame, dict[str, float]]


class LayerUnits:
    """Measures and commits units, layer by layer; a context manager, since the meter keeps sessions open.

    Args:
        captured: the run's states, and what is decided once for all layers.
        gate: what was proven before.
    """

    def __init__(self, captured: Captured, gate: Gate) -> None:
        self._captured, self._gate, self._meter = captured, gate, gate.meter()
        self._base_nll: np.ndarray | None = None

    def __enter__(self) -> "LayerUnits":
        self._meter.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._meter.__exit__()

    def commit(self, keys: Sequence[UnitKey]) -> Iterator[UnitKey]:
        """Measure units of one layer, commit each, and yield it."""
        plan = self._captured.plan
        if plan.spec.scope and self._base_nll is None:
            self._base_nll = self._meter.base_nll()[self._captured.real].numpy()
        measure = _LayerMeasure(self._captured, self._gate, self._meter, keys[0].layer, self._base_nll)
        for key in keys:
            tokens, summary = measure.unit(key)
            neighbors = measure.neighbor_rows(key) if plan.carries_neighbors(key) else None
            plan.folder.write_unit(key, plan.fingerprint, tokens, summary, neighbors)
            yield key


class _LayerMeasure:
    """One layer's states and everything that its units share: neighbourhoods, units that a sweep can't change."""

    def __init__(
        self, captured: Captured, gate: Gate, meter: FunctionalMeter, layer: int, base_nll: np.ndarray | None
    ) -> None:
        self._captured, self._gate, self._meter, self._layer, self._base_nll = captured, gate, meter, layer, base_nll
        self._states = layer_states(captured, layer)
        self._outputs = captured.evaluation.layer(layer)[1]
        self._searched: tuple[object, ProtocolFits] | None = None
        self._repeated: dict[object, Measured] = {}
        self._known: dict[object, Effect] = {}

    def unit(self, key: UnitKey) -> Measured:
        """The token rows and the summary row of one unit."""
        twin = self._twin(key)
        if twin is None:
            return self._measured(key)
        if twin not in self._repeated:
            self._repeated = {known: made for known, made in self._repeated.items() if known[0] == key.protocol}  # type: ignore[index]
            self._repeated[twin] = self._measured(key)
        return self._repeated[twin]

    def _twin(self, key: UnitKey) -> tuple[object, ...] | None:
        """What a unit's numbers depend on where a sweep has other units with the same ones; None elsewhere."""
        swept = {name for name, _ in key.point}
        idle = (swept & {"ridge"} if key.map in RIDGE_FREE else set()) | (
            swept & {"pool_tokens"} if key.protocol != "held_out" else set()
        )
        return (key.protocol, key.map, *(part for part in key.point if part[0] not in idle)) if idle else None

    def _measured(self, key: UnitKey) -> Measured:
        captured = self._captured
        map = parse_map(key.map)
        fit = self._point_fits(key).fit(map)
        controls = captured.plan.spec.controls and key.protocol == captured.plan.spec.protocol[0]
        functional = self._functional(fit, controls=controls, again=not map.fitted)
        rows = unit_rows(captured.tokens, captured.included_rows, fit.geometry, fit.decomposition, functional)
        rows["flags"] = self._gate.flags(rows)
        summary = captured.summarizer.summarize(
            rows[captured.included_rows.numpy()],
            null=None if fit.null is None else geometry_table(fit.null),
            chance=None if fit.chance is None else geometry_table(fit.chance),
        )
        return rows, summary | {"n_excluded": float(captured.tokens["excluded"].sum())}

    def neighbor_rows(self, key: UnitKey) -> pd.DataFrame | None:
        """The nearest pool tokens of each included token; None for a global fit, which has no neighbourhoods."""
        captured = self._captured
        neighborhoods = self._point_fits(key).neighborhoods
        if neighborhoods is None:
            return None
        own = captured.tokens[captured.included_rows.numpy()]
        others = captured.tokens[~captured.tokens["excluded"]]
        if key.protocol == "held_out":
            part = captured.pool_part(captured.plan.point_of(key).pool_tokens)
            others = captured.pool_tokens[~captured.pool_tokens["excluded"]][part.numpy()]
        searched = {name: value for name, value in key.point if name in SEARCH_FIELDS}
        columns = {"layer": np.int32(self._layer), "protocol": key.protocol} | searched
        return neighbor_rows(own, others, neighborhoods.indices, neighborhoods.distances, columns)

    def _point_fits(self, key: UnitKey) -> ProtocolFits:
        captured, point = self._captured, self._captured.plan.point_of(key)
        pool = point.pool_tokens if key.protocol == "held_out" else None
        search = (key.protocol, pool, point.metric)
        if self._searched is None or self._searched[0] != search:
            spec = captured.plan.spec.model_copy(update={"pool_tokens": point.pool_tokens, "metric": point.metric})
            states = self._states if pool is None else self._states.with_pool_of(captured.pool_part(pool))
            protocol = cast(Protocol, key.protocol)
            fits = ProtocolFits(states, protocol, spec, captured.plan.model, captured.partner)
            self._searched = search, fits  # one at a time, since each holds a Gram matrix
        return self._searched[1].at(point)

    def _functional(self, fit: Fit, *, controls: bool, again: bool) -> dict[str, np.ndarray]:
        """What a fit's patches do; with ``again`` other units patch the same states, so that effects are kept."""
        spec, real = self._captured.plan.spec, self._captured.real
        columns: dict[str, np.ndarray] = {}
        if self._base_nll is not None:
            columns["nll"] = np.where(self._captured.included_rows.numpy(), self._base_nll, np.nan)
        own = {"own": fit.decomposition.tokenwise}
        if "all" in spec.scope:
            columns |= effect_columns(self._effects(own, "all", again=again)["own"], real, "all")
        if "single" in spec.scope:
            columns |= self._single(fit, controls=controls, again=again)
        return columns

    def _single(self, fit: Fit, *, controls: bool, again: bool) -> dict[str, np.ndarray]:
        captured = self._captured
        rows: dict[str, Tensor] = {}
        if controls:
            rows = control_patches(
                self._states.x, self._states.y, fit.decomposition, captured.partner, captured.plan.spec, self._layer
            )
        effects = self._effects({"single": fit.decomposition.tokenwise} | rows, "single", again=again)
        columns = effect_columns(effects.pop("single"), captured.real, "single")
        columns |= {name: self._kl(effect) for name, effect in effects.items()}
        if controls:
            columns["kl_skip"] = self._kl(self._effects({"skip": self._states.x}, "single", again=True)["skip"])
        return columns

    def _effects(self, rows: Mapping[str, Float[Tensor, "n d"]], scope: Scope, *, again: bool) -> dict[str, Effect]:
        """What each patch does, NaN where its state isn't finite; with ``again`` the same patch is measured once."""
        included = self._captured.exclusions.included
        patches = {name: spread(states, self._outputs, included) for name, states in rows.items()}
        same = {name: (scope, patch.digest) for name, patch in patches.items()} if again else {}
        missing = {name: patch for name, patch in patches.items() if same.get(name) not in self._known}
        found = {}
        if missing:
            found = self._meter.measure(self._layer, {name: patch.states for name, patch in missing.items()}, scope)
        found = {name: effect.without(patches[name].undefined_in(scope)) for name, effect in found.items()}
        self._known |= {same[name]: effect for name, effect in found.items() if name in same}
        return {name: found[name] if name in found else self._known[same[name]] for name in patches}

    def _kl(self, effect: Effect) -> np.ndarray:
        return effect.divergences["kl"][self._captured.real].numpy()

"""One layer measured and committed unit by unit; what its units share is made once."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from deltalens.core.maps import parse_map
from deltalens.experiment.captured import Captured
from deltalens.experiment.fitting import Fit, ProtocolFits, layer_states
from deltalens.experiment.functional import Effect, FunctionalMeter
from deltalens.experiment.gate import Gate
from deltalens.experiment.patches import control_patches, spread
from deltalens.experiment.spec import Protocol, Scope
from deltalens.experiment.store import UnitKey
from deltalens.experiment.token_table import effect_columns, geometry_table, neighbor_rows, unit_rows


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
            tokens, summary = measure.unit(key.protocol, key.map)  # type: ignore[arg-type]
            neighbors = measure.neighbor_rows(key.protocol) if key.map == plan.spec.maps[0] else None  # type: ignore[arg-type]
            plan.folder.write_unit(key, plan.fingerprint, tokens, summary, neighbors)
            yield key


class _LayerMeasure:
    """One layer's states and everything that its units share: neighbourhoods, the effect of skipping the layer."""

    def __init__(
        self, captured: Captured, gate: Gate, meter: FunctionalMeter, layer: int, base_nll: np.ndarray | None
    ) -> None:
        self._captured, self._gate, self._meter, self._layer, self._base_nll = captured, gate, meter, layer, base_nll
        self._states = layer_states(captured, layer)
        self._outputs = captured.evaluation.layer(layer)[1]
        self._fits: dict[Protocol, ProtocolFits] = {}
        self._skip: Effect | None = None

    def unit(self, protocol: Protocol, map: str) -> tuple[pd.DataFrame, dict[str, float]]:
        """The token rows and the summary row of one unit."""
        captured = self._captured
        fit = self._protocol_fits(protocol).fit(parse_map(map))
        functional = self._functional(fit, first=protocol == captured.plan.spec.protocol[0])
        rows = unit_rows(captured.tokens, captured.included_rows, fit.geometry, fit.decomposition, functional)
        rows["flags"] = self._gate.flags(rows)
        summary = captured.summarizer.summarize(
            rows[captured.included_rows.numpy()],
            null=None if fit.null is None else geometry_table(fit.null),
            chance=None if fit.chance is None else geometry_table(fit.chance),
        )
        return rows, summary | {"n_excluded": float(captured.tokens["excluded"].sum())}

    def neighbor_rows(self, protocol: Protocol) -> pd.DataFrame | None:
        """The nearest pool tokens of each included token; None for a global fit, which has no neighbourhoods."""
        captured = self._captured
        neighborhoods = self._protocol_fits(protocol).neighborhoods
        if neighborhoods is None:
            return None
        own = captured.tokens[captured.included_rows.numpy()]
        table = captured.pool_tokens if protocol == "held_out" else captured.tokens
        others = table[~table["excluded"]]
        return neighbor_rows(own, others, neighborhoods.indices, neighborhoods.distances, self._layer, protocol)

    def _protocol_fits(self, protocol: Protocol) -> ProtocolFits:
        if protocol not in self._fits:
            captured = self._captured
            self._fits = {  # one protocol's neighbourhoods at a time, since each holds a Gram matrix
                protocol: ProtocolFits(
                    self._states, protocol, captured.plan.spec, captured.plan.model, captured.partner
                )
            }
        return self._fits[protocol]

    def _functional(self, fit: Fit, *, first: bool) -> dict[str, np.ndarray]:
        spec, real = self._captured.plan.spec, self._captured.real
        columns: dict[str, np.ndarray] = {}
        if self._base_nll is not None:
            columns["nll"] = np.where(self._captured.included_rows.numpy(), self._base_nll, np.nan)
        own = {"own": fit.decomposition.tokenwise}
        if "all" in spec.scope:
            columns |= effect_columns(self._effects(own, "all")["own"], real, "all")
        if "single" in spec.scope:
            columns |= self._single(fit, controls=spec.controls and first)
        return columns

    def _single(self, fit: Fit, *, controls: bool) -> dict[str, np.ndarray]:
        captured = self._captured
        rows: dict[str, Tensor] = {}
        if controls:
            rows = control_patches(
                self._states.x, self._states.y, fit.decomposition, captured.partner, captured.plan.spec, self._layer
            )
        effects = self._effects({"single": fit.decomposition.tokenwise} | rows, "single")
        columns = effect_columns(effects.pop("single"), captured.real, "single")
        columns |= {name: self._kl(effect) for name, effect in effects.items()}
        if controls:
            columns["kl_skip"] = self._kl(self._skip_effect())
        return columns

    def _skip_effect(self) -> Effect:
        if self._skip is None:
            self._skip = self._effects({"skip": self._states.x}, "single")["skip"]
        return self._skip

    def _effects(self, rows: Mapping[str, Float[Tensor, "n d"]], scope: Scope) -> dict[str, Effect]:
        """What each patch does, NaN where its state isn't finite."""
        included = self._captured.exclusions.included
        patches = {name: spread(states, self._outputs, included) for name, states in rows.items()}
        found = self._meter.measure(self._layer, {name: patch.states for name, patch in patches.items()}, scope)
        return {name: effect.without(patches[name].undefined_in(scope)) for name, effect in found.items()}

    def _kl(self, effect: Effect) -> np.ndarray:
        return effect.divergences["kl"][self._captured.real].numpy()

"""A run from plan to finished folder: check, capture, exclude, then fit, measure and commit unit by unit."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.core.maps import parse_map
from deltalens.experiment.captured import Captured, capture_states
from deltalens.experiment.fitting import Fit, ProtocolFits, layer_states
from deltalens.experiment.functional import Effect, FunctionalMeter
from deltalens.experiment.gate import Gate, open_gate
from deltalens.experiment.manifest import finished_manifest, started_manifest
from deltalens.experiment.patches import control_patches, spread
from deltalens.experiment.plan import Plan
from deltalens.experiment.progress import Progress
from deltalens.experiment.spec import Protocol
from deltalens.experiment.store import StoredRun, UnitKey
from deltalens.experiment.token_table import effect_columns, geometry_table, neighbor_rows, unit_rows


def execute(plan: Plan, progress: Progress) -> StoredRun:
    """Do what a plan says, or the part of it that isn't committed yet; return the finished run."""
    folder = plan.folder
    with folder.locked(), folder.left_empty_on_refusal():
        manifest = started_manifest(plan)
        folder.write_manifest(manifest)
        captured = capture_states(plan, progress)
        gate = open_gate(plan, captured.exclusions.included, progress)
        missing = [key for key in plan.keys if not folder.has_unit(key, plan.fingerprint)]
        _measure_units(captured, gate, missing, progress)
        folder.write_table("pool", captured.pool_tokens)
        tables = folder.merge_units(plan.keys)
        folder.write_manifest(finished_manifest(manifest, captured, gate, tables))
        if not plan.spec.keep_states:
            folder.drop_states()
    return StoredRun(folder.folder)


def _measure_units(captured: Captured, gate: Gate, missing: list[UnitKey], progress: Progress) -> None:
    plan = captured.plan
    with progress.step("fit and measure", len(missing)) as advance, gate.meter() as meter:
        base_nll = meter.base_nll()[captured.real].numpy() if plan.spec.scope and missing else None
        for layer in sorted({key.layer for key in missing}):
            measure = _LayerMeasure(captured, gate, meter, layer, base_nll)
            for key in (key for key in missing if key.layer == layer):
                tokens, summary = measure.unit(key.protocol, key.map)  # type: ignore[arg-type]
                neighbors = measure.neighbor_rows(key.protocol) if key.map == plan.spec.maps[0] else None  # type: ignore[arg-type]
                plan.folder.write_unit(key, plan.fingerprint, tokens, summary, neighbors)
                advance(1)


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
        replaced = {"own": self._spread(fit.decomposition.tokenwise)}
        if "all" in spec.scope:
            effect = self._meter.measure(self._layer, replaced, "all")["own"]
            columns |= effect_columns(effect, real, "all")
        if "single" in spec.scope:
            columns |= self._single(fit, replaced["own"], controls=spec.controls and first)
        return columns

    def _single(self, fit: Fit, replaced: Tensor, *, controls: bool) -> dict[str, np.ndarray]:
        captured = self._captured
        rows: dict[str, Tensor] = {}
        if controls:
            rows = control_patches(
                self._states.x, self._states.y, fit.decomposition, captured.partner, captured.plan.spec
            )
        patches = {"single": replaced} | {name: self._spread(states) for name, states in rows.items()}
        effects = self._meter.measure(self._layer, patches, "single")
        columns = effect_columns(effects.pop("single"), captured.real, "single")
        undefined = {name: ~torch.isfinite(states).all(dim=-1) for name, states in rows.items()}
        columns |= {name: self._kl(effect, undefined[name]) for name, effect in effects.items()}
        if controls:
            columns["kl_skip"] = self._kl(self._skip_effect(), None)
        return columns

    def _skip_effect(self) -> Effect:
        if self._skip is None:
            self._skip = self._meter.measure(self._layer, {"skip": self._spread(self._states.x)}, "single")["skip"]
        return self._skip

    def _spread(self, rows: Float[Tensor, "n d"]) -> Tensor:
        return spread(rows, self._outputs, self._captured.exclusions.included)

    def _kl(self, effect: Effect, undefined: Tensor | None) -> np.ndarray:
        values = effect.divergences["kl"].clone()
        if undefined is not None:
            included = self._captured.exclusions.included
            values[included] = torch.where(undefined.cpu(), torch.nan, values[included])
        return values[self._captured.real].numpy()

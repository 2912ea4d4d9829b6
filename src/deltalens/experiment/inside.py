"""Inside the residual: its spectrum, which sub-layer it comes from, what tokens share, what its two parts do."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.core.decomposition import Decomposition
from deltalens.core.geometry import chance_geometry, split_residual
from deltalens.core.maps import parse_map
from deltalens.core.residual_structure import (
    explained_share,
    permuted_coordinates,
    shared_directions,
    spectrum,
    squared_cosines,
)
from deltalens.errors import InputError
from deltalens.experiment.fitting import Fit, LayerStates
from deltalens.experiment.functional import FunctionalMeter
from deltalens.experiment.local_jacobians import LocalMaps, local_maps, sampled_tokens
from deltalens.experiment.patches import spread
from deltalens.experiment.progress import Progress
from deltalens.experiment.spec import Protocol
from deltalens.experiment.sublayer_states import SublayerStates, sublayer_states
from deltalens.experiment.workbench import Workbench

#: Directions of a spectrum that are kept.
SPECTRUM_KEPT = 64
ISOLATED = "isolated"


@dataclass(frozen=True)
class InsideTables:
    """What a look inside the residual found.

    Attributes:
        layers: one row per layer × map × fit × protocol.
        tokens: one row per included token and such a key.
        spectra: share of each leading direction, one row per key and ``rank``.
        local_maps: the layer's own local map beside the fitted one, one row per layer × protocol × sampled token.
        notes: what couldn't be measured, and why, one line each.
    """

    layers: pd.DataFrame
    tokens: pd.DataFrame
    spectra: pd.DataFrame
    local_maps: pd.DataFrame
    notes: tuple[str, ...]


def look_inside(bench: Workbench, progress: Progress, *, jacobian_tokens: int) -> InsideTables:
    """Measure every layer, map and protocol of a workbench's spec."""
    if jacobian_tokens < 0:
        raise InputError(f"jacobian_tokens is {jacobian_tokens}; give 0 for none, or how many tokens to look at")
    spec, layers = bench.plan.spec, bench.plan.layers
    found = _Found()
    chosen = sampled_tokens(int(bench.captured.included_rows.sum()), jacobian_tokens, spec.seed)
    with progress.step("look inside", len(layers) * len(spec.protocol)) as advance, bench.meter() as meter:
        for layer in layers:
            states = bench.states(layer)
            parts = sublayer_states(bench, states)
            found.note(parts.note)
            for protocol in spec.protocol:
                _LayerInside(bench, meter, states, parts, protocol).measure(found, chosen)
                advance(1)
    return found.tables()


@dataclass
class _Found:
    """Rows as they come in."""

    layers: list[dict[str, object]] = field(default_factory=list)
    tokens: list[pd.DataFrame] = field(default_factory=list)
    spectra: list[pd.DataFrame] = field(default_factory=list)
    local_maps: list[pd.DataFrame] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str | None) -> None:
        if text is not None and text not in self.notes:
            self.notes.append(text)

    def tables(self) -> InsideTables:
        def joined(parts: list[pd.DataFrame]) -> pd.DataFrame:
            kept = [part for part in parts if len(part)]
            return pd.concat(kept, ignore_index=True) if kept else pd.DataFrame()

        return InsideTables(
            pd.DataFrame(self.layers), joined(self.tokens), joined(self.spectra), joined(self.local_maps),
            tuple(self.notes),
        )  # fmt: skip


class _LayerInside:
    """One layer under one protocol."""

    def __init__(
        self,
        bench: Workbench,
        meter: FunctionalMeter,
        states: LayerStates,
        parts: SublayerStates,
        protocol: Protocol,
    ) -> None:
        self._bench, self._meter, self._states, self._parts = bench, meter, states, parts
        self._protocol: Protocol = protocol
        self._fits = bench.fits(states, protocol)
        self._alone = (
            None
            if parts.own is None
            else {part: bench.fits(parts.alone(states, part), protocol) for part in ("mixer", "mlp")}
        )
        self._context = self._fits.fit(parse_map(ISOLATED)).decomposition.residual

    def measure(self, found: _Found, chosen: Tensor) -> None:
        """All maps, then the local maps."""
        for name in self._bench.plan.spec.maps:
            fit = self._fits.fit(parse_map(name))
            key = {"layer": self._states.layer, "map": name, "fit": self._bench.plan.spec.fit}
            key |= {"protocol": self._protocol}
            tokens = self._tokens(fit)
            found.layers.append(key | self._layer_row(name, fit, tokens))
            found.tokens.append(_keyed(key, tokens))
            shares = spectrum(fit.decomposition.residual).shares[:SPECTRUM_KEPT].numpy()
            found.spectra.append(_keyed(key, pd.DataFrame({"rank": np.arange(len(shares)) + 1, "share": shares})))
        if len(chosen):
            compared: LocalMaps = local_maps(self._bench, self._states, self._protocol, self._fits, chosen)
            found.note(compared.note)
            key = {"layer": self._states.layer, "protocol": self._protocol}
            found.local_maps.append(_keyed(key, compared.rows))

    def _layer_row(self, name: str, fit: Fit, tokens: pd.DataFrame) -> dict[str, object]:
        residual = fit.decomposition.residual
        row: dict[str, object] = {
            "kind": self._bench.plan.model.block_kinds[self._states.layer],
            "n": len(residual),
            "relative_update_error": _median(fit.geometry.relative_update_error),
        }
        row |= self._structure(fit.decomposition)
        row |= self._subspace(fit, tokens)
        row |= self._attribution(name, residual)
        row |= {
            "context_size": float(np.nanmedian(tokens["context_norm"] / tokens["update_norm"])),
            "context_average": _less(residual, self._context),
        }
        return row

    def _structure(self, decomposition: Decomposition[Tensor]) -> dict[str, float]:
        spec, windows = self._bench.plan.spec, self._states.windows.to(decomposition.residual.device)
        residual, update = decomposition.residual, decomposition.update
        own = spectrum(residual)
        shared = shared_directions(residual, windows)
        null = shared_directions(permuted_coordinates(residual, spec.seed), windows)
        return {
            "effective_rank": own.effective_rank,
            "effective_rank_update": spectrum(update).effective_rank,
            "effective_rank_random": _random_rank(len(residual), residual.shape[1], spec.seed),
            "participation": own.participation,
            "share_top_1": own.leading(1),
            "share_top_8": own.leading(8),
            "shared_cosine": shared.mean_cosine,
            "shared_cosine_update": shared_directions(update, windows).mean_cosine,
            "shared_cosine_squared": shared.mean_squared_cosine,
            "shared_cosine_squared_null": null.mean_squared_cosine,
        }

    def _subspace(self, fit: Fit, tokens: pd.DataFrame) -> dict[str, float]:
        """How much of the residual lies in the local tokenwise subspace, and what that part does."""
        inside, _ = split_residual(fit.decomposition)
        partner = self._bench.captured.partner.to(inside.device)
        chance = chance_geometry(self._states.x, self._states.y, fit.decomposition, partner)
        row = {
            "proj_residual": _median(fit.geometry.proj_residual),
            "proj_residual_chance": _median(chance.proj_residual),
            "energy_in": 1 - _less(inside, fit.decomposition.residual),
        }
        bootstrap = self._bench.captured.summarizer.bootstrap
        for name in (name for name in ("kl_single", "kl_in", "kl_out") if name in tokens):
            low, high = bootstrap.median(tokens[name])
            row |= {name: float(np.nanmedian(tokens[name])), f"{name}_lo": low, f"{name}_hi": high}
        if "kl_single" in tokens:
            whole = tokens["kl_single"].sum()
            row |= {
                f"recovered_{part}": float(1 - tokens[f"kl_{part}"].sum() / whole) if whole > 0 else float("nan")
                for part in ("in", "out")
            }
        return row

    def _attribution(self, name: str, residual: Tensor) -> dict[str, float]:
        """The share of the residuals' energy that mixer and MLP account for, each under the same map on its own."""
        undefined = float("nan")
        row = {"sum_error": self._parts.sum_error}
        own = self._parts.own
        update = self._states.y - self._states.x
        row |= {
            f"update_{part}": undefined if own is None else explained_share(update, getattr(own, part))
            for part in ("mixer", "mlp")
        }
        explained = {
            part: undefined if rest is None else explained_share(residual, rest)
            for part, rest in self._residuals_alone(name).items()
        }
        row |= {f"explained_{part}": share for part, share in explained.items()}
        return row | {"explained_rest": 1 - sum(explained.values())}

    def _residuals_alone(self, name: str) -> Mapping[str, Float[Tensor, "n d"] | None]:
        """What the map leaves of the mixer's part alone, and of the MLP's alone."""
        if self._alone is None or name == ISOLATED:
            return {"mixer": None, "mlp": None}
        return {part: fits.fit(parse_map(name)).decomposition.residual for part, fits in self._alone.items()}

    def _tokens(self, fit: Fit) -> pd.DataFrame:
        captured = self._bench.captured
        own = captured.tokens[captured.included_rows.numpy()]
        rows = own[["window", "position", "document", "token_id", "token"]].reset_index(drop=True)
        measures: dict[str, Tensor] = {
            "update_norm": fit.geometry.update_norm,
            "residual_norm": fit.geometry.residual_norm,
            "context_norm": self._context.double().norm(dim=1),
            "proj_residual": fit.geometry.proj_residual,
        }
        parts = self._parts.own
        if parts is not None:
            measures["cos2_mixer"] = squared_cosines(fit.decomposition.residual, parts.mixer)
            measures["cos2_mlp"] = squared_cosines(fit.decomposition.residual, parts.mlp)
        return rows.assign(**{name: values.cpu().numpy() for name, values in (measures | self._effects(fit)).items()})

    def _effects(self, fit: Fit) -> dict[str, Tensor]:
        """KL of the patches ``T(x)``, ``T(x) + r_in`` and ``T(x) + r_out``, each at its own position alone."""
        if "single" not in self._bench.plan.spec.scope:
            return {}
        captured, tokenwise = self._bench.captured, fit.decomposition.tokenwise
        inside, outside = split_residual(fit.decomposition)
        patches = {"kl_single": tokenwise, "kl_in": tokenwise + inside, "kl_out": tokenwise + outside}
        included, outputs = captured.exclusions.included, captured.evaluation.layer(self._states.layer)[1]
        placed = {name: spread(rows, outputs, included) for name, rows in patches.items()}
        states = {name: patch.states for name, patch in placed.items()}
        effects = self._meter.measure(self._states.layer, states, "single")
        found = {name: effect.without(placed[name].undefined) for name, effect in effects.items()}
        return {name: effect.divergences["kl"][included] for name, effect in found.items()}


def _keyed(key: Mapping[str, object], table: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([pd.DataFrame([key] * len(table), index=table.index), table], axis=1)


def _median(values: Tensor) -> float:
    """The middle of two where their number is even, as in a run's summary; torch's takes the lower one."""
    return float(values.double().nanquantile(0.5))


def _less(part: Tensor, whole: Tensor) -> float:
    """``1 - Σ‖p‖² / Σ‖w‖²``; NaN where the whole is zero."""
    energy = float(whole.double().square().sum())
    return 1 - float(part.double().square().sum()) / energy if energy > 0 else float("nan")


def _random_rank(count: int, width: int, seed: int) -> float:
    """The effective rank of as many isotropic random vectors."""
    generator = torch.Generator().manual_seed(seed)
    return spectrum(torch.randn((count, width), generator=generator)).effective_rank

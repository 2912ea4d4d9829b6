"""Layers ranked for pruning: what skipping each costs, what a map in its place costs, and cheaper scores beside."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from deltalens.core.agreement import rank_agreement
from deltalens.core.association import ClusterBootstrap
from deltalens.core.global_fit import fit_global
from deltalens.core.layer_scores import block_influence, linearity
from deltalens.core.maps import parse_map
from deltalens.core.maps.forms import form_of
from deltalens.errors import InputError
from deltalens.experiment.commit import write_json
from deltalens.experiment.documents import Documents
from deltalens.experiment.fitting import LayerStates
from deltalens.experiment.functional import FunctionalMeter
from deltalens.experiment.patches import spread
from deltalens.experiment.plan import measuring_versions
from deltalens.experiment.progress import Progress
from deltalens.experiment.spec import RunSpec
from deltalens.experiment.store import plain, table_of
from deltalens.experiment.workbench import Workbench, open_workbench
from deltalens.models import Model

SCHEMA = 1

#: What ranks layers, and the column whose small values mean that a layer can go.
CRITERIA: Mapping[str, str] = {
    "skip": "skip_increase",
    "global": "global_increase",
    "local": "local_increase",
    "block_influence": "block_influence",
    "nonlinearity": "nonlinearity",
}


@dataclass(frozen=True)
class LayerRanking:
    """Each layer's scores, the order in which each would remove layers, and how far the orders agree.

    Attributes:
        manifest: everything that was measured; `to_json` writes it.

    Example:
        >>> import deltalens as dl
        >>> found = dl.rank_layers("tiny-gpt2", layers=[2, 4], tokens=128, pool_tokens=256, neighbors=16)
        >>> found.agreement()[["a", "b"]].iloc[0].tolist()
        ['skip', 'global']
    """

    manifest: dict[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """One row per layer: increases of the loss, Block Influence, linearity, and removal orders from 1."""
        return table_of(self.manifest["layers"])

    def agreement(self) -> pd.DataFrame:
        """One row per pair of criteria: Kendall's τ-b and Spearman's ρ over layers, with 95% intervals."""
        return table_of(self.manifest["agreement"])

    def removal_order(self, criterion: str = "skip") -> list[int]:
        """Layers from the one to remove first.

        Raises:
            InputError: the criterion is unknown.
        """
        if criterion not in CRITERIA:
            raise InputError(f"the criterion {criterion!r} is unknown; use one of {', '.join(CRITERIA)}")
        frame = self.to_frame().dropna(subset=[f"order_{criterion}"])
        return [int(layer) for layer in frame.sort_values(f"order_{criterion}")["layer"]]

    def to_json(self) -> str:
        """The manifest as JSON."""
        return json.dumps(self.manifest, ensure_ascii=False)

    def save(self, path: str | Path) -> None:
        """Write the manifest as a JSON file.

        Raises:
            StoreError: the file can't be written.
        """
        write_json(Path(path), self.manifest)


def measure_ranking(
    spec: RunSpec,
    global_map: str,
    progress: Progress,
    *,
    model: Model | None = None,
    documents: Documents | None = None,
) -> LayerRanking:
    """Measure what every layer's removal costs, and what a map in its place costs.

    Args:
        spec: of `ranking_fields`; its one map is the local map.
        global_map: the map that one fit of stands in for a layer at all tokens.
        progress: what shows the progress.
        model: the model, if it is at hand.
        documents: the text, if it is at hand.

    Raises:
        InputError: a map can't be fitted.
    """
    chosen = parse_map(global_map).name
    form_of(chosen)
    with open_workbench(spec, progress, model=model, documents=documents) as bench:
        layers = bench.plan.layers
        with progress.step("rank layers", len(layers)) as advance, bench.meter() as meter:
            scores = []
            for layer in layers:
                scores.append(_layer_scores(bench, meter, layer, chosen))
                advance(1)
            original = meter.base_nll()[bench.captured.exclusions.included].double().numpy()
        return LayerRanking(plain(_manifest(bench, chosen, scores, original)))


@dataclass(frozen=True)
class _Scores:
    """One layer: per-token scores by criterion, and what has one value for the whole layer."""

    layer: int
    tokens: dict[str, np.ndarray]
    linearity: dict[str, float]


def _layer_scores(bench: Workbench, meter: FunctionalMeter, layer: int, global_map: str) -> _Scores:
    states, included = bench.states(layer), bench.captured.exclusions.included
    onto = bench.captured.evaluation.layer(layer)[1]
    patches = {name: spread(rows, onto, included) for name, rows in _stand_ins(bench, states, global_map).items()}
    effects = meter.measure(layer, {name: patch.states for name, patch in patches.items()}, "all")
    kept = {name: effect.without(patches[name].undefined_in("all")) for name, effect in effects.items()}
    tokens = {name: effect.nll_delta[included].double().numpy() for name, effect in kept.items()}
    tokens["block_influence"] = block_influence(states.x, states.y).cpu().numpy()
    pool = states.pool("held_out")
    found = linearity(pool.x, pool.y)
    facts = {"linearity": found.states, "linearity_updates": found.updates, "linearity_floor": found.floor}
    return _Scores(layer, tokens, facts | {"nonlinearity": 1 - found.states})


def _stand_ins(bench: Workbench, states: LayerStates, global_map: str) -> dict[str, Tensor]:
    """What takes the place of the layer's output: its input, the global map's, the local map's tokenwise part."""
    spec, pool = bench.plan.spec, states.pool("held_out")
    parameters = fit_global(pool.x, pool.y, parse_map(global_map), ridge=spec.point.ridge, seed=spec.seed)
    local = bench.fits(states, "held_out").fit(parse_map(spec.maps[0]))
    return {
        "skip": states.x,
        "global": states.x + parameters.update(states.x),
        "local": local.decomposition.tokenwise,
    }


def _manifest(bench: Workbench, global_map: str, scores: list[_Scores], original: np.ndarray) -> dict[str, Any]:
    plan, bootstrap = bench.plan, bench.captured.summarizer.bootstrap
    rows = [_row(score, bootstrap) for score in scores]
    return {
        "schema": SCHEMA,
        "model": asdict(plan.model.identity) | {"layers": plan.model.n_layers},
        "versions": measuring_versions(),
        "corpus": {"name": plan.corpus.name, "hash": plan.corpus.hash, "window": plan.window},
        "spec": plan.spec.model_dump(mode="json"),
        "global_map": global_map,
        "local_map": plan.spec.maps[0],
        "tokens": int((~np.isnan(original)).sum()),
        "clusters": bootstrap.clusters,
        "original_loss": _mean(original),
        "warnings": [*bench.captured.warnings, *bench.gate.proof.warnings],
        "layers": _with_orders(rows),
        "agreement": _agreement(rows, scores, bootstrap),
    }


def _row(score: _Scores, bootstrap: ClusterBootstrap) -> dict[str, Any]:
    row: dict[str, Any] = {"layer": score.layer}
    for name, values in score.tokens.items():
        low, high = bootstrap.mean(values)
        row |= {CRITERIA[name]: _mean(values), f"{CRITERIA[name]}_lo": low, f"{CRITERIA[name]}_hi": high}
    return row | score.linearity


def _with_orders(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each layer's place, from 1, in the order that removes the smallest score first; ties go to the lower layer."""
    for name, column in CRITERIA.items():
        scores = np.array([row[column] for row in rows])
        known = ~np.isnan(scores)
        places = np.argsort(np.argsort(np.where(known, scores, np.inf), kind="stable")) + 1
        for row, place, is_known in zip(rows, places, known, strict=True):
            row[f"order_{name}"] = int(place) if is_known else None
    return rows


def _agreement(rows: list[dict[str, Any]], scores: list[_Scores], bootstrap: ClusterBootstrap) -> list[dict[str, Any]]:
    resampled = {
        name: np.stack([bootstrap.resampled_means(score.tokens[name]) for score in scores], axis=1)
        for name in scores[0].tokens
    }
    pairs = []
    for one, other in itertools.combinations(CRITERIA, 2):
        left, right = ([row[CRITERIA[name]] for row in rows] for name in (one, other))
        found = rank_agreement(left, right, resampled.get(one), resampled.get(other))
        pairs.append(
            {
                "a": one, "b": other, "layers": found.items,
                "kendall": found.kendall, "kendall_lo": found.kendall_interval[0],
                "kendall_hi": found.kendall_interval[1], "spearman": found.spearman,
                "spearman_lo": found.spearman_interval[0], "spearman_hi": found.spearman_interval[1],
            }
        )  # fmt: skip
    return pairs


def _mean(values: np.ndarray) -> float:
    kept = values[~np.isnan(values)]
    return float(kept.mean()) if len(kept) else float("nan")

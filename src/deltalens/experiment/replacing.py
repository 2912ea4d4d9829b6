"""Fit maps that stand in for blocks, write them as files, and measure the model with each file in place."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from deltalens.core.association import ClusterBootstrap
from deltalens.core.global_fit import fit_global
from deltalens.core.maps import parse_map
from deltalens.core.maps.forms import form_of
from deltalens.errors import InputError
from deltalens.experiment.commit import file_identity, write_json
from deltalens.experiment.documents import Documents
from deltalens.experiment.losses import window_losses
from deltalens.experiment.plan import measuring_versions
from deltalens.experiment.progress import Advance, Progress
from deltalens.experiment.replacement_file import CONVENTION, file_name, load_replacement, write_replacement
from deltalens.experiment.spec import RunSpec
from deltalens.experiment.store import plain, table_of
from deltalens.experiment.workbench import Workbench, open_workbench
from deltalens.models import Model, Replacement, ReplacementFacts, replaced_blocks
from deltalens.models.replacement import cache_layer, output_kinds

MANIFEST, SCHEMA = "replacements.json", 1


@dataclass(frozen=True)
class Replacements:
    """The replacements of a folder and what each does to the model's loss.

    Attributes:
        folder: where the files lie.
        manifest: everything that was measured, as ``replacements.json`` holds it.

    Example:
        >>> import deltalens as dl, tempfile
        >>> folder = tempfile.mkdtemp() + "/maps"
        >>> found = dl.fit_replacements("tiny-gpt2", layers=[3], maps="mean", tokens=128, pool_tokens=256, out=folder)
        >>> found.to_frame()[["map", "file"]].iloc[0].tolist()
        ['mean', '03.mean.safetensors']
    """

    folder: Path
    manifest: dict[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """One row per file: layer, map, losses in nats, and their increases over the original with 95% intervals."""
        return table_of(self.manifest["replacements"])

    def load(self, layer: int, map: str) -> Replacement:
        """The module in place of a layer.

        Raises:
            InputError: there is none of this layer and map.
            StoreError: its file is damaged.
        """
        name = parse_map(map).name
        found = [row for row in self.manifest["replacements"] if (row["layer"], row["map"]) == (layer, name)]
        if not found:
            raise InputError(f"{self.folder} holds no replacement of layer {layer} by '{name}'; see to_frame()")
        return load_replacement(self.folder / found[0]["file"])

    def to_json(self) -> str:
        """The manifest as JSON."""
        return json.dumps(self.manifest, ensure_ascii=False)


def write_replacements(
    spec: RunSpec, folder: Path, progress: Progress, *, model: Model | None = None, documents: Documents | None = None
) -> Replacements:
    """Fit every map at every layer on the pool, write each as a file, and measure the model with that file in place.

    Args:
        spec: of `replacement_fields`.
        folder: where the files go.
        progress: what shows the progress.
        model: the model, if it is at hand.
        documents: the text, if it is at hand.

    Raises:
        StoreError: the folder can't be written.
        InputError: a map has no parameters to keep, or can't be fitted on the pool.
    """
    for map in spec.maps:
        form_of(map)
    with open_workbench(spec, progress, model=model, documents=documents) as bench:
        measured = _Losses(bench)
        layers, maps = bench.plan.layers, spec.maps
        with progress.step("fit and measure", len(layers) * (len(maps) + 1)) as advance:
            rows = [row for layer in layers for row in _layer_rows(bench, layer, folder, measured, advance)]
        manifest: dict[str, Any] = plain(_manifest(bench, measured, rows))
    write_json(folder / MANIFEST, manifest)
    return Replacements(folder, manifest)


def _layer_rows(
    bench: Workbench, layer: int, folder: Path, measured: "_Losses", advance: Advance
) -> Iterator[dict[str, Any]]:
    skip = measured.with_module(layer, nn.Identity())
    advance(1)
    for map, replacement in _fitted(bench, layer):
        path = folder / file_name(layer, map)
        write_replacement(path, replacement, _fit_facts(bench))
        losses = measured.with_module(layer, load_replacement(path))
        yield {
            "layer": layer,
            "map": map,
            "file": path.name,
            **file_identity(path),
            **measured.figures("skip", skip),
            **measured.figures("replaced", losses),
        }
        advance(1)


def _fitted(bench: Workbench, layer: int) -> Iterator[tuple[str, Replacement]]:
    spec, model = bench.plan.spec, bench.plan.model
    pool = bench.states(layer).pool("held_out")
    kind, number = output_kinds(model)[layer], cache_layer(model.blocks[layer], layer)
    for map in spec.maps:
        parameters = fit_global(pool.x, pool.y, parse_map(map), ridge=spec.point.ridge, seed=spec.seed)
        yield map, Replacement(parameters, ReplacementFacts(map, layer, model.width, model.identity, kind, number))


def _fit_facts(bench: Workbench) -> dict[str, Any]:
    spec, captured = bench.plan.spec, bench.captured
    assert captured.pool_exclusions is not None
    pool = int(captured.pool_exclusions.included.sum())
    return {"ridge": spec.point.ridge, "seed": spec.seed, "pool_tokens": pool, "corpus": bench.plan.corpus.hash}


class _Losses:
    """Losses of the evaluation tokens that take part, with and without modules in place of blocks."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._included = bench.captured.exclusions.included
        self.bootstrap: ClusterBootstrap = bench.captured.summarizer.bootstrap
        self.original = self._tokens()

    def with_module(self, layer: int, module: nn.Module) -> np.ndarray:
        """Losses (n,) with a module in place of a block, at every position; NaN at a window's last token."""
        model = self._bench.plan.model
        with replaced_blocks(model, {layer: module.to(model.device)}):
            return self._tokens()

    def figures(self, name: str, losses: np.ndarray) -> dict[str, float]:
        """The mean loss and its increase over the original with a 95% interval."""
        low, high = self.bootstrap.mean(losses - self.original)
        increase = {f"{name}_increase": float(np.nanmean(losses - self.original))}
        return {f"{name}_loss": float(np.nanmean(losses)), **increase} | {
            f"{name}_increase_lo": low,
            f"{name}_increase_hi": high,
        }

    def _tokens(self) -> np.ndarray:
        plan = self._bench.plan
        losses: Tensor = window_losses(plan.model, plan.corpus.evaluation, plan.spec.batch_size)
        return losses[self._included].to(torch.float64).numpy()


def _manifest(bench: Workbench, measured: _Losses, rows: list[dict[str, Any]]) -> dict[str, Any]:
    plan, kept = bench.plan, ~np.isnan(measured.original)
    return {
        "schema": SCHEMA,
        "convention": CONVENTION,
        "model": asdict(plan.model.identity),
        "versions": measuring_versions(),
        "corpus": {"name": plan.corpus.name, "hash": plan.corpus.hash, "window": plan.window},
        "spec": plan.spec.model_dump(mode="json"),
        "fit": _fit_facts(bench),
        "tokens": int(kept.sum()),
        "clusters": measured.bootstrap.clusters,
        "original_loss": float(np.nanmean(measured.original)),
        "warnings": list(bench.captured.warnings),
        "replacements": rows,
    }

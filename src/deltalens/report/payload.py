"""What a page carries: the summary in full, histograms of every token, and as many token rows as its budget allows."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from deltalens.report.encode import plain, rounded
from deltalens.report.measures import (
    DERIVED_TOKEN_MEASURES,
    DISTRIBUTIONS,
    SUMMARY_MEASURES,
    TABLE_COLUMNS,
    TOKEN_MEASURES,
)
from deltalens.report.protocol import (
    RunLike,
    judged_protocol,
    run_name,
    series_labels,
    series_order,
    sort_protocols,
)
from deltalens.report.tokens import TokenCube, token_payload

SUFFIXES = ("", "_lo", "_hi", "_null", "_chance")
#: Where another token's residual, or permuted updates, would leave a figure as it is or say nothing by it.
NO_CHANCE = ("norm", "relative", "full", "proj_tokenwise")
NO_NULL = ("norm",)


@dataclass(frozen=True)
class Axes:
    """The keys of a run in the order in which the page shows them."""

    layers: list[int]
    series: list[tuple[str, str]]
    protocols: list[str]

    @property
    def labels(self) -> list[str]:
        """One name per series."""
        return series_labels(self.series)


def axes_of(summary: pd.DataFrame, manifest: dict[str, Any]) -> Axes:
    """Layers, (map, fit) pairs and protocols of a summary."""
    return Axes(
        layers=sorted(int(v) for v in summary["layer"].unique()),
        series=series_order(summary, manifest),
        protocols=sort_protocols(set(summary["protocol"].astype(str))),
    )


def summary_payload(summary: pd.DataFrame, axes: Axes) -> dict[str, Any]:
    """The summary by columns, with series and protocols as indices."""
    series = {pair: i for i, pair in enumerate(axes.series)}
    protocol = {name: i for i, name in enumerate(axes.protocols)}
    columns = {}
    for measure in SUMMARY_MEASURES:
        for suffix in SUFFIXES:
            name = measure.name + suffix
            told = not (suffix == "_chance" and any(part in measure.name for part in NO_CHANCE))
            told = told and not (suffix == "_null" and any(part in measure.name for part in NO_NULL))
            if told and name in summary and summary[name].notna().any():
                columns[name] = [rounded(v) for v in summary[name].to_numpy(dtype=float)]
    for name in ("n_included", "n_excluded"):
        if name in summary:
            columns[name] = [rounded(v) for v in summary[name].to_numpy()]
    pairs = zip(summary["map"].astype(str), summary["fit"].astype(str), strict=True)
    return {
        "layer": [int(v) for v in summary["layer"]],
        "series": [series[pair] for pair in pairs],
        "protocol": [protocol[str(p)] for p in summary["protocol"]],
        "columns": columns,
    }


def histogram_payload(tokens: pd.DataFrame, axes: Axes) -> dict[str, Any]:
    """Counts per layer, series and protocol of the angles and projections of all included tokens."""
    kept = tokens[~tokens["excluded"].astype(bool)] if "excluded" in tokens else tokens
    out: dict[str, Any] = {}
    grouped = kept.groupby(["protocol", "map", "fit", "layer"], observed=True)
    names = [n for residual, full, _, _ in DISTRIBUTIONS for n in (residual, full) if n in kept]
    shapes = {n: (domain, bins) for residual, full, domain, bins in DISTRIBUTIONS for n in (residual, full)}
    for (protocol, name, fit, layer), part in grouped:
        key = f"{axes.protocols.index(str(protocol))}.{axes.series.index((str(name), str(fit)))}"
        for measure in names:
            domain, bins = shapes[measure]
            values = part[measure].to_numpy(dtype=float)
            counts, _ = np.histogram(values[np.isfinite(values)], bins=bins, range=domain)
            entry = out.setdefault(measure, {"domain": domain, "bins": bins, "counts": {}})
            entry["counts"].setdefault(key, {})[int(str(layer))] = counts.tolist()
    return out


def measures_payload(summary: pd.DataFrame) -> list[dict[str, Any]]:
    """The measures that the summary holds, as the page names and draws them."""
    present = [m for m in SUMMARY_MEASURES if m.name in summary and summary[m.name].notna().any()]
    return [asdict(m) for m in present]


def page_payload(run: RunLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two objects: what the first view needs, and the heavy per-token part."""
    summary, manifest = run.summary(), run.manifest
    axes = axes_of(summary, manifest)
    tokens = run.tokens()
    judged = judged_protocol(axes.protocols) or axes.protocols[0]
    cube = TokenCube.of(tokens, axes.layers, axes.series, axes.protocols)
    heavy = token_payload(cube, run, first_protocol=judged)
    light = {
        "name": run_name(run),
        "folder": str(run.folder),
        "layers": axes.layers,
        "modelLayers": int((manifest.get("model") or {}).get("layers") or max(axes.layers) + 1),
        "series": [
            {"label": label, "map": m, "fit": f} for label, (m, f) in zip(axes.labels, axes.series, strict=True)
        ],
        "protocols": axes.protocols,
        "judged": axes.protocols.index(judged),
        "measures": measures_payload(summary),
        "tokenMeasures": [asdict(m) for m in TOKEN_MEASURES + DERIVED_TOKEN_MEASURES],
        "tableColumns": [c for c in TABLE_COLUMNS if c in summary],
        "summary": summary_payload(summary, axes),
        "histograms": histogram_payload(tokens, axes),
        "noiseFloor": plain(manifest.get("noise_floor") or {}),
        "prompt": bool((manifest.get("spec") or {}).get("prompt")),
        "blockKinds": list((manifest.get("model") or {}).get("block_kinds") or []),
    }
    return light, heavy

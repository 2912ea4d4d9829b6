"""Several runs on one page: what differs, by how much, and whether they can be compared at all."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from deltalens.errors import InputError, StoreError
from deltalens.report.claims import SHARED_RULE, Claim, claims_for
from deltalens.report.comparability import comparability_warnings
from deltalens.report.differences import MEASURES, Difference, all_differences
from deltalens.report.encode import rounded, script_json
from deltalens.report.html import MARKS, content_hash, environment, joined_script, package_version, template_text
from deltalens.report.measures import by_name
from deltalens.report.payload import Axes, axes_of, measures_payload, summary_payload
from deltalens.report.points import at_point
from deltalens.report.protocol import RunLike, distinct_names, judged_protocol, model_facts, sort_protocols
from deltalens.report.provenance import headline_facts, shown_value

SCRIPTS = ("base", "state", "scales", "model", "tip", "profiles", "differences", "comparing")


def comparison_payload(runs: Sequence[RunLike], names: Sequence[str], found: list[Difference]) -> dict[str, Any]:
    """The page's data: one series per run and map, all summaries in one table, and the differences."""
    summaries = [run.summary() for run in runs]
    axes = [axes_of(s, run.manifest) for s, run in zip(summaries, runs, strict=True)]
    protocols = sort_protocols({p for a in axes for p in a.protocols})
    counts = [int(model_facts(run).get("layers") or max(a.layers) + 1) for run, a in zip(runs, axes, strict=True)]
    series: list[dict[str, Any]] = []
    tables = []
    for i, (own, summary) in enumerate(zip(axes, summaries, strict=True)):
        offset = len(series)
        series += [
            {
                "label": names[i],
                "run": names[i],
                "tone": i,
                "map": m,
                "fit": f,
                "layers": own.layers,
                "count": counts[i],
            }
            for m, f in own.series
        ]
        table = summary_payload(summary, Axes(own.layers, own.series, protocols))
        table["series"] = [s + offset for s in table["series"]]
        tables.append(table)
    judged = judged_protocol(protocols) or protocols[0]
    return {
        "runs": list(names),
        "folders": [str(run.folder) for run in runs],
        "normalised": len(set(counts)) > 1 or any(a.layers != b.layers for a, b in pairwise(axes)),
        "layers": axes[0].layers,
        "modelLayers": counts[0],
        "series": series,
        "maps": common_series(axes),
        "protocols": protocols,
        "judged": protocols.index(judged),
        "measures": measures_payload(pd.concat(summaries, ignore_index=True)),
        "summary": joined_tables(tables),
        "noiseFloor": {},
        "blockKinds": [],
        "tokenMeasures": [],
        "histograms": {},
        "differences": [{k: rounded(v) for k, v in asdict(d).items()} for d in found],
        "differenceMeasures": [{"name": m, "title": by_name(m).title} for m in MEASURES],
    }


def common_series(axes: Sequence[Axes]) -> list[dict[str, str]]:
    """(map, fit) pairs of any run, those that all have first."""
    pairs = dict.fromkeys(pair for a in axes for pair in a.series)
    ordered = sorted(pairs, key=lambda pair: -sum(pair in a.series for a in axes))
    several = len({fit for _, fit in pairs}) > 1
    return [{"map": m, "fit": f, "label": f"{m} · {f}" if several else m} for m, f in ordered]


def joined_tables(tables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summaries below each other; a column that one lacks is empty there."""
    names = dict.fromkeys(name for table in tables for name in table["columns"])
    lengths = [len(table["layer"]) for table in tables]
    columns = {
        name: [v for t, n in zip(tables, lengths, strict=True) for v in t["columns"].get(name, [None] * n)]
        for name in names
    }
    keys = {key: [v for table in tables for v in table[key]] for key in ("layer", "series", "protocol")}
    return {**keys, "columns": columns}


def claim_rows(runs: Sequence[RunLike]) -> list[dict[str, Any]]:
    """Each claim with every run's own verdict and the verdict of all together."""
    together = claims_for(runs)
    each: list[list[Claim]] = [claims_for([run]) for run in runs]
    return [{"claim": claim, "each": [own[i] for own in each]} for i, claim in enumerate(together)]


def manifest_rows(runs: Sequence[RunLike]) -> list[tuple[str, list[str]]]:
    """Facts of the manifests that differ between the runs, side by side."""
    flat = [_flat(run.manifest) for run in runs]
    names = dict.fromkeys(name for facts in flat for name in facts)
    rows = [(name, [facts.get(name, "–") for facts in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _flat(manifest: dict[str, Any]) -> dict[str, str]:
    sections = ("model", "corpus", "spec", "versions", "machine")
    return {
        f"{section}: {name.replace('_', ' ')}": shown_value(value)
        for section in sections
        for name, value in (manifest.get(section) or {}).items()
        if name != "block_kinds"
    } | {"command": str(manifest.get("command") or "–")}


def compare_report(runs: Sequence[RunLike], path: str | Path) -> Path:
    """Writes one page that sets several runs side by side; differences are taken from the first.

    A run that sweeps is shown at its first point.

    Args:
        runs: at least two finished runs.
        path: where the page goes; its folder must exist.

    Returns:
        The path written.

    Raises:
        InputError: fewer than two runs.
        StoreError: a run has no rows, or the file can't be written.
    """
    if len(runs) < 2:
        raise InputError(f"compare needs at least two runs, got {len(runs)}; name another run folder")
    runs = [at_point(run) for run in runs]
    for run in runs:
        if run.summary().empty:
            raise StoreError(f"{run.folder}: the run has no finished unit to compare; finish it with --resume")
    names = distinct_names(runs)
    script = joined_script(SCRIPTS)
    page = (
        environment()
        .get_template("compare.html.j2")
        .render(
            names=names,
            version=package_version(),
            facts=[headline_facts(run.manifest) for run in runs],
            warnings=comparability_warnings(runs, names),
            claims=claim_rows(runs),
            shared_rule=SHARED_RULE,
            marks=MARKS,
            manifest_rows=manifest_rows(runs),
            css=Markup(template_text("page.css")),  # our own file, holding no data
            script=Markup(script),
            script_hash=content_hash(script),
            page_json=Markup(script_json(comparison_payload(runs, names, all_differences(runs)))),
        )
    )
    target = Path(path)
    try:
        target.write_text(page, encoding="utf-8", newline="\n")
    except OSError as error:
        raise StoreError(f"{target}: the report can't be written ({error.strerror}); choose another path") from error
    return target

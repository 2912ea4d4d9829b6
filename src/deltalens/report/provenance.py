"""Where a run comes from, in rows a reader can check."""

import math
from typing import Any

Rows = list[tuple[str, str]]


def shown_value(value: object) -> str:
    """A manifest value for a reader."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(shown_value(v) for v in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{k} {shown_value(v)}" for k, v in value.items()) or "none"
    return str(value)


def grouped_kinds(kinds: list[str]) -> str:
    """Block kinds with their counts: `attention × 24, mamba × 6`."""
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return ", ".join(f"{kind} × {count}" for kind, count in counts.items())


def headline_facts(manifest: dict[str, Any]) -> list[str]:
    """The line under the title: size of the model, of the text and of the pool."""
    model, corpus = manifest.get("model") or {}, manifest.get("corpus") or {}
    evaluation, pool = corpus.get("evaluation") or {}, corpus.get("pool") or {}
    facts = []
    if model.get("parameters"):
        facts.append(f"{_short_count(int(model['parameters']))} parameters")
    if model.get("layers"):
        facts.append(f"{model['layers']} layers")
    if model.get("width"):
        facts.append(f"width {model['width']}")
    kinds = [str(k) for k in model.get("block_kinds") or []]
    if kinds:
        facts.append(kinds[0] if len(set(kinds)) == 1 else grouped_kinds(kinds))
    if evaluation.get("tokens"):
        facts.append(f"{evaluation['tokens']:,} tokens in {evaluation.get('windows', '?')} windows")
    if pool.get("tokens"):
        facts.append(f"pool of {pool['tokens']:,}")
    return facts


def _short_count(count: int) -> str:
    for size, name in ((1_000_000_000, "B"), (1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:.3g}{name}"
    return str(count)


def page_warnings(manifest: dict[str, Any]) -> list[str]:
    """The run's own warnings, its failed checks and its fallbacks."""
    out = [str(w) for w in manifest.get("warnings") or []]
    for check in manifest.get("checks") or []:
        if not check.get("holds", True):
            detail = check.get("detail") or ""
            out.append(
                f"Check failed: {check.get('name')} is {shown_value(check.get('value'))}, "
                f"tolerance {shown_value(check.get('tolerance'))}. {detail}"
            )
    if manifest.get("status") not in (None, "complete", "done", "finished"):
        out.append(f"This run is {manifest['status']}: layers or maps may be missing.")
    return out


def provenance_blocks(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Titled lists of facts: model, text, settings, interventions, software, machine."""
    corpus = dict(manifest.get("corpus") or {})
    evaluation, pool = corpus.pop("evaluation", None) or {}, corpus.pop("pool", None) or {}
    model = dict(manifest.get("model") or {})
    if model.get("block_kinds"):
        model["block_kinds"] = grouped_kinds([str(k) for k in model["block_kinds"]])
    interventions = manifest.get("interventions") or {}
    floors = {f"noise floor, {k}": v for k, v in (manifest.get("noise_floor") or {}).items()}
    floors["rounding floor"] = manifest.get("rounding_floor")
    text = corpus | {f"evaluation {k}": v for k, v in evaluation.items()} | {f"pool {k}": v for k, v in pool.items()}
    settings = (manifest.get("spec") or {}) | {f"search {k}": v for k, v in (manifest.get("search") or {}).items()}
    flat = {
        f"{scope} {k}": v for scope, facts in interventions.items() if isinstance(facts, dict) for k, v in facts.items()
    }
    stamps = {k: manifest.get(k) for k in ("status", "created", "finished", "fingerprint", "schema")}
    blocks = (
        ("Model", model), ("Text", text), ("Settings", settings), ("Interventions", flat | floors),
        ("Software", manifest.get("versions") or {}), ("Machine", manifest.get("machine") or {}), ("Run", stamps),
    )  # fmt: skip
    return [{"title": title, "rows": _rows(facts)} for title, facts in blocks if facts]


def _rows(facts: dict[str, Any]) -> Rows:
    return [(str(k).replace("_", " "), shown_value(v)) for k, v in facts.items()]

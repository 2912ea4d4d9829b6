"""The manifest of a run: everything that someone needs in order to trust, compare or repeat its numbers."""

import os
import platform
import shlex
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import pandas as pd
import torch

from deltalens.experiment.captured import Captured
from deltalens.experiment.corpus import Windows
from deltalens.experiment.exclusions import Exclusions
from deltalens.experiment.gate import Gate
from deltalens.experiment.plan import Plan, measuring_versions
from deltalens.experiment.spec import RunSpec
from deltalens.experiment.store import COMPLETE, RUNNING, SCHEMA_VERSION


def started_manifest(plan: Plan) -> dict[str, Any]:
    """What is known before the first forward pass."""
    return {
        "schema": SCHEMA_VERSION,
        "status": RUNNING,
        "spec": plan.spec.model_dump(mode="json"),
        "fingerprint": plan.fingerprint,
        "command": None if plan.text_in_python else command(plan.spec),
        "created": _now(),
        "finished": None,
        "versions": measuring_versions() | _other_versions(),
        "model": _model(plan),
        "corpus": {
            "name": plan.corpus.name,
            "hash": plan.corpus.hash,
            "documents": len(plan.corpus.document_names),
            "document_split": plan.corpus.document_split,
            "window": plan.window,
        },
        "layers": list(plan.layers),
        "machine": _machine(plan),
    }


def finished_manifest(
    manifest: dict[str, Any], captured: Captured, gate: Gate, tables: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The manifest of a run whose tables are all in place."""
    corpus = captured.plan.corpus
    sides = {"evaluation": _side(corpus.evaluation, captured.exclusions)}
    if corpus.pool is not None and captured.pool_exclusions is not None:
        sides["pool"] = _side(corpus.pool, captured.pool_exclusions)
    clusters = captured.summarizer.bootstrap.clusters
    return {
        **manifest,
        **gate.to_manifest(),
        "status": COMPLETE,
        "finished": _now(),
        "corpus": manifest["corpus"] | sides,
        "warnings": [*captured.warnings, *gate.proof.warnings],
        "bootstrap": {"clusters": clusters, "resamples": captured.plan.spec.resamples},
        "tables": tables,
    }


def search_entry(spec: RunSpec, summaries: pd.DataFrame) -> dict[str, Any]:
    """How neighbours were searched; for an approximate search its recall, least and mean over the run's units."""
    entry: dict[str, Any] = {"kind": spec.search}
    if "neighbor_recall" in summaries:
        recall = summaries["neighbor_recall"]
        entry |= {"recall_least": float(recall.min()), "recall_mean": float(recall.mean())}
    return entry


def command(spec: RunSpec) -> str:
    """The command line that repeats a run: the model and every field that isn't at its default."""
    parts = ["deltalens", "run", spec.model]
    default = RunSpec.parse(model=spec.model, prompt=spec.prompt).model_dump(mode="json") | {"prompt": None}
    for name, value in spec.model_dump(mode="json").items():
        if value == default[name]:
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parts.append(flag if value else "--no-" + name.replace("_", "-"))
        elif name == "text":
            parts.extend(piece for item in value for piece in (flag, item))
        else:
            parts.extend([flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)])
    return shlex.join(parts)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _other_versions() -> dict[str, str]:
    packages = ("numpy", "scipy", "safetensors", "tokenizers")
    return {"python": platform.python_version()} | {package: version(package) for package in packages}


def _model(plan: Plan) -> dict[str, Any]:
    model = plan.model
    return vars(model.identity) | {
        "layers": model.n_layers,
        "width": model.width,
        "vocabulary": model.vocabulary,
        "block_kinds": list(model.block_kinds),
    }


def _machine(plan: Plan) -> dict[str, Any]:
    device = plan.model.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _side(windows: Windows, exclusions: Exclusions) -> dict[str, Any]:
    return {
        "documents": len(torch.unique(windows.documents)),
        "windows": len(windows),
        "tokens": windows.tokens,
        "included": int(exclusions.included.sum()),
        "excluded": exclusions.counts(),
    }

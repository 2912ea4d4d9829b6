"""Whether a folder's run may be continued: same spec, same weights, same text, same versions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltalens.errors import StoreError
from deltalens.experiment.plan import Plan, measuring_versions
from deltalens.experiment.spec import EXECUTION_FIELDS, WORKER_FIELDS
from deltalens.experiment.store import RunFolder


def check_resumable(plan: Plan) -> None:
    """Refuse a folder that holds another run, naming every difference; an empty folder is as good as a new one."""
    if not plan.folder.exists():
        return
    manifest = plan.folder.read_manifest()
    if manifest.get("fingerprint") == plan.fingerprint:
        return
    differences = _differences(plan, manifest)
    raise StoreError(
        f"{plan.folder.folder} holds another run: {'; '.join(differences) or 'its fingerprint differs'}; "
        f"use the same settings to resume, or give another folder"
    )


def resumed_fields(folder: Path, given: Mapping[str, object]) -> dict[str, Any]:
    """The fields of the run that a folder holds, so that only those ``given`` anew need be typed; none without a run.

    An executor that is given anew gets none of the old one's workers.
    """
    if not RunFolder(folder).exists():
        return {}
    known = _mapping(RunFolder(folder).read_manifest(), "spec")
    dropped = WORKER_FIELDS if given.get("executor", known.get("executor")) != known.get("executor") else ()
    return {name: value for name, value in known.items() if name not in dropped} | dict(given)


def _differences(plan: Plan, manifest: dict[str, Any]) -> list[str]:
    ours = {name: value for name, value in plan.spec.model_dump(mode="json").items() if name not in EXECUTION_FIELDS}
    theirs = _mapping(manifest, "spec")
    pairs = [(name, theirs.get(name), value) for name, value in ours.items()]
    pairs.append(("weights", _mapping(manifest, "model").get("weight_hash"), plan.model.identity.weight_hash))
    pairs.append(("corpus", _mapping(manifest, "corpus").get("hash"), plan.corpus.hash))
    versions = _mapping(manifest, "versions")
    pairs.extend((f"version of {name}", versions.get(name), ours) for name, ours in measuring_versions().items())
    return [f"{name} was {_short(was)}, is {_short(now)}" for name, was, now in pairs if was != now]


def _mapping(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    found = manifest.get(name)
    return found if isinstance(found, dict) else {}


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= 40 else text[:12] + "…"

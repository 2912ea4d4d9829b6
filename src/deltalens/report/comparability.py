"""Whether runs can be compared: where settings, texts, models and software differ, and where two models are one."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from deltalens.report.points import point_name
from deltalens.report.protocol import RunLike
from deltalens.report.provenance import shown_value

#: Fields that may differ without a word: the question itself, where results lie, and what can't change a number.
SILENT_FIELDS = frozenset({"model", "revision", "layers", "batch_size", "keep_states", "device", "trust_remote_code"})
MODEL_FIELDS = ("dtype", "attention", "quantization")


def comparability_warnings(runs: Sequence[RunLike], names: Sequence[str]) -> list[str]:
    """One sentence for each way in which the runs differ beside what is compared."""
    manifests = [run.manifest for run in runs]
    points = [(name, m["point"]) for name, m in zip(names, manifests, strict=True) if m.get("point")]
    return [
        *(f"{name} is a sweep, shown at {point_name(point)}." for name, point in points),
        *_equal_weights(manifests, names),
        *_differing(manifests, names, "text", lambda m: (m.get("corpus") or {}).get("hash"), "different texts"),
        *_differing(manifests, names, "window", lambda m: (m.get("corpus") or {}).get("window"), "tokens per window"),
        *_section(manifests, names, "model", "model's", MODEL_FIELDS),
        *_section(manifests, names, "spec", "setting", _spec_fields(manifests)),
        *_section(manifests, names, "versions", "version of", ("deltalens", "torch", "transformers", "numpy")),
        *_tokenizers(manifests),
        *_common_keys(runs),
    ]


def same_tokens(a: RunLike, b: RunLike) -> bool:
    """Whether two runs evaluated the same tokens of the same text, so that tokens can be paired."""
    first, second = (run.manifest.get("corpus") or {} for run in (a, b))
    vocabularies = {(run.manifest.get("model") or {}).get("vocabulary") for run in (a, b)}
    sizes = {(c.get("evaluation") or {}).get("tokens") for c in (first, second)}
    alike = first.get("hash") == second.get("hash") and first.get("window") == second.get("window")
    return bool(first.get("hash")) and alike and len(sizes) == 1 and len(vocabularies) == 1


def _equal_weights(manifests: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    hashes = [(m.get("model") or {}).get("weight_hash") for m in manifests]
    models = [(m.get("model") or {}).get("name") for m in manifests]
    revisions = [(m.get("model") or {}).get("revision") for m in manifests]
    return [
        f"{names[i]} and {names[j]} name different models or revisions, but their weights are equal byte for byte."
        for i, j in combinations(range(len(manifests)), 2)
        if hashes[i] and hashes[i] == hashes[j] and (models[i], revisions[i]) != (models[j], revisions[j])
    ]


def _differing(
    manifests: Sequence[dict[str, Any]],
    names: Sequence[str],
    what: str,
    value: Callable[[dict[str, Any]], object],
    plain: str,
) -> list[str]:
    values = [value(m) for m in manifests]
    if len({repr(v) for v in values}) < 2:
        return []
    listed = "; ".join(f"{name}: {_short(v)}" for name, v in zip(names, values, strict=True))
    return [f"The runs differ in {what} ({plain}): {listed}."]


def _section(
    manifests: Sequence[dict[str, Any]], names: Sequence[str], section: str, word: str, fields: Sequence[str]
) -> list[str]:
    return [
        warning
        for field in fields
        for warning in _differing(
            manifests, names, f"the {word} {field}", lambda m, f=field: (m.get(section) or {}).get(f), section  # type: ignore[misc]
        )
    ]  # fmt: skip


def _spec_fields(manifests: Sequence[dict[str, Any]]) -> list[str]:
    fields = dict.fromkeys(field for m in manifests for field in (m.get("spec") or {}))
    return [field for field in fields if field not in SILENT_FIELDS]


def _tokenizers(manifests: Sequence[dict[str, Any]]) -> list[str]:
    vocabularies = {(m.get("model") or {}).get("vocabulary") for m in manifests}
    if len(vocabularies) < 2:
        return []
    return ["The models have different vocabularies: KL and loss are per token of each one's own tokenizer."]


def _common_keys(runs: Sequence[RunLike]) -> list[str]:
    maps = [{str(m) for m in run.summary()["map"].unique()} for run in runs]
    return [] if set.intersection(*maps) else ["The runs have no map in common: no difference can be given."]


def _short(value: object) -> str:
    text = shown_value(value)
    return text if len(text) <= 40 else text[:12] + "…"

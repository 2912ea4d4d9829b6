"""Convincing run folders without a model: the columns that the pipeline writes, with figures like a real network's.

The depth profiles, the correlation of error with KL and the heavy tails are made up, so that pages, tables and claims
have something to show.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

PROSE = (
    "The lighthouse keeper counted the steps again, as he had every evening since the storm. There were "
    "two hundred and twelve of them, and the last nine creaked. Below, the sea folded over itself "
    "without hurry; above, the lamp waited for its oil.\n\nHe had been told that nothing changes in such a "
    "place. But the glass had a new crack, thin as a hair, and through it the light fell on the wall in "
    "a shape he did not know. He wrote it down: a line, a gap, a line.\n\ndef steps(height, rise=0.18):\n   "
    " return int(height / rise)\n\nIn the morning the boat came with flour, rope and a letter from the "
    "harbour master, who wanted to know how many ships had passed. He answered that he had seen four, "
    "and heard a fifth. The residual, as his sister liked to say, is what is left when you have "
    "explained everything else. "
)
HOSTILE = (
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "\"'`&amp;<!--",
    "\u202eesrever\u202c",
    "\u0000\u0007\u001b[31m",
    "\u200b",
    "\ufffd",
    "שלום",
    " عالم",
    "\u2028",
    "{{7*7}}",
    "${window.pwned=1}",
    "\t",
    "\r\n",
    "\n\n",
    "   ",
    "\u0301",
    "\U000e0041",
    "👩\u200d🔬",
)
GEOMETRY = ("cos_full_tokenwise", "cos_residual_tokenwise", "angle_full_tokenwise", "angle_residual_tokenwise")
CONTROLS = (
    "kl_single_random", "kl_single_shuffled", "kl_residual_only", "kl_skip", "kl_in", "kl_out", "kl_tokenwise_matched",
)  # fmt: skip
FACTORS = (0.8, 0.9, 1.7, 2.2, 0.1, 0.9, 0.7)
MAP_QUALITY = {
    "identity": 2.3, "mean": 1.75, "scalar": 1.9, "diagonal": 1.45, "low_rank:8": 1.12, "linear": 1.0, "affine": 1.0,
    "orthogonal": 1.3, "mlp:32": 0.92, "isolated": 1.25,
}  # fmt: skip


@dataclass(frozen=True)
class SyntheticRun:
    """What the report needs of a run: a folder, a manifest, two tables."""

    folder: Path

    @property
    def manifest(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
        return content

    def summary(self) -> pd.DataFrame:
        return pd.read_parquet(self.folder / "summary.parquet")

    def tokens(
        self,
        layer: int | None = None,
        map: str | None = None,
        fit: str | None = None,
        protocol: str | None = None,
        **point: object,
    ) -> pd.DataFrame:
        frame = pd.read_parquet(self.folder / "tokens.parquet")
        own = {"layer": layer, "map": map, "fit": fit, "protocol": protocol}
        for name, wanted in (own | point).items():
            if wanted is not None:
                frame = frame[frame[name] == wanted]
        return frame

    def neighbors(self) -> pd.DataFrame:
        return self._optional("neighbors")

    def pool(self) -> pd.DataFrame:
        return self._optional("pool")

    def _optional(self, name: str) -> pd.DataFrame:
        path = self.folder / f"{name}.parquet"
        return pd.read_parquet(path) if path.is_file() else pd.DataFrame()


@dataclass(frozen=True)
class Recipe:
    """What a synthetic run holds and lacks."""

    layers: tuple[int, ...] = tuple(range(6))
    n_layers: int = 6
    windows: int = 10
    window: int = 32
    pool_windows: int = 12
    maps: tuple[str, ...] = ("diagonal", "low_rank:8", "orthogonal", "mlp:32")
    protocols: tuple[str, ...] = ("held_out", "in_sample")
    fits: tuple[str, ...] = ("local",)
    controls: bool = True
    nulls: bool = True
    neighbors: bool = True
    pool_text: bool = True
    hostile: bool = False
    nan_share: float = 0.0
    documents: int | None = None
    model: str = "synthetic-30"
    parameters: int = 134_515_008
    block_kind: str = "attention"
    size: float = 1.0
    seed: int = 0
    drop: tuple[str, ...] = field(default=())


def words(count: int, rng: np.random.Generator, hostile: bool) -> list[str]:
    """`count` token strings, cut from prose, with hostile ones strewn in if asked."""
    pieces = re.findall(r" ?[A-Za-z]{1,6}|\n\n|\n| {2,}|[^A-Za-z]", PROSE)
    start = int(rng.integers(len(pieces)))
    out = [pieces[(start + i) % len(pieces)] for i in range(count)]
    if hostile:
        for i, text in enumerate(HOSTILE):
            if i + 1 < count:
                out[i + 1] = text
    return out


def layout(recipe: Recipe, windows: int, rng: np.random.Generator) -> pd.DataFrame:
    """Window, position, document and text of every token."""
    documents = recipe.documents or windows
    rows = []
    for window in range(windows):
        texts = words(recipe.window, rng, recipe.hostile and window == 0)
        ids = rng.integers(0, 50_000, recipe.window)
        document = f"doc-{window * documents // windows:03d}"
        rows += [(window, p, document, int(ids[p]), texts[p]) for p in range(recipe.window)]
    return pd.DataFrame(rows, columns=["window", "position", "document", "token_id", "token"])


def unit_tokens(recipe: Recipe, base: pd.DataFrame, key: tuple[int, str, str, str], hard: np.ndarray) -> pd.DataFrame:
    """The per-token measures of one unit."""
    layer, name, fit, protocol = key
    rng = np.random.default_rng([recipe.seed, layer, sum(map(ord, name + fit + protocol))])
    n = len(base)
    depth = layer / max(recipe.n_layers - 1, 1)
    hump = np.exp(-(((depth - 0.5) / 0.3) ** 2))
    quality = MAP_QUALITY.get(name, 1.1) * (0.45 if protocol == "in_sample" else 1.0) * recipe.size
    out = base.copy()
    state = 12 * np.exp(1.6 * depth + 0.15 * rng.standard_normal(n))
    update = state * (0.28 - 0.12 * hump) * np.exp(0.25 * rng.standard_normal(n))
    error = np.clip((0.16 + 0.24 * hump) * quality * np.exp(0.32 * hard + 0.18 * rng.standard_normal(n)), 1e-3, None)
    residual = error * update
    following = np.sqrt(state**2 + update**2)
    cos_full = np.clip(1 - 0.42 * error**1.4, 0.02, 0.9999)
    spread = np.clip(0.12 + 0.22 * rng.random(n) + 0.12 * rng.standard_normal(n), 1e-3, 0.98)
    out["state_norm"], out["next_norm"], out["update_norm"] = state, following, update
    out["tokenwise_norm"], out["residual_norm"] = update * cos_full, residual
    out["relative_error"], out["relative_update_error"] = residual / following, error
    sign = np.where(rng.random(n) < 0.35, -1, 1)
    out["cos_full_tokenwise"], out["cos_full_tokenwise_signed"] = cos_full, cos_full
    out["cos_residual_tokenwise"], out["cos_residual_tokenwise_signed"] = spread, spread * sign
    out["angle_full_tokenwise"] = np.degrees(np.arccos(cos_full))
    out["angle_residual_tokenwise"] = np.degrees(np.arccos(spread))
    empty = name == "identity"
    out["proj_full"] = np.nan if empty else rng.beta(9 - 3 * hump, 4, n)
    out["proj_tokenwise"] = np.nan if name in ("mean", "low_rank:8", "identity") else rng.beta(18, 3, n)
    out["proj_residual"] = np.nan if empty else rng.beta(1.6, 16, n)
    out["subspace_rank"] = 0 if empty else 8
    out["distinct_neighbors"] = 64 if layer else rng.integers(30, 65, n)
    out["degrees_of_freedom"] = {"diagonal": 1.0, "low_rank:8": 7.4, "orthogonal": 21.3}.get(name, 30.2)
    scale = 0.02 * np.exp(1.5 * depth) * error**1.3
    gain = np.exp(0.9 * hard + 0.7 * rng.standard_normal(n))
    out["kl_single"] = np.clip(scale * gain, 1e-9, None)
    out["kl_all"] = out["kl_single"] * np.exp(1.2 + 1.1 * rng.standard_normal(n))
    for control, factor in zip(CONTROLS, FACTORS, strict=True):
        noisy = out["kl_single"] * factor * np.exp(0.45 * rng.standard_normal(n))
        out[control] = noisy if recipe.controls and protocol == recipe.protocols[0] else np.nan
    last = base["position"].to_numpy() == recipe.window - 1
    out["nll"] = np.where(last, np.nan, np.abs(2.9 + 1.7 * hard))
    out["nll_delta_single"] = np.where(last, np.nan, out["kl_single"] * rng.standard_normal(n))
    out["nll_delta_all"] = np.where(last, np.nan, out["kl_all"] * rng.standard_normal(n))
    out["top1_agrees_single"] = rng.random(n) > np.clip(out["kl_single"] * 2, 0.01, 0.9)
    out["top1_agrees_all"] = rng.random(n) > np.clip(out["kl_all"] * 2, 0.01, 0.9)
    out["flags"] = np.where(out["kl_single"] < 2e-6, "below noise floor", "")
    measured = out.columns.difference(["window", "position", "document", "token_id", "token", "flags"])
    if recipe.nan_share:
        blank = rng.random(n) < recipe.nan_share
        numeric = [c for c in measured if out[c].dtype.kind == "f"]
        out.loc[blank, numeric] = np.nan
    out.insert(0, "layer", layer)
    out.insert(1, "map", name)
    out.insert(2, "fit", fit)
    out.insert(3, "protocol", protocol)
    excluded = base["position"].to_numpy() == 0
    sink = (base["position"].to_numpy() == 5) & (base["window"].to_numpy() == 1)
    out["excluded"] = excluded | sink
    out["reason"] = np.where(excluded, "skip_first", np.where(sink, "sink", ""))
    return out


def rank_correlation(a: pd.Series, b: pd.Series) -> float:
    return float(a.rank().corr(b.rank()))


def unit_summary(frame: pd.DataFrame, recipe: Recipe) -> dict[str, Any]:
    """A summary row with plausible intervals (from quantiles, not from a bootstrap)."""
    kept = frame[~frame["excluded"]]
    row: dict[str, Any] = {c: frame[c].iloc[0] for c in ("layer", "map", "fit", "protocol")}
    clusters = kept["document"].nunique() if kept["document"].nunique() >= 8 else kept["window"].nunique()
    enough = clusters >= 8
    in_sample = row["protocol"] == "in_sample"
    for name in kept.columns:
        if kept[name].dtype.kind != "f" and name not in ("subspace_rank", "distinct_neighbors"):
            continue
        values = kept[name].dropna()
        half = 1.6 * float(values.std()) / max(len(values), 1) ** 0.5 if len(values) > 1 else np.nan
        middle = float(values.median()) if len(values) else np.nan
        row |= {
            name: middle, f"{name}_lo": middle - half if enough else np.nan,
            f"{name}_hi": middle + half if enough else np.nan,
            f"{name}_q25": float(values.quantile(0.25)) if len(values) else np.nan,
            f"{name}_q75": float(values.quantile(0.75)) if len(values) else np.nan,
            f"{name}_n": len(values), f"{name}_nan": int(kept[name].isna().sum()),
        }  # fmt: skip
    if recipe.nulls:
        row |= {
            "cos_full_tokenwise_null": 0.985 if in_sample else 0.31, "cos_residual_tokenwise_null": 0.05,
            "cos_residual_tokenwise_chance": 0.061, "angle_residual_tokenwise_chance": 86.5,
            "angle_residual_tokenwise_null": 87.1, "proj_full_null": 0.18, "proj_residual_null": 0.03,
            "proj_residual_chance": 0.05, "relative_update_error_null": 0.4 if in_sample else 1.03,
            "share_residual_over_60_null": 0.97, "share_residual_over_60_chance": 0.99,
        }  # fmt: skip
    share = float((kept["angle_residual_tokenwise"] > 60).mean())
    row |= {"share_residual_over_60": share}
    row |= {f"share_residual_over_60_{s}": share + d if enough else np.nan for s, d in (("lo", -0.03), ("hi", 0.03))}
    pairs = {"spearman": "kl_single", "spearman_all": "kl_all", "spearman_random": "kl_single_random",
             "spearman_shuffled": "kl_single_shuffled"}  # fmt: skip
    for name, kl in pairs.items():
        row[name] = rank_correlation(kept["relative_error"], kept[kl])
    row["spearman_partial"] = row["spearman"] * 0.7
    row["spearman_minus_random"] = row["spearman"] - row["spearman_random"]
    for name in ("spearman", "spearman_all", "spearman_minus_random"):
        row[f"{name}_lo"], row[f"{name}_hi"] = (row[name] - 0.06, row[name] + 0.05) if enough else (np.nan, np.nan)
    for control in ("random", "shuffled"):
        ratio = (kept["kl_single"] / kept[f"kl_single_{control}"]).median()
        row[f"kl_ratio_{control}"] = ratio
        row[f"kl_ratio_{control}_lo"] = ratio * 0.93 if enough else np.nan
        row[f"kl_ratio_{control}_hi"] = ratio * 1.07 if enough else np.nan
    for name, other in (("swap_log_ratio", "kl_residual_only"), ("swap_log_ratio_matched", "kl_tokenwise_matched")):
        ratio = np.log(kept["kl_single"] / kept[other]).median()
        row |= {name: ratio, f"{name}_lo": ratio - 0.05 if enough else np.nan, f"{name}_hi": ratio + 0.05}
    row |= {"n_included": len(kept), "n_excluded": len(frame) - len(kept)}
    return row


def neighbor_table(recipe: Recipe, base: pd.DataFrame) -> pd.DataFrame:
    """Eight nearest pool tokens per evaluation token, layer and protocol."""
    rng = np.random.default_rng(recipe.seed + 1)
    parts = []
    for layer in recipe.layers:
        for protocol in recipe.protocols:
            here = base[["window", "position"]].loc[base.index.repeat(8)].reset_index(drop=True)
            n = len(here)
            here.insert(0, "layer", layer)
            here.insert(1, "protocol", protocol)
            here["rank"] = np.tile(np.arange(8), n // 8)
            pool = recipe.pool_windows if protocol == "held_out" else recipe.windows
            here["pool_window"] = rng.integers(0, pool, n)
            here["pool_position"] = rng.integers(0, recipe.window, n)
            here["distance"] = np.sort(2 + 6 * rng.random((n // 8, 8)), axis=1).ravel()
            parts.append(here)
    return pd.concat(parts, ignore_index=True)


def manifest(recipe: Recipe, base: pd.DataFrame) -> dict[str, Any]:
    """A run.json as the pipeline writes it."""
    tokens = len(base)
    counted = {"documents": int(base["document"].nunique()), "windows": recipe.windows, "tokens": tokens}
    pool = recipe.pool_windows * recipe.window
    return {
        "schema": 1, "status": "complete", "fingerprint": f"{recipe.seed:064x}",
        "command": f"deltalens run {recipe.model} --maps {','.join(recipe.maps)} --tokens {tokens}",
        "created": "2026-05-04T09:12:00+00:00", "finished": "2026-05-04T09:31:27+00:00",
        "spec": {"model": recipe.model, "maps": list(recipe.maps), "neighbors": 64, "layers": None, "ridge": 0.01,
                 "protocol": list(recipe.protocols), "scope": ["single", "all"], "fit": recipe.fits[0],
                 "window": recipe.window, "tokens": tokens, "pool_tokens": pool, "subspace": 8, "seed": recipe.seed},
        "versions": {"deltalens": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "transformers": "5.24.0",
                     "numpy": "2.4.0"},
        "model": {"name": recipe.model, "source": "hub", "revision": "93efa2f",
                  "weight_hash": f"{recipe.parameters:064x}",
                  "model_type": "llama" if recipe.block_kind == "attention" else "mamba",
                  "architecture": "LlamaForCausalLM", "layers": recipe.n_layers, "width": 576, "vocabulary": 49152,
                  "dtype": "float32", "attention": "sdpa", "parameters": recipe.parameters,
                  "block_kinds": [recipe.block_kind] * recipe.n_layers},
        "corpus": {"name": "built-in prose", "hash": "ab" * 32, "documents": counted["documents"] + recipe.pool_windows,
                   "document_split": "documents", "window": recipe.window,
                   "evaluation": counted | {"included": tokens - recipe.windows - 1,
                                            "excluded": {"skip_first": recipe.windows, "sink": 1}},
                   "pool": {"documents": recipe.pool_windows, "windows": recipe.pool_windows, "tokens": pool,
                            "included": pool - recipe.pool_windows, "excluded": {"skip_first": recipe.pool_windows}}},
        "machine": {"platform": "Linux-6.1-x86_64", "processors": 2, "memory_gib": 15.6},
        "checks": [
            {"name": "chain", "value": 0.0, "tolerance": 0.0, "holds": True,
             "detail": "input of block l+1 equals output of block l"},
            {"name": "identity patch", "value": 3.1e-8, "tolerance": 1e-6, "holds": True, "detail": "KL, nats"},
        ],
        "interventions": {"single": {"path": "cached_keys", "parity": {"scheme": "cached_keys", "holds": True,
                                     "max_relative_difference": 4.1e-6, "tolerance": 1e-4}, "sampled": None},
                          "all": {"path": "patched forward"}},
        "noise_floor": {"single": 2.0e-6, "all": 4.0e-6}, "rounding_floor": 1.2e-7,
        "warnings": ["layer 0: 41% of the neighbours were exact duplicates and were merged"],
    }  # fmt: skip


def write_run(folder: Path, recipe: Recipe | None = None) -> SyntheticRun:
    """Writes a run folder by the recipe and opens it."""
    recipe = recipe or Recipe()
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(recipe.seed)
    base = layout(recipe, recipe.windows, rng)
    pool = layout(recipe, recipe.pool_windows, rng)
    hard = rng.standard_normal(len(base))
    keys = [
        (layer, m, f, p) for layer in recipe.layers for m in recipe.maps for f in recipe.fits for p in recipe.protocols
    ]
    units = [unit_tokens(recipe, base, key, hard) for key in keys]
    summary = pd.DataFrame([unit_summary(unit, recipe) for unit in units])
    tokens = pd.concat(units, ignore_index=True)
    if not recipe.controls:
        gone = re.compile(r"random|shuffled|residual_only|kl_skip|kl_in|kl_out|matched|swap")
        tokens = tokens[[c for c in tokens.columns if not gone.search(c)]]
        summary = summary[[c for c in summary.columns if not gone.search(c)]]
    tokens = tokens.drop(columns=[c for c in recipe.drop if c in tokens.columns])
    summary = summary.drop(columns=[c for c in summary.columns if c in recipe.drop])
    tokens.to_parquet(folder / "tokens.parquet", index=False)
    summary.to_parquet(folder / "summary.parquet", index=False)
    if recipe.neighbors:
        neighbor_table(recipe, base).to_parquet(folder / "neighbors.parquet", index=False)
    if recipe.neighbors and recipe.pool_text:
        pool.to_parquet(folder / "pool.parquet", index=False)
    (folder / "run.json").write_text(json.dumps(manifest(recipe, base)), encoding="utf-8")
    return SyntheticRun(folder)

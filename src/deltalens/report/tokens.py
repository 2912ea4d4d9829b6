"""The per-token part of a page: a dense block of measures, cut to a budget, with the text and the neighbours."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from deltalens.report.encode import BASE, LEVELS, pack, quantizer_for, rounded
from deltalens.report.measures import TOKEN_MEASURES, Measure
from deltalens.report.protocol import RunLike

TOKEN_BUDGET = 5_200_000  # characters of packed per-token measures
NEIGHBOR_BUDGET = 1_300_000  # characters of packed neighbours
POOL_TOKENS = 40_000  # beyond this the neighbours are named by place only
ESSENTIAL = 4  # the first measures: without these the text view and the scatter are empty


@dataclass(frozen=True)
class TokenCube:
    """Per-token tables with one fixed order of tokens, so that every unit is a column of numbers."""

    base: pd.DataFrame
    frame: pd.DataFrame
    layers: list[int]
    series: list[tuple[str, str]]
    protocols: list[str]

    @classmethod
    def of(
        cls, tokens: pd.DataFrame, layers: list[int], series: list[tuple[str, str]], protocols: list[str]
    ) -> "TokenCube":
        """Sorts the tokens by window and position and numbers them."""
        wanted = ["window", "position", "document", "token_id", "token", "excluded", "reason", "nll"]
        names = [c for c in wanted if c in tokens]
        base = tokens[names].drop_duplicates(["window", "position"]).sort_values(["window", "position"])
        base = base.reset_index(drop=True)
        numbered = base[["window", "position"]].assign(slot=np.arange(len(base)))
        frame = tokens.merge(numbered, on=["window", "position"], how="left")
        return cls(base, frame, layers, series, protocols)

    def measures(self) -> list[Measure]:
        """The per-token measures that the tables hold."""
        return [m for m in TOKEN_MEASURES if m.name in self.frame and self.frame[m.name].notna().any()]

    def cells(self) -> int:
        """Numbers of one measure under one protocol."""
        return len(self.base) * len(self.layers) * len(self.series)

    def restricted(self, windows: list[int]) -> "TokenCube":
        """The same for some windows only."""
        frame = self.frame[self.frame["window"].isin(windows)].drop(columns="slot")
        return TokenCube.of(frame, self.layers, self.series, self.protocols)

    def column(self, measure: str, protocol: str) -> dict[int, dict[int, NDArray[np.float64]]]:
        """Values by series and layer, NaN where a token has none."""
        out: dict[int, dict[int, NDArray[np.float64]]] = {}
        part = self.frame[self.frame["protocol"] == protocol]
        for (name, fit, layer), rows in part.groupby(["map", "fit", "layer"], observed=True):
            values = np.full(len(self.base), np.nan)
            values[rows["slot"].to_numpy()] = rows[measure].to_numpy(dtype=float)
            out.setdefault(self.series.index((str(name), str(fit))), {})[int(str(layer))] = values
        return out


def choose_windows(cube: TokenCube, budget: int) -> list[int]:
    """Evenly spaced windows whose essential measures fit the budget; all of them if they do."""
    windows = sorted(int(w) for w in cube.base["window"].unique())
    cost = cube.cells() * 2 * min(ESSENTIAL, max(len(cube.measures()), 1))
    room = max(1, int(len(windows) * budget / max(cost, 1)))
    if room >= len(windows):
        return windows
    picks = np.linspace(0, len(windows) - 1, room).round().astype(int)
    return [windows[i] for i in dict.fromkeys(picks.tolist())]


def choose_columns(cube: TokenCube, first_protocol: str, budget: int) -> list[tuple[str, Measure]]:
    """(protocol, measure) pairs in order of use, as many as fit."""
    measures = cube.measures()
    others = [p for p in cube.protocols if p != first_protocol]
    order = [(first_protocol, m) for m in measures[:7]]
    order += [(p, m) for p in others for m in measures[:3]]
    order += [(first_protocol, m) for m in measures[7:]]
    order += [(p, m) for p in others for m in measures[3:]]
    room = max(budget // max(cube.cells() * 2, 1), 1)
    return order[:room]


def column_payload(cube: TokenCube, chosen: list[tuple[str, Measure]]) -> dict[str, Any]:
    """Packed columns: measure -> scale, and per protocol.series one string per layer."""
    out: dict[str, Any] = {}
    for name in dict.fromkeys(m.name for _, m in chosen):
        measure = next(m for _, m in chosen if m.name == name)
        parts = {p: cube.column(name, p) for p, m in chosen if m.name == name}
        every = [v for by_series in parts.values() for by_layer in by_series.values() for v in by_layer.values()]
        quantizer = quantizer_for(measure, np.concatenate(every) if every else np.zeros(0))
        data = {}
        for protocol, by_series in parts.items():
            for series, by_layer in by_series.items():
                key = f"{cube.protocols.index(protocol)}.{series}"
                data[key] = {layer: pack(quantizer.levels(values)) for layer, values in by_layer.items()}
        out[name] = {"log": quantizer.log, "low": quantizer.low, "high": quantizer.high, "data": data}
    return out


def text_payload(base: pd.DataFrame) -> dict[str, Any]:
    """The evaluation text: tokens, their place, and why some are excluded."""
    reasons = ["", *sorted({str(r) for r in base.get("reason", pd.Series(dtype=str)).dropna()} - {""})]
    codes = {r: i for i, r in enumerate(reasons)}
    excluded = base["excluded"].astype(bool) if "excluded" in base else pd.Series(False, index=base.index)
    reason = base["reason"].fillna("").astype(str) if "reason" in base else pd.Series("", index=base.index)
    return {
        "token": [shown(t) for t in base["token"]] if "token" in base else [f"#{i}" for i in base["token_id"]],
        "tokenId": [int(i) for i in base["token_id"]] if "token_id" in base else None,
        "window": [int(w) for w in base["window"]],
        "position": [int(p) for p in base["position"]],
        "document": [str(d) for d in base["document"]] if "document" in base else None,
        "excluded": [int(e) for e in excluded],
        "reason": [codes.get(r, 0) for r in reason],
        "reasons": reasons,
        "nll": [rounded(v, 4) for v in base["nll"].to_numpy(dtype=float)] if "nll" in base else None,
    }


def shown(token: object) -> str:
    """A token as text: bytes that are no character keep their values, a missing one says so."""
    if isinstance(token, bytes):
        return token.decode("utf-8", errors="backslashreplace")
    return "�" if token is None or token is pd.NA or token != token else str(token)


def neighbor_payload(
    run: RunLike, cube: TokenCube, protocol: str, budget: int = NEIGHBOR_BUDGET
) -> dict[str, Any] | None:
    """The nearest pool tokens per layer and token, as many ranks as fit; None if the run kept none."""
    frame = run.neighbors()
    frame = frame[frame["protocol"] == protocol] if "protocol" in frame else frame
    if frame.empty:
        return None
    text, places = _pool_text(run, protocol, cube)
    if text is None:
        places = frame[["pool_window", "pool_position"]].drop_duplicates().set_axis(["window", "position"], axis=1)
        places = places.sort_values(["window", "position"]).reset_index(drop=True)
        text = {"token": None, "window": places["window"].tolist(), "position": places["position"].tolist()}
    places = places[["window", "position"]].set_axis(["pool_window", "pool_position"], axis=1)
    frame = frame.merge(places.assign(pool=np.arange(len(places))), on=["pool_window", "pool_position"], how="inner")
    slots = cube.base[["window", "position"]].assign(slot=np.arange(len(cube.base)))
    frame = frame.merge(slots, on=["window", "position"], how="inner")
    return {
        "protocol": cube.protocols.index(protocol),
        "pool": text,
        **_pack_neighbors(frame, cube, len(places), budget),
    }


def _pack_neighbors(frame: pd.DataFrame, cube: TokenCube, pool: int, budget: int) -> dict[str, Any]:
    digits = 2 if pool < LEVELS else 3 if pool < BASE**3 else 4
    tokens = len(cube.base)
    per_rank = tokens * len(cube.layers) * (digits + 2)
    ranks = int(min(frame["rank"].max() + 1, max(1, budget // max(per_rank, 1))))
    distances = frame["distance"].to_numpy(dtype=float) if "distance" in frame else np.full(len(frame), np.nan)
    quantizer = quantizer_for(Measure("distance", "", "", scale="linear"), distances)
    index_by_layer, distance_by_layer = {}, {}
    for layer, rows in frame[frame["rank"] < ranks].groupby("layer"):
        index = np.zeros((tokens, ranks), dtype=np.int64)
        distance = np.full((tokens, ranks), np.nan)
        at = (rows["slot"].to_numpy(), rows["rank"].to_numpy())
        index[at] = rows["pool"].to_numpy() + 1
        distance[at] = rows["distance"].to_numpy(dtype=float) if "distance" in rows else np.nan
        index_by_layer[int(str(layer))] = pack(index, digits)
        distance_by_layer[int(str(layer))] = pack(quantizer.levels(distance))
    return {
        "ranks": ranks,
        "digits": digits,
        "index": index_by_layer,
        "distance": {"log": False, "low": quantizer.low, "high": quantizer.high, "data": distance_by_layer},
    }


def _pool_text(run: RunLike, protocol: str, cube: TokenCube) -> tuple[dict[str, Any] | None, pd.DataFrame]:
    """The pool's text: its own file, or the evaluation tokens themselves where these are the pool."""
    pool = run.pool() if protocol == "held_out" else cube.base
    if pool.empty or "token" not in pool or len(pool) > POOL_TOKENS:
        return None, pd.DataFrame()
    pool = pool.sort_values(["window", "position"]).reset_index(drop=True)
    content = {
        "token": [shown(t) for t in pool["token"]],
        "window": [int(w) for w in pool["window"]],
        "position": [int(p) for p in pool["position"]],
        "document": [str(d) for d in pool["document"]] if "document" in pool else None,
    }
    return content, pool


def token_payload(cube: TokenCube, run: RunLike, first_protocol: str, budget: int = TOKEN_BUDGET) -> dict[str, Any]:
    """Everything per token that the page carries, and a note of what it leaves in the run folder."""
    total, every = len(cube.base), len(cube.measures()) * len(cube.protocols)
    windows = choose_windows(cube, budget)
    if len(windows) < cube.base["window"].nunique():
        cube = cube.restricted(windows)
    chosen = choose_columns(cube, first_protocol, budget)
    return {
        "text": text_payload(cube.base),
        "columns": column_payload(cube, chosen),
        "neighbors": neighbor_payload(run, cube, first_protocol),
        "sample": {"tokens": len(cube.base), "of": total, "columns": len(chosen), "ofColumns": every},
    }

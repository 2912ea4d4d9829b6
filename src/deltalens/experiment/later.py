"""What a single replaced state does to the tokens after it, which its own prediction doesn't show."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.core.association import ClusterBootstrap
from deltalens.core.controls import layer_seed, random_directions
from deltalens.core.maps import parse_map
from deltalens.errors import CorpusError, InputError
from deltalens.experiment.continuation import Continuations, Divergences
from deltalens.experiment.fitting import LayerStates
from deltalens.experiment.patches import spread
from deltalens.experiment.progress import Advance, Progress
from deltalens.experiment.summary import clusters_of
from deltalens.experiment.workbench import Workbench

TOKENWISE, RANDOM = "", "_random"

#: Figures and counts by column.
Row = dict[str, float | int]


@dataclass(frozen=True)
class LaterTables:
    """What single replaced states do to later tokens.

    Attributes:
        layers: one row per layer × map × fit × protocol.
        distances: mean KL by distance, one row per such key and range of distances.
        positions: one row per such key and sampled position.
    """

    layers: pd.DataFrame
    distances: pd.DataFrame
    positions: pd.DataFrame


def distance_ranges(length: int) -> list[tuple[int, int]]:
    """Ranges of distances that double, inclusive: 1, 2-3, 4-7, ... up to what a window of ``length`` holds.

    Example:
        >>> distance_ranges(10)
        [(1, 1), (2, 3), (4, 7), (8, 9)]
    """
    starts = [2**power for power in range(length.bit_length()) if 2**power < length]
    return [(start, min(2 * start, length) - 1) for start in starts]


def measure_later(bench: Workbench, progress: Progress, *, positions: int) -> LaterTables:
    """Patch sampled positions one at a time, run each window to its end, and compare all later predictions."""
    spec, layers = bench.plan.spec, bench.plan.layers
    chosen = sample_positions(bench, positions)
    study = _Later(bench, chosen)
    parts: list[pd.DataFrame] = []
    units = len(layers) * len(spec.protocol) * len(spec.maps)
    with progress.step("patch and continue", units * len(chosen)) as advance:
        for layer in layers:
            states = bench.states(layer)
            for protocol in spec.protocol:
                fits = bench.fits(states, protocol)
                for name in spec.maps:
                    decomposition = fits.fit(parse_map(name)).decomposition
                    rows = study.rows(states, decomposition.tokenwise, decomposition.residual, advance)
                    key = {"layer": layer, "map": name, "fit": spec.fit, "protocol": protocol}
                    parts.append(pd.concat([pd.DataFrame([key] * len(rows)), rows], axis=1))
    return study.tables(pd.concat(parts, ignore_index=True))


def sample_positions(bench: Workbench, count: int) -> Int[Tensor, "positions 2"]:
    """Seeded (window, position) pairs, spread evenly over the windows, of included tokens that others follow.

    Raises:
        InputError: none was asked for.
        CorpusError: no included token has one after it.
    """
    if count < 1:
        raise InputError(f"positions is {count}; give at least 1")
    windows, included = bench.plan.corpus.evaluation, bench.captured.exclusions.included
    followed = included & (torch.arange(included.shape[1]) < windows.lengths[:, None] - 1)
    if not followed.any():
        raise CorpusError("no token that takes part has a later one; use longer windows")
    draw = torch.rand(included.shape, generator=torch.Generator().manual_seed(bench.plan.spec.seed))
    turn = torch.where(followed, draw, 2.0).argsort(dim=1).argsort(dim=1)
    pairs = torch.nonzero(followed)
    order = (turn[followed] * len(included) + pairs[:, 0]).argsort()
    return pairs[order[:count].sort().values]


class _Later:
    """Patches of the sampled positions, one per window and run."""

    def __init__(self, bench: Workbench, chosen: Int[Tensor, "positions 2"]) -> None:
        self._bench, self._chosen, self._runs = bench, chosen, Continuations(bench, chosen)
        self._windows = bench.plan.corpus.evaluation
        self._ranges = distance_ranges(int(self._windows.lengths.max()))
        documents = self._windows.documents.numpy()[chosen[:, 0]]
        clusters = clusters_of(documents, chosen[:, 0].numpy())
        codes = np.unique(clusters, return_inverse=True)[1]
        self._bootstrap = ClusterBootstrap(codes, resamples=bench.plan.spec.resamples, seed=bench.plan.spec.seed)

    def rows(
        self, states: LayerStates, tokenwise: Float[Tensor, "n d"], residual: Float[Tensor, "n d"], advance: Advance
    ) -> pd.DataFrame:
        """One row per sampled position: KL there, summed over later positions, and by distance, for both patches."""
        captured = self._bench.captured
        outputs, included = captured.evaluation.layer(states.layer)[1], captured.exclusions.included
        seed = layer_seed(self._bench.plan.spec.seed, states.layer)  # as a run's own control
        patched = {TOKENWISE: tokenwise, RANDOM: states.y - random_directions(residual, seed)}
        patches = {suffix: spread(rows, outputs, included) for suffix, rows in patched.items()}
        divergences = self._runs.divergences(states.layer, outputs, patches, advance)
        tokens = captured.tokens.set_index(["window", "position"])["token"]
        pairs = [(int(window), int(position)) for window, position in self._chosen]
        own = pd.DataFrame(pairs, columns=["window", "position"]).assign(token=[tokens[pair] for pair in pairs])
        measured = [self._measures(*pair, found) for pair, found in zip(pairs, divergences, strict=True)]
        return pd.concat([own, pd.DataFrame(measured)], axis=1)

    def _measures(self, window: int, position: int, divergences: Divergences) -> Row:
        length = int(self._windows.lengths[window])
        row: Row = {"later_tokens": length - 1 - position}
        for suffix, values in divergences.items():
            kl = values.double().numpy()
            after = kl[position + 1 : length]
            row |= {f"kl_own{suffix}": float(kl[position]), f"kl_later{suffix}": float(after.sum())}
            for start, stop in self._ranges:
                there = after[start - 1 : stop]
                row[f"{_column(start, stop)}{suffix}"] = float(there.mean()) if len(there) else float("nan")
        return row

    def tables(self, positions: pd.DataFrame) -> LaterTables:
        """Means over the sampled positions, with intervals, and by distance."""
        layers, distances = [], []
        for key, rows in positions.groupby(["layer", "map", "fit", "protocol"], sort=False):
            named = dict(zip(("layer", "map", "fit", "protocol"), key, strict=True))
            layers.append(named | self._summary(rows))
            distances += [named | row for row in self._by_distance(rows)]
        return LaterTables(pd.DataFrame(layers), pd.DataFrame(distances), positions)

    def _summary(self, rows: pd.DataFrame) -> Row:
        row: Row = {"positions": len(rows), "later_tokens": float(rows["later_tokens"].mean())}
        for suffix in (TOKENWISE, RANDOM):
            both = rows[f"kl_own{suffix}"] + rows[f"kl_later{suffix}"]
            row |= self._mean(f"kl_own{suffix}", rows[f"kl_own{suffix}"])
            row |= self._mean(f"kl_later{suffix}", rows[f"kl_later{suffix}"])
            row |= self._ratio(f"later_share{suffix}", rows[f"kl_later{suffix}"], both)
        row |= self._ratio("later_ratio_random", rows["kl_later"], rows["kl_later_random"])
        return row | {"noise_floor": self._bench.gate.proof.noise_floor.get("all", float("nan"))}

    def _by_distance(self, rows: pd.DataFrame) -> Iterator[Row]:
        for start, stop in self._ranges:
            values = {suffix: rows[f"{_column(start, stop)}{suffix}"] for suffix in (TOKENWISE, RANDOM)}
            row: Row = {"distance_from": start, "distance_to": stop}
            row["positions"] = int(values[TOKENWISE].notna().sum())
            for suffix, column in values.items():
                row |= self._mean(f"kl{suffix}", column)
            yield row

    def _mean(self, name: str, values: pd.Series) -> Row:
        return self._ratio(name, values, pd.Series(1.0, index=values.index))

    def _ratio(self, name: str, above: pd.Series, below: pd.Series) -> Row:
        kept = above.notna() & below.notna()
        total = float(below[kept].sum())
        low, high = self._bootstrap.ratio(above, below)
        return {name: float(above[kept].sum()) / total if total > 0 else float("nan")} | {
            f"{name}_lo": low,
            f"{name}_hi": high,
        }


def _column(start: int, stop: int) -> str:
    return f"kl_at_{start}" if start == stop else f"kl_at_{start}_{stop}"

"""Captured states with everything that is decided once for all layers: who takes part, partners, bootstrap."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from deltalens.core.association import LEAST_CLUSTERS, ClusterBootstrap
from deltalens.errors import InputError, ModelError
from deltalens.experiment.blocks import Block, all_partners, cut_blocks
from deltalens.experiment.corpus import Windows
from deltalens.experiment.exclusions import Exclusions, exclude
from deltalens.experiment.plan import Plan
from deltalens.experiment.progress import Progress
from deltalens.experiment.states import StateShards
from deltalens.experiment.summary import Summarizer, clusters_of
from deltalens.experiment.token_table import token_rows


@dataclass(frozen=True)
class Captured:
    """Captured states with what is decided once for all layers."""

    plan: Plan
    evaluation: StateShards
    pool: StateShards | None
    exclusions: Exclusions
    pool_exclusions: Exclusions | None
    tokens: pd.DataFrame
    pool_tokens: pd.DataFrame
    blocks: tuple[Block, ...]
    summarizer: Summarizer
    warnings: tuple[str, ...]

    @property
    def real(self) -> Bool[Tensor, "windows length"]:
        """Where the evaluation windows have a token."""
        return self.plan.corpus.evaluation.attention_mask.bool()

    @property
    def partner(self) -> Int[Tensor, " n"]:
        """For each included token, an included token of another window; -1 for none."""
        return all_partners(self.blocks)

    @property
    def included_rows(self) -> Bool[Tensor, " rows"]:
        """Which token rows take part."""
        return self.exclusions.included[self.real]

    def pool_part(self, pool_tokens: int | None) -> Bool[Tensor, " rows"]:
        """Which included pool tokens belong to a swept pool of that size; all of them where the pool isn't swept."""
        windows = torch.tensor(self.pool_tokens.loc[~self.pool_tokens["excluded"], "window"].to_numpy())
        if self.plan.corpus.pool is None or "pool_tokens" not in self.plan.spec.swept:
            return torch.ones(len(windows), dtype=torch.bool)
        assert pool_tokens is not None
        return self.plan.corpus.pool.nested(pool_tokens)[windows]


def capture_states(plan: Plan, progress: Progress) -> Captured:
    """Capture evaluation and pool states, and decide which tokens take part."""
    sets, batch_size = _sets(plan), plan.spec.batch_size
    with progress.step("capture states", sum(len(windows) for _, windows in sets)) as advance:
        fitted = [
            shards.capture(plan.model, windows, layers=plan.layers, batch_size=batch_size, advance=advance)
            for shards, windows in sets
        ]
    return _decided(plan, min(fitted))


def committed_states(plan: Plan) -> Captured:
    """What another process captured for the same plan, with the same decisions made again.

    Raises:
        StoreError: the states aren't in the run folder, or are damaged.
    """
    for shards, windows in _sets(plan):
        shards.verify(len(windows))
    return _decided(plan, plan.spec.batch_size)


def _sets(plan: Plan) -> list[tuple[StateShards, Windows]]:
    """The sets of windows that a plan captures, each with where its states lie."""
    corpus = plan.corpus
    windows = {"evaluation": corpus.evaluation} | ({"pool": corpus.pool} if corpus.pool is not None else {})
    return [(StateShards(plan.folder.states, name, plan.fingerprint), part) for name, part in windows.items()]


def _decided(plan: Plan, fitted: int) -> Captured:
    """Captured states with everything that they decide for all layers; ``fitted`` windows went through at once."""
    corpus, spec = plan.corpus, plan.spec
    shards, sets = zip(*_sets(plan), strict=True)
    norms = [shard.norms() for shard in shards]
    damage = _non_finite(list(sets), norms)
    exclusions = exclude(
        list(sets),
        norms,
        skip_first=spec.skip_first,
        max_norm_multiple=spec.max_norm_multiple,
    )
    tables = [
        token_rows(windows, corpus.document_names, excluded, plan.model.tokenizer)
        for windows, excluded in zip(sets, exclusions, strict=True)
    ]
    if damage and not exclusions[0].included.any():
        raise ModelError(f"{plan.model.identity.name} can't be measured: {damage}")
    _require_tokens(exclusions, spec.rows_per_fit)
    included = tables[0][~tables[0]["excluded"]]
    windows = included["window"].to_numpy()
    clusters = clusters_of(corpus.evaluation.documents.numpy()[windows], windows)
    codes = np.unique(clusters, return_inverse=True)[1]
    captured = Captured(
        plan=plan,
        evaluation=shards[0],
        pool=shards[1] if len(shards) > 1 else None,
        exclusions=exclusions[0],
        pool_exclusions=exclusions[1] if len(exclusions) > 1 else None,
        tokens=tables[0],
        pool_tokens=tables[-1],
        blocks=cut_blocks(exclusions[0].included, spec.seed),
        summarizer=Summarizer(ClusterBootstrap(codes, resamples=spec.resamples, seed=spec.seed), spec.error),
        warnings=_warnings(fitted, spec.batch_size, damage) + _few_clusters(codes, windows),
    )
    _require_pools(captured)
    return captured


def _require_pools(captured: Captured) -> None:
    """Refuse a swept pool that exclusions leave too small for a neighbourhood."""
    spec = captured.plan.spec
    needed = spec.rows_per_fit
    for size in spec.values("pool_tokens") if "pool_tokens" in spec.swept else ():
        left = int(captured.pool_part(size).sum())
        if left < needed:
            raise InputError(
                f"{left} of pool_tokens {size} are left without excluded ones, {needed} are needed; raise pool_tokens"
            )


def _non_finite(windows: list[Windows], norms: list[Tensor]) -> str | None:
    """Where states stop being finite: the first layer and how many tokens; None where all are."""
    bad = torch.cat([~torch.isfinite(n[w.attention_mask.bool()]) for w, n in zip(windows, norms, strict=True)])
    if not bad.any():
        return None
    first = int(torch.nonzero(bad.any(dim=0))[0])
    where = "in the embeddings" if first == 0 else f"first after layer {first - 1}"
    return f"{int(bad.any(dim=1).sum())} of {len(bad)} tokens have NaN or infinite states, {where}"


def _warnings(fitted: int, batch_size: int, damage: str | None) -> tuple[str, ...]:
    warnings = []
    if fitted < batch_size:
        warnings.append(f"{batch_size} windows didn't fit in memory at once; the batch was halved to {fitted}")
    if damage:
        warnings.append(f"{damage}; they are left out of every statistic")
    return tuple(warnings)


def _few_clusters(clusters: np.ndarray, windows: np.ndarray) -> tuple[str, ...]:
    count = len(np.unique(clusters))
    if count >= LEAST_CLUSTERS:
        return ()
    warnings = [
        f"{count} documents or windows have evaluation tokens; intervals need {LEAST_CLUSTERS} and are left out"
    ]
    if len(np.unique(windows)) == 1:
        warnings.append("shuffled controls and chance levels need a second window and are left out")
    return tuple(warnings)


def _require_tokens(exclusions: list[Exclusions], neighbors: int) -> None:
    for name, excluded in zip(("tokens", "pool_tokens"), exclusions, strict=False):
        left = int(excluded.included.sum())
        needed = (
            neighbors + 1 if name == "tokens" and len(exclusions) == 1 else neighbors if name == "pool_tokens" else 1
        )
        if left < needed:
            counts = ", ".join(f"{count} {reason}" for reason, count in excluded.counts().items() if count)
            raise InputError(f"{left} {name} are left ({counts} excluded), {needed} are needed; raise {name}")

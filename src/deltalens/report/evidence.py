"""The paper's claims that one run can answer, judged by fixed rules from its summary."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from deltalens.report.logic import (
    Values,
    above,
    at_least,
    both,
    counted,
    either,
    holm,
    in_share,
    middle,
    middle_of,
    number,
    typical,
    values_of,
)
from deltalens.report.points import point_name
from deltalens.report.protocol import RunLike, judged_protocol, sort_protocols

Verdict = Literal["supported", "partly", "not supported", "not measured"]

#: Maps that the best one is not chosen from: nothing, or next to nothing, is fitted.
TRIVIAL_MAPS = ("identity", "mean", "scalar", "isolated")
ERROR = "relative_update_error"


@dataclass(frozen=True)
class Judgement:
    """A verdict with the figures that led to it."""

    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class BestRows:
    """Summary rows of each layer's best map: under the judged protocol, and in sample for the same maps."""

    layers: tuple[int, ...]
    maps: tuple[str, ...]
    protocol: str | None
    judged: pd.DataFrame | None
    in_sample: pd.DataFrame | None

    def held(self, column: str) -> Values:
        """A column under the judged protocol, by layer."""
        return values_of(self.judged, column, len(self.layers))

    def sampled(self, column: str) -> Values:
        """The same in sample."""
        return values_of(self.in_sample, column, len(self.layers))

    def typical(self, column: str) -> str:
        """The median layer's figure under the judged protocol, with its interval."""
        return typical(self.judged, column, len(self.layers))

    def middle(self, column: str) -> str:
        """The median over layers of a figure that has no interval."""
        return middle_of(self.judged, column, len(self.layers))

    def typical_in_sample(self, column: str) -> str:
        """The median layer's figure in sample."""
        return typical(self.in_sample, column, len(self.layers))

    @property
    def named(self) -> str:
        """How the figures were got: protocol, and which maps were best how often."""
        if self.protocol is None:
            return "In sample only"
        names = Counter(self.maps).most_common()
        where = ", ".join(f"{name} in {count}" for name, count in names) if len(names) > 1 else f"{names[0][0]} in all"
        return f"{self.protocol.replace('_', ' ').capitalize()} (best map: {where})"


def fitted_rows(summary: pd.DataFrame) -> pd.DataFrame:
    """Rows of the maps that the best one is chosen from."""
    kept: pd.DataFrame = summary[~summary["map"].astype(str).isin(TRIVIAL_MAPS)]
    return kept


def best_rows(summary: pd.DataFrame) -> BestRows | None:
    """Each layer's fitted map with the least relative update error, judged held out where that was run."""
    fitted = fitted_rows(summary)
    if fitted.empty or ERROR not in fitted or fitted[ERROR].notna().sum() == 0:
        return None
    protocols = sort_protocols(set(fitted["protocol"].astype(str)))
    judged = judged_protocol(protocols)
    chosen = fitted[fitted["protocol"] == (judged or protocols[0])].dropna(subset=[ERROR])
    chosen = chosen.sort_values(["layer", ERROR], kind="stable").drop_duplicates("layer")
    keys = chosen[["layer", "map", "fit"]]
    in_sample = keys.merge(fitted[fitted["protocol"] == "in_sample"], on=["layer", "map", "fit"], how="left")
    return BestRows(
        layers=tuple(int(v) for v in chosen["layer"]),
        maps=tuple(chosen["map"].astype(str)),
        protocol=judged,
        judged=chosen if judged else None,
        in_sample=in_sample if "in_sample" in protocols else None,
    )


def decide(full: bool | None, partial: bool | None) -> Verdict:
    """The verdict of a rule with a whole and a partial form; unknown where a missing figure would decide."""
    if full is True:
        return "supported"
    if full is None:
        return "not measured"
    if partial is None:
        return "not measured"
    return "partly" if partial else "not supported"


def judge_alignment(best: BestRows) -> Judgement:
    """Claim 1."""
    low = best.held("cos_full_tokenwise_lo")
    gap = best.held("cos_full_tokenwise") - best.held("cos_full_tokenwise_null")
    gaps = above(gap, 0.1)
    full = in_share(both(at_least(low, 0.95), gaps), 0.8)
    with_gap = in_share(both(at_least(low, 0.8), gaps), 0.8)
    in_sample = in_share(at_least(best.sampled("cos_full_tokenwise_lo"), 0.95), 0.8)
    partial = True if with_gap or in_sample else (None if with_gap is None else False)
    if best.protocol is None:
        full = False if in_sample is not None else None
        partial = in_sample
    corrected = holm(best.held("cos_full_tokenwise"), low, 0.95)
    text = (
        f"{best.named}: |cos| {best.typical('cos_full_tokenwise')} at the median layer, at least 0.95 in "
        f"{counted(at_least(low, 0.95))} (Holm-corrected {counted(corrected)}). Null "
        f"{best.middle('cos_full_tokenwise_null')}; gap above 0.1 in {counted(gaps)}. In sample "
        f"{best.typical_in_sample('cos_full_tokenwise')}."
    )
    return Judgement(decide(full, partial), text)


def judge_angles(best: BestRows) -> Judgement:
    """Claim 2."""
    wide = above(best.held("share_residual_over_60_lo"), 0.5)
    chance = best.held("cos_residual_tokenwise_chance")
    low, high = best.held("cos_residual_tokenwise_lo"), best.held("cos_residual_tokenwise_hi")
    differs = either(above(low, chance), above(chance, high))
    broad, full = in_share(wide, 0.8), in_share(both(wide, differs), 0.8)
    verdict: Verdict = (
        "not measured" if broad is None else "not supported" if not broad else "supported" if full else "partly"
    )
    text = (
        f"{best.named}: {best.typical('share_residual_over_60')} of residuals over 60° at the median layer, over "
        f"half in {counted(wide)}; by chance {best.middle('share_residual_over_60_chance')}. Residual's |cos| "
        f"{best.typical('cos_residual_tokenwise')} against chance {best.middle('cos_residual_tokenwise_chance')}, "
        f"different in {counted(differs)}."
    )
    return Judgement(verdict, text)


def judge_projection(best: BestRows) -> Judgement:
    """Claim 3."""

    def conditions(value: Callable[[str], Values]) -> Values:
        small = at_least(0.5 * value("proj_full"), value("proj_residual_hi"))
        return both(small, above(value("proj_full") - value("proj_full_null"), 0.0))

    full = in_share(conditions(best.held), 0.8)
    in_sample = in_share(conditions(best.sampled), 0.8)
    partial = bool(in_sample)
    if best.protocol is None:
        full = None if in_sample is None else False
    small = at_least(0.5 * best.held("proj_full"), best.held("proj_residual_hi"))
    text = (
        f"{best.named}: residual {best.typical('proj_residual')}, full update {best.typical('proj_full')} at the "
        f"median layer; at most half in {counted(small)}. Null of the full update "
        f"{best.middle('proj_full_null')}, chance of the residual {best.middle('proj_residual_chance')}. In "
        f"sample {best.typical_in_sample('proj_residual')} against {best.typical_in_sample('proj_full')}."
    )
    return Judgement(decide(full, partial), text)


def judge_association(best: BestRows) -> Judgement:
    """Claim 4."""
    strong = at_least(best.held("spearman_lo"), 0.7)
    beyond = either(above(best.held("spearman_minus_random_lo"), 0.0), above(best.held("kl_ratio_shuffled_lo"), 1.0))
    first, full = in_share(strong, 0.5), in_share(both(strong, beyond), 0.5)
    verdict: Verdict = (
        "not measured" if first is None else "not supported" if not first else "supported" if full else "partly"
    )
    if first and full is None:
        verdict = "not measured"
    text = (
        f"{best.named}: Spearman {best.typical('spearman')} at the median layer, at least 0.7 in "
        f"{counted(strong)} (Holm-corrected "
        f"{counted(holm(best.held('spearman'), best.held('spearman_lo'), 0.7))}). Random control "
        f"{best.typical('spearman_random')}, difference {best.typical('spearman_minus_random')}; KL "
        f"{best.typical('kl_ratio_shuffled')} times that of another token's residual direction, "
        f"{best.typical('kl_ratio_random')} times random's."
    )
    return Judgement(verdict, text)


def judge_swaps(best: BestRows) -> Judgement:
    """Claim 5."""
    worse = above(best.held("swap_log_ratio_lo"), 0.0)
    matched = above(best.held("swap_log_ratio_matched_lo"), 0.0)
    full, partial = in_share(worse, 0.8), in_share(matched, 0.8)
    text = (
        f"{best.named}: log KL(T(x)) − log KL(x + r) {best.typical('swap_log_ratio')} at the median layer, above "
        f"0 in {counted(worse)}. Size matched {best.typical('swap_log_ratio_matched')}, above 0 in "
        f"{counted(matched)}. Median KL {best.middle('kl_single')} without the residual, "
        f"{best.middle('kl_residual_only')} without the tokenwise part."
    )
    return Judgement(decide(full, partial), text)


def judge_depth(best: BestRows) -> Judgement:
    """Claim 6."""
    if best.judged is None or len(best.layers) < 6:
        return Judgement("not measured", f"Layers measured: {len(best.layers)}; the rule needs 6, not only in sample.")
    thirds = np.array_split(np.arange(len(best.layers)), 3)
    error = [middle(best.held(ERROR)[t]) for t in thirds]
    cosine = [middle(best.held("cos_full_tokenwise")[t]) for t in thirds]
    if not np.isfinite(error + cosine).all():
        return Judgement("not measured", f"{best.named}: a third of the layers has no alignment or no error.")
    comparisons = (error[1] > error[0], error[1] > error[2], cosine[1] < cosine[0], cosine[1] < cosine[2])
    verdict: Verdict = {4: "supported", 3: "partly"}.get(sum(comparisons), "not supported")  # type: ignore[assignment]
    text = (
        f"{best.named}: relative update error {' / '.join(map(number, error))} and alignment "
        f"{' / '.join(map(number, cosine))} in the first, middle and last third; {sum(comparisons)} of 4 "
        "comparisons hold."
    )
    return Judgement(verdict, text)


def judge_regimes(summary: pd.DataFrame) -> Judgement:
    """Claim 8."""
    best = best_rows(summary)
    if best is None or best.judged is None or fitted_rows(summary)["map"].nunique() < 2:
        return Judgement("not measured", "The rule needs several fitted maps, judged outside their own sample.")
    held = fitted_rows(summary)
    held = held[held["protocol"] == best.protocol]
    linear = _class_rows(held, ("linear", "low_rank"), best.layers)
    small = _class_rows(held, ("mlp",), best.layers)
    error = best.held(ERROR)
    easy = error < middle(error)
    if linear is None or not easy.any():
        return Judgement("not measured", "The rule needs a linear or low_rank map and two layers.")
    spearman = values_of(linear, "spearman_lo", len(error))[easy]
    keeps = bool(middle(spearman) >= 0.7) if np.isfinite(spearman).any() else None
    gain = (values_of(small, "spearman", len(error)) - values_of(linear, "spearman", len(error)))[~easy]
    saved = (values_of(linear, ERROR, len(error)) - values_of(small, ERROR, len(error)))[~easy]
    recovers = bool(middle(gain) > 0 and middle(saved) > 0) if np.isfinite(gain + saved).any() else None
    verdict: Verdict = "not measured"
    if keeps is not None and recovers is not None:
        verdict = {2: "supported", 1: "partly", 0: "not supported"}[int(keeps) + int(recovers)]  # type: ignore[assignment]
    shown = values_of(linear, "spearman", len(error))[easy]
    compared = f"{_signed(gain)} in Spearman, {_signed(-saved)} in error" if recovers is not None else "not measured"
    text = (
        f"{best.named}: in the {int(easy.sum())} layers of lower error linear or low-rank Spearman "
        f"{number(middle(shown))} (lower end {number(middle(spearman))}); in the other {int((~easy).sum())} the small "
        f"network against it: {compared} (medians over layers)."
    )
    return Judgement(verdict, text)


def _signed(values: Values) -> str:
    value = middle(values)
    return ("+" if value >= 0 else "") + number(value)


def _class_rows(held: pd.DataFrame, families: tuple[str, ...], layers: tuple[int, ...]) -> pd.DataFrame | None:
    rows = held[held["map"].astype(str).str.split(":").str[0].isin(families)].dropna(subset=[ERROR])
    if rows.empty:
        return None
    rows = rows.sort_values(["layer", ERROR], kind="stable").drop_duplicates("layer").set_index("layer")
    return rows.reindex(list(layers))


JUDGES = {
    1: judge_alignment, 2: judge_angles, 3: judge_projection, 4: judge_association, 5: judge_swaps, 6: judge_depth,
}  # fmt: skip


def judge_run(run: RunLike) -> dict[int, Judgement]:
    """Claims 1 to 6 and 8 on one run."""
    summary = run.summary()
    best = best_rows(summary)
    if best is None:
        nothing = Judgement("not measured", "The run has no fitted map beside the trivial ones.")
        return dict.fromkeys((*JUDGES, 8), nothing)
    found = {claim: judge(best) for claim, judge in JUDGES.items()} | {8: judge_regimes(summary)}
    point = run.manifest.get("point")
    if not point:
        return found
    return {claim: replace(each, evidence=f"At {point_name(point)}. {each.evidence}") for claim, each in found.items()}

"""The paper's nine claims with a verdict each, from one run or from several."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain

import numpy as np

from deltalens.errors import InputError
from deltalens.report.evidence import ERROR, Judgement, Verdict, fitted_rows, judge_run
from deltalens.report.logic import number
from deltalens.report.points import at_point
from deltalens.report.protocol import RunLike, distinct_names, judged_protocol, model_facts, run_name, sort_protocols

TITLES = {
    1: "The full update is almost perfectly aligned with the tokenwise update",
    2: "The residual points elsewhere",
    3: "The residual lies mostly outside the dominant tokenwise subspace",
    4: "Approximation error predicts the change of the output",
    5: "Dropping the residual, not the tokenwise part, changes predictions",
    6: "Middle layers have larger residuals and weaker alignment",
    7: "Small models are served by simple maps, larger ones need richer classes",
    8: "Linear maps keep the correlation at low error; small networks recover it at high error",
    9: "None of this needs attention: a state-space model shows the same",
}
RULES = {
    1: "The best map's cos_full_tokenwise is at least 0.95 with a null gap above 0.1 in 80% of layers. "
    "Partly: at least 0.8 with that gap, or at least 0.95 in sample only.",
    2: "Over half of the residual angles exceed 60° in 80% of layers, and cos_residual_tokenwise differs "
    "from chance there. Partly: the first alone, which high dimension gives by itself.",
    3: "proj_residual is at most half of proj_full, whose null gap is positive, in 80% of layers. Partly: in "
    "sample only.",
    4: "Spearman is at least 0.7 in half of the layers, and there either its excess over the random control "
    "is above 0 or the KL ratio to another token's residual above 1. Partly: at least 0.7, but size "
    "explains it. Needs 8 documents or windows.",
    5: "The median of log KL(T(x)) − log KL(x + r) is above 0 in 80% of layers. Partly: only after size "
    "matching, KL(y − r) > KL(y − ‖r‖ Δ_tok/‖Δ_tok‖).",
    6: "The middle third's relative update error is above, and its alignment below, both outer thirds'. "
    "Partly: one of the four comparisons fails. Needs 6 layers.",
    7: "The smallest class within 10% of the best error never shrinks and in all grows with model size. "
    "Classes by size: diagonal, low_rank by rank, orthogonal, linear, affine, mlp. Needs models of 3 sizes.",
    8: "In the layers under the median error the linear or low_rank Spearman is at least 0.7; in the others "
    "the mlp's exceeds it while its error is lower (medians over those layers). Partly: one of the two.",
    9: "The verdicts of claims 1 to 6 on a state-space model equal a Transformer's. Partly: 4 of 6 equal.",
}
SHARED_RULE = (
    "Held-out medians; “at least” uses the lower end of the 95% interval, “at most” the upper. Best: per "
    "layer, the fitted map with the least held-out relative update error, not counting identity, mean and "
    "scalar."
)
CLASS_ORDER = ("diagonal", "low_rank", "orthogonal", "linear", "affine", "mlp")
ATTENTION = frozenset({"attention", "sliding_attention"})
ATTENTION_FREE = frozenset({"mamba", "mamba2", "recurrent", "rwkv", "linear_attention", "convolution", "mlp"})


@dataclass(frozen=True)
class Claim:
    """One of the paper's claims, judged.

    Attributes:
        id: 1 to 9.
        title: the claim.
        verdict: `supported`, `partly`, `not supported` or `not measured`.
        evidence: the figures for and against it, with interval and control.
        rule: by which the verdict was reached.
    """

    id: int
    title: str
    verdict: Verdict
    evidence: str
    rule: str

    def to_dict(self) -> dict[str, object]:
        """The claim as plain data for JSON."""
        return asdict(self)


def claims_for(runs: Sequence[RunLike]) -> list[Claim]:
    """The nine claims, judged on one run or on several.

    A run that sweeps is judged at its first point. With several runs a claim has a run's verdict where all
    agree, `partly` where they differ and one speaks for it.

    Args:
        runs: finished runs, in any order.

    Returns:
        Nine claims in the paper's order.

    Raises:
        InputError: no run was given.
    """
    if not runs:
        raise InputError("claims need at least one run, got none; name a run folder")
    runs = [at_point(run) for run in runs]
    judged = [judge_run(run) for run in runs]
    names = distinct_names(runs)
    found = {claim: merge_judgements([j[claim] for j in judged], names) for claim in (1, 2, 3, 4, 5, 6, 8)}
    found[7] = judge_classes(runs)
    found[9] = judge_architecture(runs, judged, names)
    return [Claim(i, TITLES[i], found[i].verdict, found[i].evidence, RULES[i]) for i in range(1, 10)]


def merge_judgements(judgements: list[Judgement], names: list[str]) -> Judgement:
    """One verdict from several runs' verdicts on the same claim."""
    if len(judgements) == 1:
        return judgements[0]
    measured = {j.verdict for j in judgements} - {"not measured"}
    verdict: Verdict
    if not measured:
        verdict = "not measured"
    elif len(measured) == 1:
        verdict = measured.pop()
    else:
        verdict = "partly"
    lines = [f"{name}: {j.verdict}. {j.evidence}" for name, j in zip(names, judgements, strict=True)]
    return Judgement(verdict, "\n".join(lines))


def class_rank(name: str) -> tuple[int, int]:
    """Where a map stands in the order of classes; those that claim 7 leaves out come last."""
    family, _, size = name.partition(":")
    order = CLASS_ORDER.index(family) if family in CLASS_ORDER else len(CLASS_ORDER)
    return order, int(size) if size.isdigit() else 0


def class_errors(runs: Sequence[RunLike]) -> dict[str, float]:
    """Each fitted map's relative update error outside its own sample: medians over layers, then over runs of a size."""
    each = [_class_errors(run) for run in runs]
    return {name: float(np.median([e[name] for e in each if name in e])) for name in dict.fromkeys(chain(*each))}


def _class_errors(run: RunLike) -> dict[str, float]:
    rows = fitted_rows(run.summary())
    judged = judged_protocol(sort_protocols(set(rows["protocol"].astype(str))))
    ranked = [name for name in rows["map"].astype(str).unique() if class_rank(name)[0] < len(CLASS_ORDER)]
    rows = rows[(rows["protocol"] == judged) & rows["map"].isin(ranked)]
    medians = rows.groupby("map", observed=True)[ERROR].median().dropna()
    return {str(name): float(value) for name, value in medians.items()}


def judge_classes(runs: Sequence[RunLike]) -> Judgement:
    """Claim 7."""
    sizes: dict[int, list[RunLike]] = {}
    for run in runs:
        sizes.setdefault(int(model_facts(run).get("parameters") or 0), []).append(run)
    sized = [sizes[size] for size in sorted(sizes)]
    errors = [class_errors(same) for same in sized]
    common = set.intersection(*(set(e) for e in errors)) if errors else set()
    if len(sized) < 3 or len(common) < 2:
        return Judgement(
            "not measured",
            f"Sizes of models: {len(sized)}, maps that all share: {len(common)}; the rule needs 3 and 2.",
        )
    needed = [min((m for m in common if e[m] <= 1.1 * min(e[c] for c in common)), key=class_rank) for e in errors]
    ranks = [class_rank(m) for m in needed]
    grows = ranks == sorted(ranks) and ranks[0] < ranks[-1]
    parts = [f"{run_name(r[0])}: {m} ({number(e[m])})" for r, m, e in zip(sized, needed, errors, strict=True)]
    return Judgement(
        "supported" if grows else "not supported", "Smallest sufficient class by model size: " + "; ".join(parts) + "."
    )


def mixing(run: RunLike) -> str:
    """`attention`, `state space` or `mixed`, from what the blocks are."""
    kinds = {str(kind) for kind in model_facts(run).get("block_kinds") or ()}
    if kinds and kinds <= ATTENTION_FREE and kinds != {"mlp"}:
        return "state space"
    return "attention" if kinds & ATTENTION and kinds <= ATTENTION | {"mlp"} else "mixed"


def judge_architecture(runs: Sequence[RunLike], judged: list[dict[int, Judgement]], names: Sequence[str]) -> Judgement:
    """Claim 9: the state-space model and the Transformer nearest to it in size."""
    kinds = [mixing(run) for run in runs]
    pairs = [(i, j) for i, a in enumerate(kinds) for j, b in enumerate(kinds) if (a, b) == ("state space", "attention")]
    if not pairs:
        return Judgement(
            "not measured", f"Only models of kind: {', '.join(sorted(set(kinds)))}; the rule needs both kinds."
        )

    def distance(pair: tuple[int, int]) -> float:
        sizes = [float(model_facts(runs[i]).get("parameters") or np.nan) for i in pair]
        gap = abs(np.log(sizes[0]) - np.log(sizes[1]))
        return float(gap) if np.isfinite(gap) else float("inf")

    first, second = min(pairs, key=distance)
    verdicts = [(judged[first][c].verdict, judged[second][c].verdict) for c in range(1, 7)]
    known = [a == b for a, b in verdicts if "not measured" not in (a, b)]
    equal, unknown = sum(known), 6 - len(known)
    verdict: Verdict
    if equal == 6:
        verdict = "supported"
    elif equal >= 4:
        verdict = "partly"
    else:
        verdict = "not measured" if equal + unknown >= 4 else "not supported"
    listed = "; ".join(f"{c}: {a} / {b}" for c, (a, b) in enumerate(verdicts, start=1))
    return Judgement(verdict, f"{names[first]} / {names[second]}: {equal} of 6 verdicts equal ({listed}).")

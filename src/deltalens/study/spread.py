"""How far a study's figures and verdicts move over seeds: smallest, middle and largest, per layer and map.

A run that sweeps counts with its first point, as everywhere in a study.
"""

from collections.abc import Sequence

import pandas as pd

from deltalens.report.claims import TITLES
from deltalens.report.points import at_point
from deltalens.report.protocol import RunLike, judged_protocol, sort_protocols
from deltalens.study.verdicts import JOINT, Verdicts

#: Figures that the verdicts rest on.
KEY_FIGURES = (
    "cos_full_tokenwise", "relative_update_error", "share_residual_over_60", "cos_residual_tokenwise", "proj_full",
    "proj_residual", "kl_single", "spearman", "spearman_minus_random", "kl_ratio_shuffled", "swap_log_ratio",
)  # fmt: skip
KEY = ["group", "layer", "map", "fit", "protocol"]


def figure_spread(groups: Sequence[str], runs: Sequence[RunLike]) -> pd.DataFrame:
    """Each key figure's spread over the runs of a group.

    Args:
        groups: of each run; runs of a group differ by seed alone.
        runs: the runs.

    Returns:
        One row per group, layer, map, fit, protocol and measure: ``runs`` (how many have the figure), ``min``,
        ``median``, ``max``. Undefined figures are left out of all of them.
    """
    tables = [at_point(run).summary().assign(group=group) for group, run in zip(groups, runs, strict=True)]
    table = pd.concat(tables, ignore_index=True)
    present = [name for name in KEY_FIGURES if name in table]
    long = table.melt(id_vars=KEY, value_vars=present, var_name="measure", value_name="value")
    grouped = long.groupby([*KEY, "measure"], observed=True, sort=True)["value"]
    spread: pd.DataFrame = grouped.agg(runs="count", min="min", median="median", max="max").reset_index()
    return spread


def typical_spread(groups: Sequence[str], runs: Sequence[RunLike]) -> pd.DataFrame:
    """The spread of each map's median layer, under the protocol that verdicts rest on.

    Args:
        groups: of each run.
        runs: the runs.

    Returns:
        One row per group, map and measure, with the columns of `figure_spread`.
    """
    parts = []
    for group, run in zip(groups, runs, strict=True):
        summary = at_point(run).summary()
        protocols = sort_protocols(set(summary["protocol"].astype(str)))
        own = summary[summary["protocol"] == (judged_protocol(protocols) or protocols[0])]
        present = [name for name in KEY_FIGURES if name in own]
        medians = own.groupby(["map", "fit"], observed=True)[present].median().reset_index().assign(group=group)
        parts.append(medians.melt(id_vars=["group", "map", "fit"], var_name="measure", value_name="value"))
    grouped = pd.concat(parts, ignore_index=True).groupby(["group", "map", "fit", "measure"], observed=True, sort=False)
    spread: pd.DataFrame = grouped["value"].agg(runs="count", min="min", median="median", max="max").reset_index()
    return spread


def verdict_spread(groups: Sequence[str], verdicts: Verdicts) -> pd.DataFrame:
    """How often each verdict came on each claim that one run can answer.

    Args:
        groups: of each run.
        verdicts: of the same runs.

    Returns:
        One row per group and claim: ``supported``, ``partly``, ``not supported``, ``not measured`` (counts) and
        ``agree``, whether all runs of the group say the same.
    """
    rows = []
    for group in dict.fromkeys(groups):
        own = [each for name, each in zip(groups, verdicts.each, strict=True) if name == group]
        for claim in (number for number in TITLES if number not in JOINT):
            said = [claims[claim - 1].verdict for claims in own]
            counts = {v: said.count(v) for v in ("supported", "partly", "not supported", "not measured")}
            rows.append({"group": group, "claim": claim} | counts | {"agree": len(set(said)) == 1})
    return pd.DataFrame(rows)

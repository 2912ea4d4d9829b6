"""How a run shows itself in a notebook: who it is, what holds, and its medians."""

from deltalens.report.claims import claims_for
from deltalens.report.html import MARKS, environment
from deltalens.report.payload import axes_of
from deltalens.report.points import at_point
from deltalens.report.protocol import RunLike, judged_protocol, run_name
from deltalens.report.provenance import headline_facts

_COLUMNS = {
    "relative_update_error": "residual size", "cos_full_tokenwise": "alignment", "share_residual_over_60": "over 60°",
    "proj_full": "proj. update", "proj_residual": "proj. residual", "kl_single": "KL, nats", "spearman": "Spearman",
}  # fmt: skip


def notebook_html(run: RunLike) -> str:
    """A fragment of HTML without scripts that a notebook shows for a run.

    Args:
        run: a finished run.

    Returns:
        HTML, with every string of the run escaped.
    """
    run = at_point(run)
    summary = run.summary()
    axes = axes_of(summary, run.manifest)
    protocol = judged_protocol(axes.protocols) or axes.protocols[0]
    columns = [c for c in _COLUMNS if c in summary]
    by_map = summary[summary["protocol"] == protocol].groupby(["map", "fit"], observed=True)[columns].median()
    medians = {
        pair: [f"{float(v):.3g}" for v in row] for pair, row in zip(by_map.index, by_map.to_numpy(), strict=True)
    }
    rows = [(label, medians[pair]) for pair, label in zip(axes.series, axes.labels, strict=True) if pair in medians]
    return (
        environment()
        .get_template("notebook.html.j2")
        .render(
            name=run_name(run),
            facts=headline_facts(run.manifest),
            claims=claims_for([run]),
            marks=MARKS,
            protocol=protocol.replace("_", " "),
            headings=[_COLUMNS[c] for c in columns],
            rows=rows,
            folder=str(run.folder),
        )
    )

"""What is written from a study's finished runs: tables of the claims, the comparison, the spread, the index."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from deltalens.api import Run
from deltalens.experiment.commit import write_file
from deltalens.report import compare_report
from deltalens.report.logic import number
from deltalens.report.points import at_point
from deltalens.report.protocol import model_facts
from deltalens.report.training import write_training_figures
from deltalens.study.contrasts import contrast_markdown
from deltalens.study.markdown import markdown_table
from deltalens.study.record import Outcome, Record
from deltalens.study.spread import figure_spread, typical_spread, verdict_spread
from deltalens.study.study import finished_runs
from deltalens.study.verdicts import FILES, Verdicts, judge, mark, matrix_markdown, write_text, write_verdicts


def write_pages(folder: Path, record: Record) -> Record:
    """Write everything that a study shows beside its runs; return the record with its warnings.

    Nothing but the index is written where no run is finished.
    """
    groups, finished = finished_runs(folder, record)
    record = replace(record, warnings=tuple(equal_weights(finished)))
    runs = [at_point(run) for run in finished]  # a run that sweeps is shown at its first point
    if not runs:
        write_text(folder / "README.md", index_page(record, None, {}))
        return record
    verdicts = judge([run.folder.name for run in runs], runs)
    write_verdicts(verdicts, folder)
    sections = contrast_markdown([run.folder.name for run in runs], runs)
    if len(runs) > 1:
        compare_report(runs, folder / "compare.html")
    if record.kind != "checkpoints" and len(set(groups)) < len(groups):
        spread, said = figure_spread(groups, runs), verdict_spread(groups, verdicts)
        write_file(folder / "spread.csv", lambda path: spread.to_csv(path, index=False))
        write_file(folder / "verdicts.csv", lambda path: said.to_csv(path, index=False))
        sections["Spread"] = spread_markdown(typical_spread(groups, runs), said)
    if record.kind == "checkpoints":
        labels = [run.manifest["spec"]["revision"] for run in runs]
        sections["Layers against training"] = training_markdown(
            write_training_figures(runs, labels, folder / "figures")
        )
    write_text(folder / "README.md", index_page(record, verdicts, sections))
    return record


def equal_weights(runs: Sequence[Run]) -> list[str]:
    """A sentence for each pair of runs that name different models or revisions with equal weights."""
    facts = [model_facts(run) | {"asked": (run.manifest.get("spec") or {}).get("revision")} for run in runs]
    return [
        f"{runs[i].folder.name} and {runs[j].folder.name} have equal weights, byte for byte: they are one model, and "
        f"the source may have ignored the revision"
        for i, j in combinations(range(len(runs)), 2)
        if facts[i].get("weight_hash") == facts[j].get("weight_hash") and _called(facts[i]) != _called(facts[j])
    ]


def _called(facts: dict[str, Any]) -> tuple[object, object]:
    return facts.get("name"), facts["asked"]


def index_page(record: Record, verdicts: Verdicts | None, sections: dict[str, str]) -> str:
    """The study's ``README.md``: what ran, what failed and why, the verdicts, and where everything lies."""
    lines = [f"# {record.title}", ""]
    lines += [f"> Warning: {warning}." for warning in record.warnings]
    if record.warnings:
        lines.append("")
    rows = [_outcome_row(outcome) for outcome in record.outcomes]
    lines.append(markdown_table(["run", "model", "state", "minutes", "report"], rows))
    if verdicts is not None:
        lines += ["## Verdicts", "", matrix_markdown(verdicts)]
        links = ", ".join(f"[{claim}](claims/{stem}.md)" for claim, stem in FILES.items())
        lines += [f"Evidence, claim by claim: {links}."]
        if len(verdicts.names) > 1:
            lines += ["", "All runs side by side: [compare.html](compare.html)."]
    for title, text in sections.items():
        lines += ["", f"## {title}", "", text]
    return "\n".join(lines).rstrip() + "\n"


def _outcome_row(outcome: Outcome) -> list[str]:
    member = outcome.member
    model = member.spec.model + (f" @ {member.spec.revision}" if member.spec.revision else "")
    minutes = "" if outcome.seconds is None else f"{outcome.seconds / 60:.1f}"
    report = f"[report]({member.name}/report.html)" if outcome.state == "done" else (outcome.reason or "")
    return [member.name, model, outcome.state, minutes, report]


def training_markdown(paths: Sequence[Path]) -> str:
    """The figures of depth against training, as images of the index."""
    return "\n\n".join(f"![{path.stem}](figures/{path.name})" for path in paths if path.suffix == ".png")


def spread_markdown(figures: Any, said: Any) -> str:
    """The spread over seeds: how often each verdict came, and the key figures of each map's median layer."""
    kinds = ("supported", "partly", "not supported", "not measured")
    counts = [
        [row["group"], str(row["claim"]), *(str(row[kind] or "") for kind in kinds)] for row in said.to_dict("records")
    ]
    ends = [
        [row["group"], row["map"], row["measure"], *(number(row[end]) for end in ("min", "median", "max"))]
        for row in figures.to_dict("records")
    ]
    first = markdown_table(["model", "claim", *map(mark, kinds)], counts)
    second = markdown_table(["model", "map", "figure, median layer", "smallest", "median", "largest"], ends)
    return f"{first}\n{second}\nLayer by layer: [spread.csv](spread.csv), [verdicts.csv](verdicts.csv).\n"

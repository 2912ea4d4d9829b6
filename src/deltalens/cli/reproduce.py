"""Commands that make several runs: ``reproduce``, ``repeat``, ``checkpoints``."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deltalens.cli.app import FAILED, app
from deltalens.cli.options import Parameter, with_spec_options
from deltalens.errors import InputError

if TYPE_CHECKING:
    from deltalens.study.series import Series
    from deltalens.study.study import Study

OutOption = Annotated[Path | None, typer.Option(help="Folder of the study. Default: a new one below runs/.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue the study in --out.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No plan, no progress and no tables.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan and do nothing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def reproduce(
    small: Annotated[bool, typer.Option("--small", help="Built-in models and SmolLM2: no Hub, under an hour.")] = False,
    study: Annotated[Path | None, typer.Option(help="YAML file with a study of your own.")] = None,
    models: Annotated[str | None, typer.Option(help="Only these models, comma-separated.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Each run once per seed, comma-separated.")] = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run the paper's study; one table per claim and one comparison. Exit code 1 if any run failed, after the rest."""
    from deltalens.study.verbs import study_series

    names = None if models is None else _listed(models, "models")
    numbers = None if seeds is None else _numbers(seeds)
    series = None
    if not small and study is None and names is None and numbers is None:
        series = _recorded(out, resume)
    series = series or study_series(small=small, study=study, models=names, seeds=numbers)
    _make(series, out, _How(resume, dry_run, quiet, as_json))


def _repeat(seeds: str | None, out: Path | None, fields: dict[str, object], **how: bool) -> None:
    from deltalens.study.verbs import repeat_series

    series = _recorded(out, how["resume"]) if seeds is None and not fields else None
    if series is None:
        series = repeat_series(None, None, _numbers(_needed(seeds, "seeds", "0,1,2")), fields)
    _make(series, out, _How(**how))


def _checkpoints(revisions: str | None, out: Path | None, fields: dict[str, object], **how: bool) -> None:
    from deltalens.study.verbs import checkpoint_series

    series = _recorded(out, how["resume"]) if revisions is None and not fields else None
    if series is None:
        named = _listed(_needed(revisions, "revisions", "step0,step1000"), "revisions")
        series = checkpoint_series(None, None, named, fields)
    _make(series, out, _How(**how))


_SHARED: list[Parameter] = [
    ("out", OutOption, None),
    ("resume", ResumeOption, False),
    ("dry_run", DryRunOption, False),
    ("quiet", QuietOption, False),
    ("as_json", JsonOption, False),
]
_SEEDS = Annotated[str | None, typer.Option(help="One run per seed, comma-separated, such as 0,1,2.")]
_REVISIONS = Annotated[
    str | None, typer.Option(help="Branches, tags or commits in the order of training, comma-separated.")
]

app.command("repeat")(
    with_spec_options(
        _repeat, [("seeds", _SEEDS, None), *_SHARED], "Run MODEL once per seed, with the spread of every verdict."
    )
)
app.command("checkpoints")(
    with_spec_options(
        _checkpoints,
        [("revisions", _REVISIONS, None), *_SHARED],
        "Run MODEL once per training revision, with figures of depth against training.",
    )
)


@dataclass(frozen=True)
class _How:
    """How a study is made and shown."""

    resume: bool
    dry_run: bool
    quiet: bool
    as_json: bool


def _make(series: "Series", out: Path | None, how: _How) -> None:
    from deltalens.experiment.progress import Bars, Silent
    from deltalens.study.forecast import forecast
    from deltalens.study.tables import plan_table
    from deltalens.study.verbs import run_study

    plan = forecast(series.members)
    console = Console()
    if how.dry_run and how.as_json:
        typer.echo(json.dumps({"title": series.title, "plan": [asdict(row) for row in plan]}))
    elif not how.as_json and (how.dry_run or not how.quiet):
        console.print(plan_table(plan))
    if how.dry_run:
        return
    progress = Silent() if how.quiet or how.as_json else Bars(Console(stderr=True))
    study = run_study(series, out, how.resume, progress)
    if how.as_json:
        typer.echo(json.dumps(study_fields(study), ensure_ascii=False))
    else:
        _show(study, console, quiet=how.quiet)
    if study.failures:
        raise typer.Exit(FAILED)


def _show(study: "Study", console: Console, *, quiet: bool) -> None:
    from deltalens.study.tables import failure_lines, spread_table, verdict_table

    if study.runs and not quiet:
        console.print(verdict_table(study.verdicts()))
        if study.kind == "repeat" and len(study.runs) > 1:
            console.print(spread_table(study.typical_spread()))
    for warning in study.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    if study.failures:
        console.print(failure_lines(study.failures))
    console.print(f"index: {study.folder / 'README.md'}", markup=False, highlight=False, soft_wrap=True)


def study_fields(study: "Study") -> dict[str, Any]:
    """A study as plain data for JSON: every run with its state, the claims, the warnings."""
    return {
        "folder": str(study.folder),
        "runs": [
            {"name": o.member.name, "model": o.member.spec.model, "state": o.state, "reason": o.reason}
            for o in study.outcomes
        ],
        "claims": [claim.to_dict() for claim in study.claims()] if study.runs else [],
        "warnings": list(study.warnings),
    }


def _recorded(out: Path | None, resume: bool) -> "Series | None":
    """The series that a folder holds, so that its settings needn't be typed again."""
    from deltalens.study.series import recorded_series

    return recorded_series(out) if resume and out is not None else None


def _needed(given: str | None, name: str, example: str) -> str:
    if given is None:
        raise InputError(f"{name} are missing; give --{name} {example}")
    return given


def _listed(text: str, name: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise InputError(f"{name} is empty; name at least one")
    return found


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in _listed(text, "seeds")]
    except ValueError:
        raise InputError(f"seeds are {text!r}; give whole numbers such as 0,1,2") from None

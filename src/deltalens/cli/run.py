"""``deltalens run``."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltalens.cli.app import app
from deltalens.cli.options import Parameter, with_spec_options
from deltalens.experiment.spec import RunSpec


def _run(
    config: Path | None, out: Path | None, resume: bool, quiet: bool, as_json: bool, fields: dict[str, object]
) -> None:
    from deltalens.api import run_spec
    from deltalens.experiment.progress import Bars, Silent
    from deltalens.experiment.resume import resumed_fields
    from deltalens.report import summary_table

    known = resumed_fields(out, fields) if resume and out is not None else fields
    spec = RunSpec.from_yaml(config, **fields) if config is not None else RunSpec.parse(**known)
    progress = Silent() if quiet or as_json else Bars(Console(stderr=True))
    finished = run_spec(spec, None, None, out=out, resume=resume, progress=progress)
    report = finished.folder / "report.html"
    if as_json:
        records = json.loads(finished.summary().to_json(orient="records"))
        typer.echo(json.dumps({"folder": str(finished.folder), "report": str(report), "summary": records}))
        return
    console = Console()
    if not quiet:
        console.print(summary_table(finished))
    console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)


_OWN: list[Parameter] = [
    ("config", Annotated[Path | None, typer.Option(help="YAML file with fields of a run; flags win.")], None),
    ("out", Annotated[Path | None, typer.Option(help="Run folder. Default: a new one below runs/.")], None),
    ("resume", Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")], False),
    ("quiet", Annotated[bool, typer.Option("--quiet", help="No progress and no table.")], False),
    ("as_json", Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")], False),
]

app.command("run")(
    with_spec_options(
        _run, _OWN, "Split, measure and report every layer update of MODEL (a small built-in one by default)."
    )
)

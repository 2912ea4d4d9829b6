"""Commands that read finished runs: ``report``, ``compare``, ``claims``."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltalens.cli.app import app
from deltalens.errors import InputError

_Point = Annotated[
    str | None, typer.Option(help="Point of a sweep, as neighbors=16,ridge=0.1. Default: the first of each.")
]


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option(help="HTML file. Default: report.html in the run folder.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write static figures into this folder.")] = None,
    point: _Point = None,
) -> None:
    """Write the one-file report of a run."""
    from deltalens.api import Run
    from deltalens.report import parse_point

    opened, chosen = Run(run), parse_point(point)
    typer.echo(f"report: {opened.report(out, **chosen)}")
    if figures is not None:
        for path in opened.figures(figures, **chosen):
            typer.echo(f"figure: {path}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN RUN...")],
    out: Annotated[Path, typer.Option(help="HTML file.")] = Path("compare.html"),
) -> None:
    """Compare several runs in one page."""
    from deltalens.api import Run
    from deltalens.report import compare_report

    if len(runs) < 2:
        raise InputError(f"compare needs at least two runs, got {len(runs)}; name another run folder")
    typer.echo(f"report: {compare_report([Run(folder) for folder in runs], out)}")


@app.command()
def claims(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    point: _Point = None,
) -> None:
    """The paper's nine claims with the evidence of the given runs."""
    from deltalens.api import Run
    from deltalens.report import at_point, claims_for, claims_table, parse_point

    found = claims_for([at_point(Run(folder), parse_point(point)) for folder in runs])
    if as_json:
        typer.echo(json.dumps([claim.to_dict() for claim in found], ensure_ascii=False))
    else:
        Console().print(claims_table(found))

"""Commands that look closer at the layers of one model: ``inside``, ``later``."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltalens.cli.app import app
from deltalens.cli.options import Parameter, with_spec_options
from deltalens.experiment.spec import RunSpec
from deltalens.experiment.study_fields import INSIDE, JACOBIAN_TOKENS, LATER, POSITIONS


def _inside(jacobian_tokens: int, out: Path | None, quiet: bool, as_json: bool, fields: dict[str, object]) -> None:
    from deltalens.experiment.progress import Bars, Silent
    from deltalens.report.inside import inside_tables
    from deltalens.study.inside import inside_spec
    from deltalens.study.table import records

    spec = RunSpec.parse(**INSIDE | fields)
    progress = Silent() if quiet or as_json else Bars(Console(stderr=True))
    found = inside_spec(spec, None, None, jacobian_tokens=jacobian_tokens, out=out, progress=progress)
    if as_json:
        tables = {"layers": found.layers, "local_maps": found.local_maps}
        typer.echo(json.dumps({name: records(table) for name, table in tables.items()} | {"notes": found.notes}))
    elif not quiet:
        Console().print(inside_tables(found.model, found))
    if out is not None and not as_json:
        typer.echo(f"tables and figure: {out}")


def _later(positions: int, out: Path | None, quiet: bool, as_json: bool, fields: dict[str, object]) -> None:
    from deltalens.experiment.progress import Bars, Silent
    from deltalens.report.later import later_tables
    from deltalens.study.later import later_spec
    from deltalens.study.table import records

    spec = RunSpec.parse(**LATER | fields)
    progress = Silent() if quiet or as_json else Bars(Console(stderr=True))
    found = later_spec(spec, None, None, positions=positions, out=out, progress=progress)
    if as_json:
        typer.echo(json.dumps({"layers": records(found.layers), "distances": records(found.distances)}))
    elif not quiet:
        Console().print(later_tables(found.model, found))
    if out is not None and not as_json:
        typer.echo(f"tables: {out}")


_OUT: Parameter = ("out", Annotated[Path | None, typer.Option(help="Folder for what is found.")], None)
_QUIET: Parameter = ("quiet", Annotated[bool, typer.Option("--quiet", help="No progress and no table.")], False)
_JSON: Parameter = ("as_json", Annotated[bool, typer.Option("--json", help="Print the tables as JSON.")], False)

app.command("inside")(
    with_spec_options(
        _inside,
        [
            (
                "jacobian_tokens",
                Annotated[int, typer.Option(help="Tokens at which the layer's own local map is looked at; 0: none.")],
                JACOBIAN_TOKENS,
            ),
            _OUT,
            _QUIET,
            _JSON,
        ],
        "Look inside the residual of every layer of MODEL: its spectrum, the sub-layers it comes from, what tokens "
        "share, what its parts do, and the layer's own local map beside the fitted one.",
    )
)

app.command("later")(
    with_spec_options(
        _later,
        [
            ("positions", Annotated[int, typer.Option(help="Tokens that are replaced, one at a time.")], POSITIONS),
            _OUT,
            _QUIET,
            _JSON,
        ],
        "Replace single tokens' states in MODEL by T(x), and measure the predictions of all later tokens.",
    )
)

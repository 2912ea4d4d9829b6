"""Commands about models: ``doctor``, ``models``."""

from typing import Annotated

import typer
from rich.console import Console

from deltalens.cli.app import FAILED, app


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="What run takes as a model.")],
    dtype: Annotated[str | None, typer.Option(help="Precision of the model.")] = None,
    device: Annotated[str | None, typer.Option(help="Device.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a Hub model.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Allow code that comes with the model to run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove, check by check, that a model can be measured truthfully here."""
    from deltalens.models import doctor as examine
    from deltalens.models import open_model

    loaded = open_model(model, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code)
    diagnosis = examine(loaded)
    typer.echo(diagnosis.to_json() if as_json else str(diagnosis))
    if not diagnosis.holds:
        raise typer.Exit(FAILED)


@app.command()
def models() -> None:
    """List built-in and named models, and the architectures that are verified."""
    from deltalens.models import models_table

    Console().print(models_table())

"""Commands for those who prune: ``rank`` and ``replace``."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deltalens.cli.app import app
from deltalens.cli.options import Parameter, with_spec_options
from deltalens.experiment.study_fields import DEFAULT_GLOBAL_MAP, DEFAULT_LOCAL_MAP, NOT_RANKED, NOT_REPLACED

_QUIET: Parameter = ("quiet", Annotated[bool, typer.Option("--quiet", help="No progress.")], False)
_JSON: Parameter = ("as_json", Annotated[bool, typer.Option("--json", help="Print JSON.")], False)


def _rank(
    global_map: str,
    local_map: str,
    out: Path | None,
    figure: Path | None,
    quiet: bool,
    as_json: bool,
    fields: dict[str, object],
) -> None:
    from deltalens.experiment.commit import require_file_place
    from deltalens.experiment.progress import Bars, Silent
    from deltalens.report.ranking import ranking_table, require_figure_path, write_ranking_figure
    from deltalens.study.pruning import rank_layers

    if out is not None:
        require_file_place(out)
    if figure is not None:
        require_figure_path(figure)
    progress = Silent() if quiet or as_json else Bars(Console(stderr=True))
    given = _as_arguments(fields)
    found = rank_layers(global_map=global_map, local_map=local_map, progress=progress, **given)
    if out is not None:
        found.save(out)
    if figure is not None:
        write_ranking_figure(found, figure)
    if as_json:
        typer.echo(found.to_json())
        return
    Console().print(ranking_table(found))
    for name, path in (("ranking", out), ("figure", figure)):
        if path is not None:
            typer.echo(f"{name}: {path}")


def _replace(out: Path, quiet: bool, as_json: bool, fields: dict[str, object]) -> None:
    from deltalens.experiment.progress import Bars, Silent
    from deltalens.report.replacements import replacements_table
    from deltalens.study.pruning import fit_replacements

    progress = Silent() if quiet or as_json else Bars(Console(stderr=True))
    found = fit_replacements(out=out, progress=progress, **_as_arguments(fields))
    if as_json:
        typer.echo(found.to_json())
        return
    Console().print(replacements_table(found))
    typer.echo(f"replacements: {found.folder}")


def _as_arguments(fields: dict[str, Any]) -> dict[str, Any]:
    """Options as the verbs take them: what is text here is a path there."""
    paths = {"text": [Path(path) for path in fields["text"]]} if "text" in fields else {}
    return {**fields, **paths}


app.command("rank")(
    with_spec_options(
        _rank,
        [
            (
                "global_map",
                Annotated[str, typer.Option(help="Map with one fit for all tokens.")],
                DEFAULT_GLOBAL_MAP,
            ),
            ("local_map", Annotated[str, typer.Option(help="Map fitted for each token.")], DEFAULT_LOCAL_MAP),
            ("out", Annotated[Path | None, typer.Option(help="Also write the ranking as JSON.")], None),
            ("figure", Annotated[Path | None, typer.Option(help="Also draw it, as .pdf, .svg or .png.")], None),
            _QUIET,
            _JSON,
        ],
        "Rank the layers of MODEL for pruning: the loss that skipping or replacing each one adds.",
        without=NOT_RANKED,
    )
)

app.command("replace")(
    with_spec_options(
        _replace,
        [("out", Annotated[Path, typer.Option(help="Folder for the files; empty or new.")], ...), _QUIET, _JSON],
        "Fit maps that stand in for layers of MODEL, save each, and measure the model with it in place.",
        without=NOT_REPLACED,
    )
)

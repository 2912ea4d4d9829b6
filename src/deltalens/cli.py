"""The command line: arguments to a spec to a call. No logic lives here."""

import inspect
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from typer.exceptions import TyperException

from deltalens.errors import DeltalensError, InputError
from deltalens.experiment.spec import DEFAULT_MODEL, RunSpec

FAILED, USAGE, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="deltalens",
    help="How a language model's hidden states change from layer to layer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; every expected failure is one line on stderr and an exit code."""
    try:
        code = app(prog_name="deltalens", standalone_mode=False)
    except DeltalensError as error:
        _fail(str(error), USAGE if isinstance(error, InputError) else FAILED)
    except TyperException as error:
        _fail(f"{error.format_message()}; see deltalens --help", USAGE)
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(FAILED) from None
    if code == INTERRUPTED:
        _fail("interrupted; what was committed is kept: continue with deltalens run --resume --out DIR", INTERRUPTED)
    raise SystemExit(code)


def _fail(message: str, code: int) -> NoReturn:
    one_line = " ".join(message.split())
    Console(stderr=True, soft_wrap=True).print(f"error: {one_line}", style="bold red", markup=False, highlight=False)
    raise SystemExit(code)


def _run(
    config: Path | None, out: Path | None, resume: bool, quiet: bool, as_json: bool, fields: dict[str, object]
) -> None:
    from deltalens.api import run_spec
    from deltalens.experiment.progress import Bars, Silent
    from deltalens.experiment.resume import resumed_fields
    from deltalens.report import summary_table

    given = {name: value for name, value in fields.items() if value is not None and value != []}
    known = resumed_fields(out) if resume and out is not None else {}
    spec = RunSpec.from_yaml(config, **given) if config is not None else RunSpec.parse(**known | given)
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


def _run_command() -> Callable[..., None]:
    """The ``run`` command, whose options are the fields of `RunSpec`, one for one."""

    def command(**arguments: Any) -> None:
        own = {name: arguments.pop(name) for name in ("config", "out", "resume", "quiet", "as_json")}
        _run(**own, fields=arguments)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=default, annotation=kind) for name, kind, default in [
        *(_option(name, field) for name, field in RunSpec.model_fields.items()),
        ("config", Annotated[Path | None, typer.Option(help="YAML file with fields of a run; flags win.")], None),
        ("out", Annotated[Path | None, typer.Option(help="Run folder. Default: a new one below runs/.")], None),
        ("resume", Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")], False),
        ("quiet", Annotated[bool, typer.Option("--quiet", help="No progress and no table.")], False),
        ("as_json", Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")], False),
    ]]  # fmt: skip
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = "Split, measure and report every layer update of MODEL (a small built-in one by default)."
    return command


def _option(name: str, field: FieldInfo) -> tuple[str, Any, Any]:
    flag = "--" + name.replace("_", "-")
    help_text = field.description or ""
    if name == "model":
        return name, Annotated[str | None, typer.Argument(help=f"{help_text} Default: {DEFAULT_MODEL}.")], None
    if name == "text":
        return name, Annotated[list[str] | None, typer.Option(flag, help=help_text)], None
    if field.annotation is bool:
        both = f"{flag}/--no-{name.replace('_', '-')}"
        return name, Annotated[bool | None, typer.Option(both, help=help_text, show_default=False)], None
    default = field.default
    shown = ",".join(default) if isinstance(default, tuple) else default
    if shown not in (None, "") and "Default" not in help_text:
        help_text = f"{help_text} [default: {shown}]"
    kind = _plain_type(field.annotation)
    return name, Annotated[kind | None, typer.Option(flag, help=help_text, metavar=_metavar(field.annotation))], None


def _plain_type(annotation: Any) -> Any:
    """What the command line parses: numbers as numbers, everything else as text for the spec to judge."""
    options = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) in (Union, types.UnionType) and len(options) == 1:
        annotation = options[0]
    return annotation if annotation in (int, float) else str


def _metavar(annotation: Any) -> str | None:
    choices = [c for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal for c in get_args(part)]
    if choices:
        return "|".join(choices) if get_origin(annotation) is not tuple else ",".join(choices)
    return None


app.command("run")(_run_command())


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option(help="HTML file. Default: report.html in the run folder.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write static figures into this folder.")] = None,
) -> None:
    """Write the one-file report of a run."""
    from deltalens.api import Run

    opened = Run(run)
    typer.echo(f"report: {opened.report(out)}")
    if figures is not None:
        for path in opened.figures(figures):
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
) -> None:
    """The paper's nine claims with the evidence of the given runs."""
    from deltalens.api import Run
    from deltalens.report import claims_for, claims_table

    found = claims_for([Run(folder) for folder in runs])
    if as_json:
        typer.echo(json.dumps([claim.to_dict() for claim in found], ensure_ascii=False))
    else:
        Console().print(claims_table(found))


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


if __name__ == "__main__":
    main()

"""Options that are the fields of `RunSpec`, one for one, for every command that measures a model."""

import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from deltalens.experiment.spec import DEFAULT_MODEL, RunSpec

#: A parameter of a command: its name, its type with the option's help, its default.
Parameter = tuple[str, Any, Any]


def with_spec_options(
    body: Callable[..., None], own: list[Parameter], doc: str, *, without: frozenset[str] = frozenset()
) -> Callable[..., None]:
    """A command that takes the fields of `RunSpec` and its ``own`` options.

    Args:
        body: called with the own options by name, and ``fields``: what was given of the spec's fields.
        own: the command's own options.
        doc: its help.
        without: fields that have no meaning for the command.
    """

    def command(**arguments: Any) -> None:
        named = {name: arguments.pop(name) for name, _, _ in own}
        body(**named, fields={name: value for name, value in arguments.items() if value is not None and value != []})

    keyword = inspect.Parameter.KEYWORD_ONLY
    fields = [(name, field) for name, field in RunSpec.model_fields.items() if name not in without]
    parameters = [
        inspect.Parameter(name, keyword, default=default, annotation=kind)
        for name, kind, default in [*(_option(name, field) for name, field in fields), *own]
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = doc
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
    parts = (annotation, *get_args(annotation))
    choices = [c for part in parts if get_origin(part) is Literal for c in get_args(part)]
    if get_origin(annotation) is tuple:
        return ",".join(choices) or None
    one = "|".join(choices)
    if any(get_origin(part) is tuple for part in parts):  # one value or several
        return f"{one or get_args(annotation)[0].__name__}[,...]"
    return one or None

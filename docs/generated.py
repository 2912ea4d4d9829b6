"""Parts of the documentation that are made from the code; a page asks for one by a line such as ``{{ commands }}``."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

from pydantic.fields import FieldInfo
from sphinx.application import Sphinx
from typer.main import get_command

from deltalens.cli import app
from deltalens.core.maps import MAPS
from deltalens.experiment.spec import EXECUTION_FIELDS, RunSpec


def commands() -> str:
    """Every command with its usage, help, arguments and options."""
    root = get_command(app)
    return "\n\n".join(_command(command, f"deltalens {name}") for name, command in _leaves(root))


def fields() -> str:
    """Every field of `RunSpec`: its values, its default, what it means."""
    lines = ["| field | values | default | meaning |", "|---|---|---|---|"]
    for name, field in RunSpec.model_fields.items():
        note = "No part of the fingerprint." if name in EXECUTION_FIELDS else ""
        cells = (f"`{name}`", _values(field), _default(field), f"{field.description or ''} {note}")
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def maps() -> str:
    """Every map's name with one line on what it is."""
    return "\n".join(["| map | what it is |", "|---|---|", *(f"| `{name}` | {line} |" for name, line in MAPS.items())])


PARTS: dict[str, Callable[[], str]] = {"commands": commands, "fields": fields, "maps": maps}


def _leaves(command: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in getattr(command, "commands", {}).items():
        if getattr(child, "hidden", False):
            continue
        if hasattr(child, "commands"):
            yield from _leaves(child, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", child


def _command(command: Any, name: str) -> str:
    taken = {p.name for p in command.params} & set(RunSpec.model_fields)
    left_out = sorted(set(RunSpec.model_fields) - taken)
    measures = len(taken) > len(left_out)
    own = [p for p in command.params if not measures or p.name == "model" or p.name not in RunSpec.model_fields]
    shown = [p for p in own if not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    usage = " ".join([name, *(_argument(p) for p in arguments), "[OPTIONS]"])
    parts = [f"## `{name}`", (command.help or "").strip(), f"```text\n{usage}\n```"]
    rows = [(f"`{_argument(p)}`", p.help or "") for p in arguments]
    rows += [(", ".join(f"`{flag}`" for flag in (*p.opts, *p.secondary_opts)), _help(p)) for p in options]
    if rows:
        parts.append("\n".join(["| | |", "|---|---|", *(f"| {flag} | {_cell(text)} |" for flag, text in rows)]))
    if measures:
        but = f", but for {', '.join(f'`{name}`' for name in left_out)}" if left_out else ""
        parts.append(f"Besides, every [field of a run](spec.md) as a flag, such as `--pool-tokens 4096`{but}.")
    return "\n\n".join(parts)


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _help(option: Any) -> str:
    told = option.help or ""
    given = option.default is not None and not callable(option.default) and option.default is not False
    return f"{told} Default: {option.default}." if given and "efault" not in told else told


def _values(field: FieldInfo) -> str:
    choices = [choice for kind in (field.annotation, *get_args(field.annotation)) for choice in _literals(kind)]
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind not in (type(None), Ellipsis)]
    names = " or ".join(dict.fromkeys(getattr(kind, "__name__", str(kind)) for kind in kinds))
    names = names.replace("or tuple", "or several")
    return f"list of {names}" if getattr(field.annotation, "__origin__", None) is tuple else names


def _literals(kind: Any) -> list[str]:
    return [choice for choice in get_args(kind) if isinstance(choice, str)]


def _default(field: FieldInfo) -> str:
    if isinstance(field.default, tuple):
        return ", ".join(f"`{item}`" for item in field.default)
    return "" if field.default is None else f"`{field.default}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _fill(_: Sphinx, __: str, content: list[str]) -> None:
    for name, make in PARTS.items():
        mark = f"{{{{ {name} }}}}"
        if mark in content[0]:
            content[0] = content[0].replace(mark, make())


def setup(app: Sphinx) -> dict[str, Any]:
    """Fill pages as they are read."""
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

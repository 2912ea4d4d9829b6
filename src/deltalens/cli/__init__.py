"""The command line: arguments to a spec to a call. No logic lives here."""

import sys
from typing import NoReturn

from rich.console import Console
from typer.exceptions import TyperException

from deltalens.cli import models, rankings, reproduce, results, run, studies  # noqa: F401  (each registers its commands)
from deltalens.cli.app import FAILED, INTERRUPTED, USAGE, app
from deltalens.errors import DeltalensError, InputError


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
        _fail(
            "interrupted; what a run or study committed is kept: go on with the same command, --resume and --out",
            INTERRUPTED,
        )
    raise SystemExit(code)


def _fail(message: str, code: int) -> NoReturn:
    one_line = " ".join(message.split())
    Console(stderr=True, soft_wrap=True).print(f"error: {one_line}", style="bold red", markup=False, highlight=False)
    raise SystemExit(code)

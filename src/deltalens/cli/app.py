"""The application that commands register with, and its exit codes."""

import typer

FAILED, USAGE, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="deltalens",
    help="How a language model's hidden states change from layer to layer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

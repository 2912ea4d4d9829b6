"""Markdown tables."""

from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")


def markdown_table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table from its headings and rows of texts."""
    columns = list(head)
    lines = [columns, *rows]
    body = [f"| {' | '.join(cell(text) for text in line)} |" for line in lines]
    return "\n".join([body[0], f"|{'---|' * len(columns)}", *body[1:]]) + "\n"

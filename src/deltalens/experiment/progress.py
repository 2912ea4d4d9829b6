"""Progress of the long steps, with the time left. Steps call `Progress`; who shows it is the caller's choice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars

Advance = Callable[[int], None]


@runtime_checkable
class Progress(Protocol):
    """What a step needs in order to report how far it is."""

    @contextmanager
    def step(self, name: str, total: int) -> Iterator[Advance]:
        """Announce a step of ``total`` parts; call what is given with the number of parts just done."""
        ...

    def note(self, message: str) -> None:
        """Say something once, above the bars."""
        ...


class Silent:
    """Shows nothing."""

    @contextmanager
    def step(self, name: str, total: int) -> Iterator[Advance]:  # noqa: ARG002
        """Swallow what is reported."""
        yield lambda _: None

    def note(self, message: str) -> None:
        """Swallow the message."""


class Bars:
    """Shows a bar per step with the time left, on stderr."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def step(self, name: str, total: int) -> Iterator[Advance]:
        """Show one bar until the step ends."""
        columns = (
            TextColumn("{task.description:<26}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with RichBars(*columns, console=self._console) as bars:
            task = bars.add_task(name, total=total)
            yield lambda done: bars.advance(task, done)

    def note(self, message: str) -> None:
        """Print one line."""
        self._console.print(message, highlight=False, markup=False)

"""A study that was run: its folder, what became of each run, and the claims over all of them."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import pandas as pd

from deltalens.api import Run
from deltalens.errors import StoreError
from deltalens.report import Claim
from deltalens.study.members import Member
from deltalens.study.record import Kind, Outcome, Record, read_record
from deltalens.study.spread import figure_spread, typical_spread
from deltalens.study.verdicts import Verdicts, judge


class Study:
    """Several runs in one folder, with the claims over all of them; `reproduce`, `repeat` and `checkpoints` return it.

    Example:
        >>> import deltalens as dl
        >>> study = dl.Study("runs/study")  # doctest: +SKIP
        >>> [claim.verdict for claim in study.claims()]  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._record = read_record(self.folder)

    @property
    def kind(self) -> Kind:
        """The verb that made it."""
        return self._record.kind

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Every run with its state, in order."""
        return self._record.outcomes

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The runs that failed, each with its reason."""
        return self._record.failures

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know before comparing the runs."""
        return self._record.warnings

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The finished runs, in order."""
        return finished_runs(self.folder, self._record)[1]

    def claims(self) -> list[Claim]:
        """The nine claims over all finished runs.

        Raises:
            StoreError: no run is finished.
        """
        return list(self.verdicts().together)

    def verdicts(self) -> Verdicts:
        """The nine claims on each finished run and on all of them.

        Raises:
            StoreError: no run is finished.
        """
        if not self.runs:
            raise StoreError(f"{self.folder} holds no finished run; see the reasons in its README.md")
        return judge([run.folder.name for run in self.runs], self.runs)

    def spread(self) -> pd.DataFrame:
        """Smallest, median and largest of each key figure over the runs that differ by seed or revision alone."""
        return figure_spread([member.group for member in _done(self._record)], self.runs)

    def typical_spread(self) -> pd.DataFrame:
        """The same of each map's median layer, under the protocol that verdicts rest on."""
        return typical_spread([member.group for member in _done(self._record)], self.runs)

    def __repr__(self) -> str:
        return f"Study({str(self.folder)!r})"


def finished_runs(folder: Path, record: Record) -> tuple[list[str], tuple[Run, ...]]:
    """Groups and runs of a record's finished members, in order."""
    done = _done(record)
    return [member.group for member in done], tuple(Run(folder / member.name) for member in done)


def _done(record: Record) -> Sequence[Member]:
    return [outcome.member for outcome in record.outcomes if outcome.state == "done"]

"""The claims over a study's runs: a table per claim, the matrix of verdicts, and their spread over seeds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from deltalens.experiment.commit import write_file
from deltalens.report import Claim, claims_for
from deltalens.report.claims import SHARED_RULE, TITLES
from deltalens.report.protocol import RunLike
from deltalens.report.tables import MARKS
from deltalens.study.markdown import markdown_table

#: Claims that only several models together can answer.
JOINT = (7, 9)
TOGETHER = "all together"
FILES = {
    1: "01-alignment", 2: "02-angles", 3: "03-projection", 4: "04-error-predicts-effect", 5: "05-swaps",
    6: "06-depth", 7: "07-classes", 8: "08-regimes", 9: "09-architecture",
}  # fmt: skip


@dataclass(frozen=True)
class Verdicts:
    """The nine claims on each run and on all of them.

    Attributes:
        names: of the runs.
        each: nine claims per run.
        together: nine claims over all runs.
    """

    names: tuple[str, ...]
    each: tuple[tuple[Claim, ...], ...]
    together: tuple[Claim, ...]

    def rows(self, claim: int) -> list[tuple[str, Claim]]:
        """Who says what on a claim: run by run where one run can answer, then all together."""
        alone = [] if claim in JOINT else [(n, own[claim - 1]) for n, own in zip(self.names, self.each, strict=True)]
        joint = [] if len(self.names) == 1 and alone else [(TOGETHER, self.together[claim - 1])]
        return [*alone, *joint]

    def table(self) -> pd.DataFrame:
        """One row per claim and run: claim, run, verdict, evidence."""
        return pd.DataFrame(
            [
                {"claim": number, "run": name, "verdict": found.verdict, "evidence": found.evidence}
                for number in TITLES
                for name, found in self.rows(number)
            ]
        )

    def matrix(self) -> pd.DataFrame:
        """Verdicts with a row per claim and a column per run; the last column is all runs together."""
        columns = {
            name: [own[number - 1].verdict if number not in JOINT else "" for number in TITLES]
            for name, own in zip(self.names, self.each, strict=True)
        }
        columns[TOGETHER] = [claim.verdict for claim in self.together]
        return pd.DataFrame(columns, index=pd.Index(list(TITLES), name="claim"))


def judge(names: Sequence[str], runs: Sequence[RunLike]) -> Verdicts:
    """The nine claims on each of these runs and on all of them."""
    return Verdicts(tuple(names), tuple(tuple(claims_for([run])) for run in runs), tuple(claims_for(runs)))


def write_verdicts(verdicts: Verdicts, folder: Path) -> None:
    """Write ``claims/NN-*.md`` and ``.csv``, one pair per claim, and ``claims.json``."""
    table = verdicts.table()
    for number, stem in FILES.items():
        own = table[table["claim"] == number].drop(columns="claim")
        text = claim_page(verdicts, number)
        write_text(folder / "claims" / f"{stem}.md", text)
        write_file(folder / "claims" / f"{stem}.csv", lambda path, t=own: t.to_csv(path, index=False))  # type: ignore[misc]
    content = {
        "runs": list(verdicts.names),
        "claims": [
            claim.to_dict() | {"each": {name: own[claim.id - 1].verdict for name, own in _pairs(verdicts, claim.id)}}
            for claim in verdicts.together
        ],
    }
    write_text(folder / "claims.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def claim_page(verdicts: Verdicts, number: int) -> str:
    """One claim as Markdown: its rule, and a row per run with verdict and evidence."""
    rows = [
        (name, mark(claim.verdict), claim.evidence if name != TOGETHER or number in JOINT else "from the rows above")
        for name, claim in verdicts.rows(number)
    ]
    title, rule = f"# Claim {number}: {TITLES[number]}", f"Rule: {verdicts.together[number - 1].rule} {SHARED_RULE}"
    return f"{title}\n\n{rule}\n\n{markdown_table(['run', 'verdict', 'evidence'], rows)}"


def matrix_markdown(verdicts: Verdicts) -> str:
    """The matrix of verdicts as a Markdown table."""
    matrix = verdicts.matrix()
    rows = [
        [f"{number}. {TITLES[number]}", *(mark(str(value)) if value else "" for value in matrix.loc[number])]
        for number in TITLES
    ]
    return markdown_table(["claim", *map(str, matrix.columns)], rows)


def mark(verdict: str) -> str:
    """A verdict with its sign."""
    return f"{MARKS[verdict]} {verdict}"


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    write_file(path, lambda temporary: _put(temporary, text))


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf8")


def _pairs(verdicts: Verdicts, claim: int) -> list[tuple[str, tuple[Claim, ...]]]:
    return [] if claim in JOINT else list(zip(verdicts.names, verdicts.each, strict=True))

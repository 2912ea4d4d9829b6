"""Put a study's own tables into its page: ``python docs/study_tables.py STUDY docs/study.md``.

Everything between two marks is replaced by the section of that title from the study's README.md, so that no figure of
the tables is typed by hand.
"""

import re
import sys
from pathlib import Path

MARK = re.compile(r"(<!-- study: (?P<title>[^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def section(index: str, title: str) -> str:
    """The text below a heading of the study's index, with its links taken out, since they lead into its folder."""
    found = re.search(rf"^## {re.escape(title)}\n+(.*?)(?=^## |\Z)", index, re.DOTALL | re.MULTILINE)
    if found is None:
        raise SystemExit(f"the study has no section '{title}'")
    lines = [line for line in found[1].splitlines() if not line.startswith(("Evidence,", "All runs"))]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def main(study: str, page: str) -> None:
    """Replace every marked part of the page."""
    index, path = (Path(study) / "README.md").read_text(encoding="utf8"), Path(page)
    text = path.read_text(encoding="utf8")
    path.write_text(MARK.sub(lambda m: m[1] + "\n" + section(index, m["title"]) + "\n" + m[3], text), encoding="utf8")


if __name__ == "__main__":
    main(*sys.argv[1:])

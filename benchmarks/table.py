"""Every row of the benchmark in one table and one JSON, from one run.

    python benchmarks/table.py [--json FILE] [--only fits,neighbors] [--quick] [--clock cpu]

Each file of this folder named below offers ``rows(...)``; ``--quick`` shrinks what can be shrunk, to try the command.
"""

import argparse
import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

from rows import CLOCKS, Row, as_json, show

QUICK: dict[str, dict[str, object]] = {
    "fits": {"anchors": 128, "repeats": 1},
    "neighbors": {"anchors": 512, "repeats": 1},
    "interventions": {"layers": 1, "repeats": 1, "tokens": 64},
    "whole_run": {"quick": True},
}
"""The files, in the table's order, and the arguments that shrink them."""


def all_rows(files: list[str], quick: bool, clock: str) -> Iterator[Row]:
    """The rows of the named files."""
    for name in files:
        module = importlib.import_module(name)
        start = time.perf_counter()
        yield from module.rows(clock=clock, **(QUICK[name] if quick else {}))
        print(f"  ({name}: {time.perf_counter() - start:.0f} s)", flush=True)


def main() -> None:
    """Print the table, and write it as JSON where asked."""
    here = Path(__file__).parent
    known = [name for name in QUICK if (here / f"{name}.py").exists()]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--only", default=",".join(known))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a machine with other work")
    args = parser.parse_args()
    shown = show(all_rows(args.only.split(","), args.quick, args.clock))
    missed = [row.name for row in shown if row.met is False]
    print(f"{len(shown)} rows, {len(missed)} under their target{': ' if missed else ''}{'; '.join(missed)}")
    if args.json:
        args.json.write_text(json.dumps(as_json(shown), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

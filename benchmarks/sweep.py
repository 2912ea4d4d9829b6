"""What twelve points of a sweep cost against one of them: geometry alone, and with KL against its suffix passes.

Run as ``python benchmarks/sweep.py``; ``--model`` and ``--layers`` choose what is swept. Times are processor seconds of
this process, which other work on the machine hardly changes, and of whole runs: corpus, capture, checks, fits, nulls,
chance levels, intervals, tables and the report.
"""

import argparse
import json
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import deltalens as dl
from deltalens.experiment.functional import FunctionalMeter

POINT: dict[str, Any] = {"neighbors": 64, "ridge": 0.01}
NEIGHBORS, RIDGES = [8, 16, 32, 64], [0.1, 0.01, 0.001]
SWEEP: dict[str, Any] = {"neighbors": NEIGHBORS, "ridge": RIDGES}


@dataclass(frozen=True)
class Line:
    """One comparison: seconds of one point (its dearest), of all points, and the ratio that is promised."""

    model: str
    layers: str
    scope: str
    one_point: float
    points: float
    suffix_passes: float
    ratio: float
    at_most: float


def timed(model: dl.Model, **fields: Any) -> tuple[float, float]:
    """Processor seconds of a run, and of its passes through the rest of the model."""
    measure, passes = FunctionalMeter.measure, [0.0]

    def measured(*given: Any, **options: Any) -> Any:
        start = time.process_time()
        try:
            return measure(*given, **options)
        finally:
            passes[0] += time.process_time() - start

    FunctionalMeter.measure = measured  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            dl.run(model, out=Path(folder) / "run", **fields)
            return time.process_time() - start, passes[0]
    finally:
        FunctionalMeter.measure = measure  # type: ignore[method-assign]


def compare(model: dl.Model, name: str, layers: str, scope: str, repeats: int, options: dict[str, Any]) -> Line:
    """One point and all points in turn; the least of each, since nothing makes a run faster than it is."""
    common = {"maps": "linear", "layers": layers, "scope": scope, **options}
    one, many = [], []
    for _ in range(repeats):
        one.append(timed(model, **common, **POINT)[0])
        many.append(timed(model, **common, **SWEEP))
    points, passes = min(many)
    ratio = points / passes if scope else points / min(one)
    return Line(name, layers, scope or "none", min(one), points, passes, ratio, 1.2 if scope else 3.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-gpt2")
    parser.add_argument("--layers", default="2,4")
    parser.add_argument("--scope", default="", help="'' for geometry alone, or single,all")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = {} if arguments.tokens is None else {"tokens": arguments.tokens}
    model = dl.load(arguments.model)
    timed(model, maps="linear", layers=arguments.layers, scope="", tokens=256, pool_tokens=512, neighbors=16)
    line = compare(model, arguments.model, arguments.layers, arguments.scope, arguments.repeats, options)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread")
    print(json.dumps(asdict(line), indent=1))


if __name__ == "__main__":
    main()

"""Kill a run with SIGKILL at seeded random moments and resume it; every result must equal an uninterrupted run's.

``python tests/experiment/kill_and_resume.py --kills 200`` is the long version. Each try forks from a parent that has
done the imports and nothing else, so that a try costs a run and not an import.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch

import deltalens.api
from deltalens.experiment.spec import RunSpec

FIELDS = {
    "layers": "1,3", "maps": "diagonal,linear", "tokens": 128, "pool_tokens": 256, "neighbors": 16, "resamples": 100,
    "window": 64, "batch_size": 1,
}  # fmt: skip


def run(folder: Path, resume: bool) -> None:
    torch.set_num_threads(1)
    deltalens.api.run("tiny-gpt2", out=folder, resume=resume, **FIELDS)


def forked(folder: Path, resume: bool) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(folder, resume)
            code = 0
        finally:
            os._exit(code)
    return child


def finished(folder: Path) -> float:
    """Run to the end in a child of its own; return the seconds that it took."""
    began = time.monotonic()
    _, status = os.waitpid(forked(folder, resume=folder.exists()), 0)
    if status != 0:
        raise SystemExit(f"{folder}: the run ended with status {status}")
    return time.monotonic() - began


def killed(folder: Path, after: float) -> bool:
    """Whether the run was killed before it ended by itself."""
    child = forked(folder, resume=folder.exists())
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def tables(folder: Path) -> list[pd.DataFrame]:
    opened = deltalens.api.open(folder)
    return [opened.tokens(), opened.summary(), opened.neighbors(), opened.pool()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    assert RunSpec.parse(**FIELDS)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        seconds = finished(root / "whole")
        expected = tables_in_child(root / "whole")
        equal = hit = 0
        for number in range(arguments.kills):
            folder = root / f"run-{number}"
            hit += killed(folder, moments.uniform(0.02, 1.0) * seconds)
            finished(folder)
            equal += tables_in_child(folder) == expected
            print(f"{equal} of {number + 1} equal, {hit} were killed midway", flush=True)
    return 0 if equal == arguments.kills else 1


def tables_in_child(folder: Path) -> str:
    """A digest of the tables, made in a child, so that this process never starts the threads that a fork would lose."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        hashes = [pd.util.hash_pandas_object(table, index=False).sum() for table in tables(folder)]
        os.write(write, repr(hashes).encode())
        os._exit(0)
    os.close(write)
    digest = os.read(read, 65536).decode()
    os.close(read)
    _, status = os.waitpid(child, 0)
    if status != 0 or not digest:
        raise SystemExit(f"{folder}: the tables can't be read")
    return digest


if __name__ == "__main__":
    sys.exit(main())

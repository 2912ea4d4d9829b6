"""What every row of the benchmark table says, and how two ways are timed against each other."""

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Row:
    """One figure beside its rival's from the same run.

    ``ratio`` is how many times better ours is, ``target`` the least ratio that is asked of it (None: reported only),
    ``floor`` what bounds the cost from below, ``note`` anything else that was measured.
    """

    name: str
    ours: float
    theirs: float
    unit: str
    rival: str
    ratio: float
    target: float | None
    floor: str
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the ratio reaches its target."""
        return None if self.target is None else self.ratio >= self.target


def alternately(
    ways: Sequence[Callable[[], object]], repeats: int, clock: str = "wall", *, first: int = 0
) -> list[float]:
    """The least seconds of each way, taken in turns so that a busy moment hits all of them.

    With ``first`` set, that many leading ways run with all of torch's threads and the others with one.
    """
    now = CLOCKS[clock]
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats):
        for i, (way, taken) in enumerate(zip(ways, times, strict=True)):
            with single_threaded(first > 0 and i >= first):
                start = now()
                way()
                taken.append(now() - start)
    return [min(taken) for taken in times]


@contextmanager
def single_threaded(wanted: bool) -> Iterator[None]:
    """Torch and BLAS on one thread, if wanted."""
    threads = torch.get_num_threads()
    if not wanted:
        yield
        return
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(threads)


def machine() -> dict[str, object]:
    """What the figures depend on."""
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


HEADER = f"{'row':46} {'ours':>10} {'rival':>10} {'':16} {'ratio':>7} {'target':>7}      rival; note"


def line(row: Row) -> str:
    """A row as one line of the table."""
    target = "" if row.target is None else f"{row.target:g}"
    met = {None: "    ", True: "ok  ", False: "LESS"}[row.met]
    return (
        f"{row.name:46} {row.ours:10.4g} {row.theirs:10.4g} {row.unit:16} {row.ratio:7.1f} {target:>7} {met} "
        f"{row.rival}{'; ' if row.note else ''}{row.note}"
    )


def show(rows: Iterable[Row]) -> list[Row]:
    """Print rows as they come, and return them."""
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(HEADER, flush=True)
    shown = []
    for row in rows:
        print(line(row), flush=True)
        shown.append(row)
    return shown


def as_json(rows: Iterable[Row]) -> dict[str, object]:
    """Machine and rows."""
    return {"machine": machine(), "rows": [asdict(row) | {"met": row.met} for row in rows]}

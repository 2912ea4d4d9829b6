"""What a whole run costs: time against the forward passes that it can't avoid, memory, and how both grow.

    python benchmarks/whole_run.py [time] [memory] [growth] [--model smollm2-135m] [--layers 4,25]

``time`` takes sampled layers of the default run (three maps, controls, both protocols) and times the floor in the same
process: the capture of evaluation and pool, and for every patch one suffix pass, which is the share of blocks that is
left and the model's head. ``memory`` runs processes of their own and reads their peak resident memory. ``growth`` fits
exponents to runs of several sizes on the built-in tiny-gpt2.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import deltalens as dl
from deltalens.experiment import functional, layer, pipeline
from deltalens.models import InterventionSession
from deltalens.models.interventions.backbone import Backbone

MAPS = ["diagonal", "low_rank:8", "linear"]
DEFAULT = {"tokens": 2048, "pool_tokens": 8192}
#: Patches per map and protocol: T(x) alone and with all others; where there are controls, six more.
OWN, CONTROLS = 2, 6

#: What is watched during a run: where it lies and what it is called here. Parts of a whole are indented.
WATCHED = [
    (pipeline, "capture_states", "capture"),
    (pipeline, "open_gate", "gate"),
    (pipeline, "_measure_units", "units"),
    (functional.FunctionalMeter, "measure", "  patches"),
    (InterventionSession, "_final", "    suffix passes"),
    (InterventionSession, "_head", "    head"),
    (functional, "_record", "    KL, loss and argmax"),
    (InterventionSession, "__enter__", "    base runs"),
    (layer.AnchorFits, "fit", "  fits and geometry"),
    (layer.AnchorFits, "null", "  nulls"),
    (layer.LayerUnits, "_unit", "  tables and bootstrap"),
]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Seconds spent in `WATCHED` inside the ``with``."""
    seconds = {label: 0.0 for _, _, label in WATCHED}
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in WATCHED]

    def timing(inner: Callable[..., Any], label: str) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*given, **options)
            finally:
                seconds[label] += time.perf_counter() - start

        return run

    for (owner, name, inner), (_, _, label) in zip(kept, WATCHED, strict=True):
        setattr(owner, name, timing(inner, label))
    try:
        yield seconds
    finally:
        for owner, name, inner in kept:
            setattr(owner, name, inner)


def forward_seconds(model: dl.Model, tokens: int, window: int) -> tuple[float, float]:
    """Seconds that blocks and head take for so many tokens, the least of three."""
    ids = torch.randint(0, model.vocabulary, (tokens // window, window))
    backbone = Backbone.of(model)
    with torch.no_grad():
        output = backbone.run(ids)
        final = backbone.final_states(output).flatten(0, 1)
        parts = [final[start : start + 256] for start in range(0, len(final), 256)]
        blocks = min(timed(lambda: backbone.run(ids)) for _ in range(3))
        head = min(timed(lambda: [backbone.logits(part, template=type(output)) for part in parts]) for _ in range(3))
    return blocks, head


def patches() -> int:
    """Patches of one layer of the default run."""
    return len(MAPS) * (OWN + CONTROLS + OWN) + 1


def report_time(model: dl.Model, layers: list[int], tokens: int) -> None:
    """Sampled layers against their floor, and the whole default run that follows from them."""
    window = min(256, model.longest_window or 256)
    blocks, head = forward_seconds(model, tokens, window)
    with tempfile.TemporaryDirectory() as folder, watched() as spent:
        sizes = {"tokens": tokens, "pool_tokens": 4 * tokens, "window": window}
        dl.run(model, out=Path(folder) / "r", layers=layers, maps=MAPS, **sizes)
    after = forward_seconds(model, tokens, window)
    blocks, head = (blocks + after[0]) / 2, (head + after[1]) / 2
    left = [(model.n_layers - 1 - at) / model.n_layers for at in layers]
    floor = sum(patches() * (share * blocks + head) for share in left)
    strict = sum(patches() * share * (blocks + head) for share in left)
    print(f"{tokens} evaluation and {4 * tokens} pool tokens, layers {layers}, {torch.get_num_threads()} threads")
    print(f"a plain forward of the evaluation: {blocks + head:.2f} s, {head / (blocks + head):.0%} of it the head\n")
    for label, seconds in spent.items():
        print(f"{label:28} {seconds:8.2f} s  {seconds / spent['units']:6.1%} of the units")
    print(f"\nunits over their floor (suffix blocks and head):     {spent['units'] / floor:.2f}")
    print(f"units over the share of layers alone (no head):      {spent['units'] / strict:.2f}")
    scale = DEFAULT["tokens"] / tokens
    per_layer, floor_layer = spent["units"] / len(layers) * scale, floor / len(layers) * scale
    whole = spent["capture"] * scale + spent["gate"] + per_layer * model.n_layers
    least = 5 * blocks * scale + floor_layer * model.n_layers
    print(f"the whole default run, {model.n_layers} layers: {whole / 60:.1f} minutes, {whole / least:.2f} of the floor")


def child(options: dict[str, Any]) -> None:
    """One run in this process; prints its peak resident memory and the bytes of the weights."""
    model = dl.load(options.pop("model"))
    options["layers"] = np.linspace(*options["layers"], dtype=int).tolist() if "layers" in options else None
    weights = sum(p.numel() * p.element_size() for p in model.hf.parameters())
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        dl.run(model, out=Path(folder) / "r", **options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"weights": weights, "loaded": loaded * 1024, "peak": peak * 1024}))


def peak_of(**options: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def report_memory(model: dl.Model) -> None:
    """Peaks of runs that differ in one size; of a layer near the end, since none of them differs by layer."""
    name, last = model.identity.name, model.n_layers - 1
    few = {"maps": ["mean"], "protocol": ["held_out"], "scope": ["single"], "controls": False, "tokens": 512}
    small = few | {"model": name, "pool_tokens": 1024}
    large = {"model": name, "maps": MAPS, "layers": (last - 1, last - 1, 1)}
    rows = {
        "default sizes, three maps, controls": large | DEFAULT,
        "the same, twice the evaluation": large | DEFAULT | {"tokens": 2 * DEFAULT["tokens"]},
        "512 tokens, 4 layers": small | {"layers": (0, last, 4)},
        "512 tokens, all layers": small,
    }
    print(f"{'peak resident memory, GB':40} weights  loaded    peak  peak - weights")
    peaks = {}
    for label, options in rows.items():
        found = {key: value / 1e9 for key, value in peak_of(**options).items()}
        peaks[label] = found["peak"]
        above = found["peak"] - found["weights"]
        print(f"{label:40} {found['weights']:7.2f} {found['loaded']:7.2f} {found['peak']:7.2f} {above:15.2f}")
    first, double, four, all_layers = peaks.values()
    print(f"twice the evaluation: {double / first - 1:+.1%}; all layers against four: {all_layers / four - 1:+.1%}")


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The slope of log time over log size, of what grows: a run's fixed part is the intercept of a line in size."""
    slope = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
    return float(slope)


def units_seconds(model: dl.Model, **options: Any) -> float:
    with tempfile.TemporaryDirectory() as folder, watched() as spent:
        dl.run(model, out=Path(folder) / "r", **options)
    return spent["units"]


def report_growth() -> None:
    """Exponents of the units' time, the least of two runs at each size."""
    model = dl.load("tiny-gpt2")
    base = {"maps": MAPS, "layers": [2], "tokens": 2048, "pool_tokens": 4096, "resamples": 100, "window": 128}
    sweeps = {
        "evaluation tokens": ("tokens", [1024, 2048, 4096]),
        "pool tokens": ("pool_tokens", [2048, 4096, 8192]),
        "layers": ("layers", [[2], [2, 3], [1, 2, 3, 4]]),
        "neighbours k": ("neighbors", [32, 64, 128]),
    }
    print(f"\n{'time of the units against':28} exponent   seconds")
    for label, (field, values) in sweeps.items():
        seconds = [min(units_seconds(model, **base | {field: value}) for _ in range(2)) for value in values]
        sizes = [len(value) if isinstance(value, list) else value for value in values]
        print(f"{label:28} {exponent(sizes, seconds):8.2f}   {', '.join(f'{s:.2f}' for s in seconds)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["time", "memory", "growth"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", default="4,25")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    model = dl.load(options.model)
    if "time" in options.parts:
        report_time(model, [int(at) for at in options.layers.split(",")], options.tokens)
    if "memory" in options.parts:
        print()
        report_memory(model)
    if "growth" in options.parts:
        report_growth()


if __name__ == "__main__":
    main()

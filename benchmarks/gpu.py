"""One accelerator beside the CPU: whether both give the same numbers, and what models of several sizes cost there.

    python benchmarks/gpu.py                     # on CUDA: under ten minutes, models of random weights up to 1.4B
    python benchmarks/gpu.py --device cpu        # tiny sizes, the script's own test

Equality is of float32 fits, captured states and single-position KL; any gap above its tolerance ends with status 1. The
timed models run in bfloat16 on CUDA with float32 fits. Nothing is compiled: chunks of a stream differ in length, so
torch.compile would build a graph per length and layer and take longer than a run.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers

from deltalens.core.decompose import decompose
from deltalens.core.divergence import kl_divergence
from deltalens.core.maps import MAPS
from deltalens.models import InterventionSession, Model, capture, load

SIZES = {
    "tiny": (64, 4, 4, 512),
    "70M": (512, 6, 8, 50304),
    "410M": (1024, 24, 16, 50304),
    "1.4B": (2048, 24, 16, 50304),
}
"""Width, layers, heads and vocabulary of the Pythia models."""

#: Largest gap relative to the largest value; networks amplify rounding over their steps.
TOLERANCE = {"mlp": 0.05}


@dataclass(frozen=True)
class Sizes:
    """How much is fitted and patched."""

    anchors: int
    width: int
    tokens: int
    windows: int


def neox(size: str, dtype: torch.dtype, device: str) -> Model:
    """A GPT-NeoX of one size with random weights."""
    width, layers, heads, vocabulary = SIZES[size]
    config = transformers.GPTNeoXConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    return load(transformers.GPTNeoXForCausalLM(config).to(dtype).to(device).eval())


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds of the second of two calls, the accelerator's queue included."""
    for _ in range(2):
        _settle(device)
        start = time.perf_counter()
        work()
        _settle(device)
    return time.perf_counter() - start


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference relative to the largest value."""
    return float((found.cpu().double() - expected.double()).abs().max() / expected.double().abs().max())


def states(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and outputs of a layer-like function."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes.anchors, sizes.width, generator=generator) + 1
    mixing = torch.randn(sizes.width, sizes.width, generator=generator) / sizes.width**0.5
    return x, x + torch.tanh(x @ mixing)


def compare_maps(sizes: Sizes, device: str) -> list[tuple[str, float, float]]:
    """Every fitted map, local and global: its name, the gap of T(x), the tolerance."""
    x, y = states(sizes)
    rows = []
    for form in MAPS:
        if form == "isolated":
            continue
        name = form.replace(":r", ":8").replace(":h", ":8")
        for fit in ("local", "global"):
            ours, theirs = (
                decompose(x.to(where), y.to(where), protocol="in_sample", map=name, neighbors=32, fit=fit)
                for where in (device, "cpu")
            )
            found = gap(ours.tokenwise, theirs.tokenwise)
            rows.append((f"{name}, {fit}", found, TOLERANCE.get(name.split(":")[0], 1e-4)))
    return rows


def compare_models(sizes: Sizes, device: str) -> list[tuple[str, float, float]]:
    """Captured states and single-position KL of one model."""
    ids = torch.randint(3, 500, (2, min(sizes.tokens, 64)), generator=torch.Generator().manual_seed(0))
    kl, captured = [], []
    for where in (device, "cpu"):
        model = neox("tiny", torch.float32, where)
        with capture(model, ids.to(where)) as found:
            outputs = found.outputs[1]
        captured.append(outputs.cpu())
        kl.append(all_kl(model, ids.to(where), 1, captured[-1].roll(1, 1).to(where)).cpu())
    return [("captured outputs", gap(*captured), 1e-4), ("single-position KL", gap(*kl), 1e-3)]


def all_kl(model: Model, ids: torch.Tensor, layer: int, replaced: torch.Tensor) -> torch.Tensor:
    """KL at every token when its own state alone is replaced."""
    kl = torch.empty(ids.shape, device=ids.device)
    with torch.no_grad(), InterventionSession(model, ids) as session:
        for chunk in session.stream(layer, [replaced]):
            kl[chunk.windows.to(kl.device), chunk.positions.to(kl.device)] = kl_divergence(
                chunk.original, chunk.patched
            )
    return kl


def times(size: str, sizes: Sizes, device: str) -> None:
    """Print what one size costs: a forward, all KLs of the middle layer, and local fits of its states."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = neox(size, dtype, device)
    ids = torch.randint(3, 500, (sizes.windows, sizes.tokens), generator=torch.Generator().manual_seed(0)).to(device)
    layer = model.n_layers // 2
    with torch.no_grad():
        forward = timed(lambda: model.hf(input_ids=ids, use_cache=False), device)
        with capture(model, ids) as found:
            x, y = found.inputs[layer].flatten(0, 1).float(), found.outputs[layer].flatten(0, 1).float()
        patched = timed(lambda: all_kl(model, ids, layer, found.outputs[layer].roll(1, 1)), device)
    print(f"{size:>6} {ids.numel():7d} tokens  forward {forward:7.3f} s  KL of all tokens, one layer {patched:7.3f} s")
    for name in ("diagonal", "linear", "low_rank:8", "orthogonal", "mlp:32"):
        took = timed(lambda name=name: decompose(x, y, protocol="in_sample", map=name, neighbors=32), device)  # type: ignore[misc]
        print(
            f"{'':>6} {name:12} {len(x) / took:10.0f} fits/s at d {x.shape[1]}, with subspaces",
            flush=True,
        )


def main() -> None:
    """Compare, then time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", help="comma-separated; by default all on CUDA, tiny on a CPU")
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        sys.exit("no CUDA device is there; use --device cpu to try the script")
    sizes = Sizes(96, 48, 32, 2) if on_cpu else Sizes(2048, 512, 256, 8)
    print(f"torch {torch.__version__}, {'CPU' if on_cpu else torch.cuda.get_device_name(args.device)}")
    compared = compare_maps(sizes, args.device) + compare_models(sizes, args.device)
    for name, found, tolerance in compared:
        print(f"{name:28} gap {found:8.1e}  tolerance {tolerance:g}  {'ok' if found <= tolerance else 'TOO LARGE'}")
    for size in (args.sizes or ("tiny" if on_cpu else "70M,410M,1.4B")).split(","):
        times(size, sizes, args.device)
    if any(not found <= tolerance for _, found, tolerance in compared):
        sys.exit("some numbers differ from the CPU's")


if __name__ == "__main__":
    main()

"""Local fits per second of every map, beside a per-anchor rival on the same neighbourhoods, and whether both agree.

Run as ``python benchmarks/fits.py``; ``--anchors`` shrinks it. Rivals are timed on a sample of anchors, stated in the
table, with single-threaded linear algebra (which is fastest for problems this small).
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import Ridge
from threadpoolctl import threadpool_limits

from deltalens.core.batches import batch_size, over_batches
from deltalens.core.decompose import decompose_layer
from deltalens.core.maps import FitProblem, Table, TokenwiseMap, parse_map
from deltalens.core.neighbors import Neighborhoods, find_neighborhoods
from deltalens.core.products import PoolGram

Result = TypeVar("Result")
Rows = NDArray[np.float32]
RIDGE = 1e-2
HIDDEN = 32
RANK = 8


@dataclass(frozen=True)
class Line:
    """One map's figures; fits per second, the rival's anchors, and how far T(x) differs, relative to max|T|."""

    map: str
    ours: float
    with_subspace: float
    rival: str
    rival_anchors: int
    theirs: float
    ratio: float
    median_difference: float
    largest_difference: float


def mean_rival(x: Rows, _: Rows, updates: Rows) -> Rows:
    return x + updates.mean(0)


def scalar_rival(x: Rows, rows: Rows, updates: Rows) -> Rows:
    penalty = RIDGE * np.sum(rows * rows)
    return x * ((np.sum(rows * (rows + updates)) + penalty) / (np.sum(rows * rows) + penalty))


def diagonal_rival(x: Rows, rows: Rows, updates: Rows) -> Rows:
    squares = np.sum(rows * rows, 0)
    penalty = RIDGE * squares.sum() / rows.shape[1]
    return x * np.maximum(0, (np.sum(rows * (rows + updates), 0) + penalty) / (squares + penalty))


def linear_rival(x: Rows, rows: Rows, updates: Rows) -> Rows:
    penalty = RIDGE * float(np.sum(rows * rows)) / len(rows)
    return x + Ridge(alpha=penalty, fit_intercept=False).fit(rows, updates).predict(x[None])[0]


def affine_rival(x: Rows, rows: Rows, updates: Rows) -> Rows:
    centered = rows - rows.mean(0)
    penalty = RIDGE * float(np.sum(centered * centered)) / len(rows)
    return x + Ridge(alpha=penalty).fit(rows, updates).predict(x[None])[0]


def low_rank_rival(x: Rows, rows: Rows, updates: Rows) -> Rows:
    penalty = RIDGE * np.sum(rows * rows) / len(rows)
    matrix = np.linalg.solve(rows.T @ rows + penalty * np.eye(rows.shape[1], dtype=rows.dtype), rows.T @ updates)
    _, vectors = np.linalg.eigh(updates.T @ (rows @ matrix))
    top = vectors[:, -RANK:]
    return x + top @ (top.T @ (x @ matrix))


def orthogonal_rival(x: Rows, rows: Rows, updates: Rows) -> Rows:
    penalty = RIDGE * np.sum(rows * rows) / len(rows)
    left, _, right = np.linalg.svd((rows + updates).T @ rows + penalty * np.eye(rows.shape[1], dtype=rows.dtype))
    return left @ (right @ x)


def mlp_rival(x: Rows, rows: Rows, updates: Rows) -> Rows:
    points, moves, anchor = (torch.from_numpy(a) for a in (rows, updates, x))
    middle, mean = points.mean(0), moves.mean(0)
    _, sigma, axes = torch.linalg.svd(points - middle, full_matrices=False)
    axes = axes[sigma > max(points.shape) * torch.finfo(points.dtype).eps * sigma[0]]
    inside = (points - middle) @ axes.T
    axes = axes * torch.sign(inside.gather(0, inside.abs().argmax(0, keepdim=True))).T
    size, scale = inside.square().sum(1).mean().sqrt(), (moves - mean).square().sum(1).mean().sqrt()
    features, targets = (points - middle) @ axes.T / size, (moves - mean) / scale
    draws = torch.randn(len(rows), HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = (draws[: len(axes)].T / len(axes) ** 0.5).float().clone().requires_grad_()
    first_bias = torch.zeros(HIDDEN, requires_grad=True)
    second = torch.zeros(rows.shape[1], HIDDEN, requires_grad=True)
    second_bias = torch.zeros(rows.shape[1], requires_grad=True)
    weights = [first, first_bias, second, second_bias]
    optimizer = torch.optim.Adam(weights, lr=0.01)

    def network(inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(inputs @ first.T + first_bias) @ second.T + second_bias

    for _ in range(60):
        optimizer.zero_grad()
        out = network(features)
        # ‖t - f‖² with the sum of t, which is zero, left out: its rounding would set Adam's first step.
        error = (out.square() - 2 * targets * (out - second_bias)).sum(1).mean()
        penalty = first.square().sum() + second.square().sum() + second_bias.square().sum()
        (error + RIDGE * penalty).backward()
        optimizer.step()
    with torch.no_grad():
        return (anchor + mean + scale * network((anchor - middle) @ axes.T / size)).numpy()


RIVALS: dict[str, tuple[str, Callable[[Rows, Rows, Rows], Rows], int]] = {
    "mean": ("numpy per anchor", mean_rival, 512),
    "scalar": ("numpy per anchor", scalar_rival, 512),
    "diagonal": ("numpy per anchor", diagonal_rival, 512),
    "linear": ("scikit-learn Ridge", linear_rival, 512),
    "affine": ("scikit-learn Ridge", affine_rival, 512),
    f"low_rank:{RANK}": ("numpy, d x d", low_rank_rival, 16),
    "orthogonal": ("numpy, d x d", orthogonal_rival, 8),
    f"mlp:{HIDDEN}": ("torch loop", mlp_rival, 32),
}


def layer_like_states(count: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States with a common mean and a decaying spectrum, and outputs with a smooth map and a residual."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, width + 1) ** -0.7
    shared = torch.randn(width, generator=torch.Generator().manual_seed(99))
    mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(98)) / width**0.5
    x = (torch.randn(count, width, generator=generator) * spectrum) @ mixing * 5 + shared
    y = x + torch.tanh(x @ mixing) + 0.3 * torch.randn(count, width, generator=generator)
    return x, y


def fit_all(chosen: TokenwiseMap, x: torch.Tensor, table: Table, near: Neighborhoods) -> torch.Tensor:
    """T(x) of every anchor, without subspaces and degrees of freedom."""
    out = torch.empty_like(x)

    problem = chosen.prepared(FitProblem(x.unsqueeze(1), table, near.rows, RIDGE, 0))

    def fill(part: slice) -> None:
        out[part] = x[part] + chosen.fit(problem.part(part)).update()[:, 0]

    size = batch_size(near.rows.shape[1] * x.shape[1] * x.element_size(), x.device)
    over_batches(fill, x.shape[0], size, x.device)
    return out


def best_time(work: Callable[[], Result], repeats: int) -> tuple[float, Result]:
    """The least of several wall times, in seconds, and the last result."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - start)
    return min(times), result


def measure(name: str, pool: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, args: argparse.Namespace) -> Line:
    """One map against its rival."""
    chosen, (px, py) = parse_map(name), pool
    near = find_neighborhoods(x, px, neighbors=args.neighbors)
    label, rival, sample = RIVALS[name]
    sample = min(sample, len(x), args.rival_anchors)

    def ours() -> torch.Tensor:
        # A new table each time: its shared products and the pool's Gram matrix are part of the cost.
        return fit_all(chosen, x, Table(px, py - px, PoolGram(px)), near)

    def whole() -> None:
        decompose_layer(x, x, px, py, near, chosen, ridge=RIDGE)

    (seconds, found), (seconds_whole, _) = best_time(ours, args.repeats), best_time(whole, 1)
    inputs, updates, anchors = px.numpy(), (py - px).numpy(), x.numpy()
    rows = near.indices.numpy()

    def theirs() -> list[Rows]:
        return [rival(anchors[i], inputs[rows[i]], updates[rows[i]]) for i in range(sample)]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        seconds_rival, rows_expected = best_time(theirs, args.repeats)
    torch.set_num_threads(threads)
    expected = np.stack(rows_expected)
    gaps = np.abs(found[:sample].numpy() - expected).max(1) / np.abs(expected).max()
    our_rate, rival_rate = len(x) / seconds, sample / seconds_rival
    return Line(
        map=name,
        ours=our_rate,
        with_subspace=len(x) / seconds_whole,
        rival=label,
        rival_anchors=sample,
        theirs=rival_rate,
        ratio=our_rate / rival_rate,
        median_difference=float(np.median(gaps)),
        largest_difference=float(gaps.max()),
    )


def main() -> None:
    """Print the table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--anchors", type=int, default=4096)
    parser.add_argument("--pool", type=int, default=4096)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--neighbors", type=int, default=64)
    parser.add_argument("--rival-anchors", type=int, default=512, help="the most anchors that a rival is timed on")
    parser.add_argument("--maps", default=",".join(RIVALS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(
        f"{args.anchors} anchors, pool {args.pool}, d = {args.width}, k = {args.neighbors}, float32, ridge {RIDGE}; "
        f"{torch.get_num_threads()} threads, rivals 1; torch {torch.__version__} on {platform.machine()}"
    )
    print(
        f"{'map':12} {'fits/s':>9} {'with V, dof':>11}  {'rival':20} {'anchors':>7} {'fits/s':>9} {'ratio':>7} "
        "median, max diff"
    )
    pool, (x, _) = layer_like_states(args.pool, args.width, 0), layer_like_states(args.anchors, args.width, 1)
    lines = []
    for name in args.maps.split(","):
        line = measure(name, pool, x, args)
        lines.append(line)
        print(
            f"{line.map:12} {line.ours:9.0f} {line.with_subspace:11.0f}  {line.rival:20} {line.rival_anchors:7d} "
            f"{line.theirs:9.1f} {line.ratio:7.1f} {line.median_difference:.1e} {line.largest_difference:.1e}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

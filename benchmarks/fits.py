"""Local fits per second of every map, beside a per-anchor rival on the same neighbourhoods, and how far both agree.

Run as ``python benchmarks/fits.py``; ``--anchors`` shrinks it. Rivals are timed on a sample of anchors, with
single-threaded linear algebra (which is fastest for problems this small).
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rows import CLOCKS, Row, alternately, show
from sklearn.linear_model import Ridge

from deltalens.core.batches import batch_size, over_batches
from deltalens.core.decompose import decompose_layer
from deltalens.core.maps import FitProblem, Table, TokenwiseMap, parse_map
from deltalens.core.neighbors import Neighborhoods, find_neighborhoods
from deltalens.core.products import PoolGram

Rows = NDArray[np.float32]
RIDGE = 1e-2
HIDDEN = 32
RANK = 8
WIDTH, NEIGHBORS, POOL, ANCHORS = 576, 64, 4096, 4096


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


@dataclass(frozen=True)
class Contest:
    """A map's rival, how many anchors each side is timed on, the ratio asked for, and what bounds our cost."""

    label: str
    rival: Callable[[Rows, Rows, Rows], Rows]
    sample: int
    anchors: int
    target: float | None
    floor: str


MEMORY = "reads of k rows per fit"
CONTESTS = {
    "mean": Contest("numpy per anchor", mean_rival, 512, ANCHORS, 5, MEMORY),
    "scalar": Contest("numpy per anchor", scalar_rival, 512, ANCHORS, 5, "one pass over the pool"),
    "diagonal": Contest("numpy per anchor", diagonal_rival, 512, ANCHORS, 5, MEMORY + ", twice"),
    "linear": Contest("scikit-learn Ridge", linear_rival, 512, ANCHORS, 30, "the pool's Gram matrix, and potrf"),
    "affine": Contest("scikit-learn Ridge", affine_rival, 256, ANCHORS, None, "products of centred rows"),
    f"low_rank:{RANK}": Contest("numpy, d x d", low_rank_rival, 8, 1024, 20, "two k x k eigenproblems in float64"),
    "orthogonal": Contest("numpy, d x d", orthogonal_rival, 4, 1024, 20, "one 2k x 2k eigenproblem in float64"),
    f"mlp:{HIDDEN}": Contest("torch loop", mlp_rival, 8, 128, 10, "60 steps of three k x h x d products"),
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

    problem = chosen.prepared(FitProblem.local(x, table, near.rows, RIDGE, 0))

    def fill(part: slice) -> None:
        out[part] = x[part] + chosen.fit(problem.part(part)).update()[:, 0]

    size = batch_size(near.rows.shape[1] * x.shape[1] * x.element_size(), x.device)
    over_batches(fill, x.shape[0], size, x.device)
    return out


def contest(name: str, repeats: int, clock: str, anchors: int | None = None) -> Row:
    """One map against its rival."""
    entry, chosen = CONTESTS[name], parse_map(name)
    count = min(anchors or entry.anchors, entry.anchors)
    px, py = layer_like_states(POOL, WIDTH, 0)
    x, _ = layer_like_states(count, WIDTH, 1)
    near = find_neighborhoods(x, px, neighbors=NEIGHBORS)
    inputs, updates, points, rows = px.numpy(), (py - px).numpy(), x.numpy(), near.indices.numpy()
    sample, found, expected = min(entry.sample, count), [], []

    def ours() -> None:
        # A new table each time: its shared products and the pool's Gram matrix are part of the cost.
        found[:] = [fit_all(chosen, x, Table(px, py - px, PoolGram(px)), near)]

    def theirs() -> None:
        expected[:] = [entry.rival(points[i], inputs[rows[i]], updates[rows[i]]) for i in range(sample)]

    def whole() -> None:
        decompose_layer(x, x, px, py, near, chosen, ridge=RIDGE)

    seconds, rival_seconds = alternately([ours, theirs], repeats, clock, first=1)
    (whole_seconds,) = alternately([whole], 1, clock)
    gaps = np.abs(found[0][:sample].numpy() - np.stack(expected)).max(1) / np.abs(expected).max()
    rate, rival_rate = count / seconds, sample / rival_seconds
    return Row(
        name=f"{name}, {count} local fits, d {WIDTH}, k {NEIGHBORS}",
        ours=rate,
        theirs=rival_rate,
        unit="fits/s",
        rival=f"{entry.label} ({sample} anchors, 1 thread)",
        ratio=rate / rival_rate,
        target=entry.target,
        floor=entry.floor,
        note=f"T(x) differs by {np.median(gaps):.0e}, {gaps.max():.0e} at most; "
        f"with subspace and freedom {count / whole_seconds:.0f}/s",
    )


def rows(
    repeats: int = 3, clock: str = "wall", anchors: int | None = None, maps: str = ",".join(CONTESTS)
) -> Iterator[Row]:
    """A row per map."""
    for name in maps.split(","):
        yield contest(name, repeats, clock, anchors)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--anchors", type=int)
    parser.add_argument("--maps", default=",".join(CONTESTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a machine with other work")
    args = parser.parse_args()
    show(rows(args.repeats, args.clock, args.anchors, args.maps))


if __name__ == "__main__":
    main()

"""Exact nearest neighbours beside scikit-learn's brute force and faiss's flat index, all with the same threads.

Run as ``python benchmarks/neighbors.py``.
"""

import argparse
from collections.abc import Iterator

import faiss
import numpy as np
import torch
from fits import layer_like_states
from rows import CLOCKS, Row, alternately, show
from sklearn.neighbors import NearestNeighbors

from deltalens.core.neighbors import find_neighborhoods

WIDTH, NEIGHBORS, POOL = 576, 64, 20_000


def rows(repeats: int = 2, clock: str = "wall", anchors: int = POOL) -> Iterator[Row]:
    """One row: the rival is the faster of the two libraries."""
    pool, _ = layer_like_states(POOL, WIDTH, 0)
    points, _ = layer_like_states(anchors, WIDTH, 1)
    states, asked = pool.numpy(), points.numpy()
    faiss.omp_set_num_threads(torch.get_num_threads())
    found: dict[str, np.ndarray] = {}

    def ours() -> None:
        found["ours"] = find_neighborhoods(points, pool, neighbors=NEIGHBORS).indices.numpy()

    def sklearn_brute() -> None:
        index = NearestNeighbors(n_neighbors=NEIGHBORS, algorithm="brute").fit(states)
        found["scikit-learn brute"] = index.kneighbors(asked, return_distance=False)

    def faiss_flat() -> None:
        index = faiss.IndexFlatL2(WIDTH)
        index.add(states)
        found["faiss flat"] = index.search(asked, NEIGHBORS)[1]

    seconds = alternately([ours, sklearn_brute, faiss_flat], repeats, clock)
    rivals = dict(zip(("scikit-learn brute", "faiss flat"), seconds[1:], strict=True))
    best = min(rivals, key=lambda name: rivals[name])
    slower = max(rivals, key=lambda name: rivals[name])
    agree = float((np.sort(found["ours"]) == np.sort(found[best])).mean())
    yield Row(
        name=f"neighbours, {anchors} in {POOL}, d {WIDTH}, k {NEIGHBORS}",
        ours=seconds[0],
        theirs=rivals[best],
        unit="s",
        rival=best,
        ratio=rivals[best] / seconds[0],
        target=1.0,
        floor="one product of anchors and pool",
        note=f"{slower} {rivals[slower]:.3g} s; {agree:.2%} of neighbours equal (ours are exact in float64)",
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--anchors", type=int, default=POOL)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a machine with other work")
    args = parser.parse_args()
    show(rows(args.repeats, args.clock, args.anchors))


if __name__ == "__main__":
    main()

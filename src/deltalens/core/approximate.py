"""Approximate candidates for the neighbourhoods of large pools, by faiss's inverted lists (extra ``faiss``)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.errors import InputError

PROBED_SHARE = 1 / 16
"""The share of the lists that is searched for an anchor."""

FEWEST_PROBED = 16
"""The fewest lists that are searched, if there are as many."""

ADDED_ROWS = 2**16
"""Rows that are copied into the lists at a time."""


def require_faiss() -> Any:
    """The faiss module, or one line on how to get it."""
    try:
        import faiss
    except ImportError:
        raise InputError("search 'faiss' needs the extra 'faiss': pip install 'deltalens[faiss]'") from None
    return faiss


@dataclass(frozen=True)
class InvertedLists:
    """Points in lists around centres found by k-means: a search looks through the lists nearest to an anchor."""

    index: Any
    centre: Float[Tensor, " d"]
    scale: float
    count: int

    @staticmethod
    def of(points: Float[Tensor, "p d"]) -> "InvertedLists":
        """About ``4 √p`` lists; k-means is seeded and learns from a sample."""
        faiss = require_faiss()
        count, width = points.shape
        centre = points.mean(0)
        scale = max(float((points[:ADDED_ROWS] - centre).abs().max()), torch.finfo(points.dtype).tiny)
        lists = max(1, min(round(4 * math.sqrt(count)), count // 39))
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(width), width, lists)
        index.cp.seed = 0
        faiss.omp_set_num_threads(torch.get_num_threads())
        sample = torch.randperm(count, generator=torch.Generator().manual_seed(0))[: lists * 64]
        made = InvertedLists(index, centre, scale, count)
        index.train(made._as_rows(points[sample.to(points.device)]))
        for part in torch.split(points, ADDED_ROWS):
            index.add(made._as_rows(part))
        return made

    def candidates(self, anchors: Float[Tensor, "n d"], count: int) -> Int[Tensor, "n c"]:
        """The apparently nearest points of each anchor, as many as asked or as there are, without repeats."""
        faiss, count = require_faiss(), min(count, self.count)
        faiss.omp_set_num_threads(torch.get_num_threads())
        asked = self._as_rows(anchors)
        self.index.nprobe = min(self.index.nlist, max(FEWEST_PROBED, math.ceil(self.index.nlist * PROBED_SHARE)))
        found = self.index.search(asked, count)[1]
        while (found < 0).any():
            # The lists near some anchors hold too few points.
            short = (found < 0).any(1)
            self.index.nprobe = min(self.index.nlist, 2 * self.index.nprobe)
            found[short] = self.index.search(asked[short], count)[1]
        return torch.from_numpy(found).to(anchors.device)

    def _as_rows(self, points: Tensor) -> np.ndarray:
        return ((points - self.centre) / self.scale).float().cpu().contiguous().numpy()

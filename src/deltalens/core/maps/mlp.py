"""The map ``mlp:h``: a small network on each neighbourhood, trained by a fixed, seeded recipe."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltalens.core.maps.global_map import CenteredNetwork
from deltalens.core.maps.network import Network, train_networks
from deltalens.core.maps.protocol import FitProblem, TokenwiseMap
from deltalens.core.subspaces import Subspace, dominant_subspace

PROBE_STEP = 1e-2
"""Size of a Hutchinson probe of the updates, relative to their root-mean-square entry."""


@dataclass(frozen=True)
class Mlp(TokenwiseMap):
    """``T(x) = x + δ̄ + f(x̂)``, ``f(x̂) = W₂ gelu(W₁ x̂ + b₁) + b₂`` with h hidden units."""

    hidden: int = 32
    fitted: ClassVar[bool] = True
    update_rank: ClassVar[None] = None

    @property
    def name(self) -> str:
        """``mlp:h``."""
        return f"mlp:{self.hidden}"

    def fit(self, problem: FitProblem) -> "MlpFit":
        """Train all networks of the batch at once."""
        return MlpFit(problem, self.hidden)


@dataclass(frozen=True)
class MlpFit:
    """A batch of trained networks; the zero update where all inputs are zero."""

    problem: FitProblem
    hidden: int

    @cached_property
    def _centered(self) -> FitProblem:
        return self.problem.centered()

    @cached_property
    def _features(self) -> "Features":
        return principal_coordinates(self._centered)

    @cached_property
    def _some(self) -> Tensor:
        return (self.problem.energy > 0).to(self.problem.dtype).view(-1, 1, 1)

    def _trained(self, features: Tensor, centered_updates: Tensor, rank: Tensor) -> Network:
        return train_networks(
            features,
            centered_updates,
            rank,
            hidden=self.hidden,
            ridge=self.problem.ridge,
            seed=self.problem.seed,
        )

    @cached_property
    def _network(self) -> Network:
        return self._trained(self._features.rows, self._centered.updates, self._features.rank)

    def update(self) -> Float[Tensor, "b a d"]:
        """``δ̄ + f(x̂)`` at the anchors."""
        return (self._network(self._features.anchors) + self.problem.mean_update.unsqueeze(1)) * self._some

    @cached_property
    def _fitted_updates(self) -> Float[Tensor, "b k d"]:
        return (self._network(self._features.rows) + self.problem.mean_update.unsqueeze(1)) * self._some

    def subspace(self, size: int) -> Subspace:
        """Dominant directions of ``δ̄ + f(x̂_j)``."""
        return dominant_subspace(self._fitted_updates, size)

    def degrees_of_freedom(self) -> Float[Tensor, " b"]:
        """Hutchinson's estimate: the mean of ``Z · (ŷ(Y + εZ) - ŷ(Y)) / ε / d`` over seeded sign matrices Z.

        Each probe trains again, so fits that the problem doesn't mark as probed are left NaN.
        """
        chosen = self._probed
        centered = self._centered.updates[chosen]
        freedom = self.problem.mean_update.new_full((self.problem.anchors.shape[0],), torch.nan)
        if not self.problem.probes or not chosen.numel():
            return freedom
        size = centered.square().mean((1, 2), keepdim=True).sqrt() * PROBE_STEP
        step = torch.where(size > 0, size, 1.0)
        generator = torch.Generator().manual_seed(self.problem.seed)
        total = centered.new_zeros(centered.shape[0])
        for _ in range(self.problem.probes):
            signs = torch.randint(0, 2, centered.shape[1:], generator=generator).to(centered) * 2 - 1
            total = total + (self._response(chosen, centered, step, signs) * signs / step).sum((1, 2))
        freedom[chosen] = total / (self.problem.probes * self.problem.width)
        return freedom

    def parameters(self) -> CenteredNetwork:
        """The trained network with the axes and means that it sees states by."""
        network, some = self._network, self._some[0, 0]
        axes = principal_coordinates(self._centered.at_unit_vectors()).anchors[0]
        return CenteredNetwork(
            axes=axes.mT,
            center=self.problem.inputs[0].mean(0),
            shift=self.problem.mean_update[0] * some,
            first=network.first[0].mT,
            first_bias=network.first_bias[0, 0],
            second=network.second[0].mT,
            second_bias=network.second_bias[0, 0],
            scale=network.scale[0, 0] * some,
        )

    @cached_property
    def _probed(self) -> Int[Tensor, " c"]:
        marked = self.problem.probed
        if marked is None:
            return torch.arange(self.problem.anchors.shape[0], device=self.problem.anchors.device)
        return marked.nonzero()[:, 0]

    def _response(self, chosen: Tensor, centered: Tensor, step: Tensor, signs: Tensor) -> Float[Tensor, "c k d"]:
        """How the chosen fits' fitted updates change when their updates move by ``step · signs``."""
        middle = signs.mean(0)
        features = self._features.rows[chosen]
        moved = self._trained(features, centered + step * (signs - middle), self._features.rank[chosen])
        change = moved(features) + step * middle + self.problem.mean_update[chosen].unsqueeze(1)
        return change * self._some[chosen] - self._fitted_updates[chosen]


@dataclass(frozen=True)
class Features:
    """``x̂ = Eᵀ(x - x̄) / s`` of rows and anchors in their principal axes, zero past each fit's rank q."""

    rows: Float[Tensor, "b k q"]
    anchors: Float[Tensor, "b a q"]
    rank: Float[Tensor, " b"]


def principal_coordinates(centered: FitProblem) -> Features:
    """Coordinates of centred rows and anchors on the rows' principal axes, over the rows' RMS norm.

    An axis counts where ``σ > max(k, d) · eps · σ₁``; its sign makes its largest row coordinate positive.
    """
    x, anchors = centered.inputs.double(), centered.anchors.double()
    k, d = centered.count, centered.width
    if k <= d:
        values, vectors = torch.linalg.eigh(x @ x.mT)
        rows = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
        points = (anchors @ x.mT) @ vectors / values.clamp_min(torch.finfo(x.dtype).tiny).sqrt().unsqueeze(1)
    else:
        values, vectors = torch.linalg.eigh(x.mT @ x)
        rows, points = x @ vectors, anchors @ vectors
    squared_noise = max((max(k, d) * torch.finfo(centered.dtype).eps) ** 2, min(k, d) * torch.finfo(x.dtype).eps)
    keep = (values > squared_noise * values[:, -1:]).unsqueeze(1)
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    root_mean_square = (values.clamp_min(0).sum(1) / k).sqrt().view(-1, 1, 1)
    unit = torch.where(root_mean_square > 0, root_mean_square, 1.0)
    factor = torch.where(keep, torch.where(largest < 0, -1.0, 1.0) / unit, 0.0)
    rows, points = (rows * factor).flip(2), torch.where(keep, points * factor, 0.0).flip(2)
    return Features(rows.to(centered.dtype), points.to(centered.dtype), keep.sum((1, 2)).to(centered.dtype))

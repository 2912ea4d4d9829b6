"""Batches of one-hidden-layer networks, trained together by Adam with gradients written out."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

STEPS = 60
"""Full-batch Adam steps."""

LEARNING_RATE = 0.01
"""Adam's step size, with W₂ and b₂ in units of the root-mean-square centred update: fits commute with scaling."""


@dataclass(frozen=True)
class Network:
    """``f(x̂) = scale · (W₂ gelu(W₁ x̂ + b₁) + b₂)``, weights transposed, one network per fit."""

    first: Float[Tensor, "b q h"]
    first_bias: Float[Tensor, "b 1 h"]
    second: Float[Tensor, "b h d"]
    second_bias: Float[Tensor, "b 1 d"]
    scale: Float[Tensor, "b 1 1"]

    def __call__(self, features: Float[Tensor, "b n q"]) -> Float[Tensor, "b n d"]:
        """The networks' outputs, in state units."""
        hidden = torch.nn.functional.gelu(torch.baddbmm(self.first_bias, features, self.first))
        return torch.baddbmm(self.second_bias, hidden, self.second) * self.scale


def train_networks(
    features: Float[Tensor, "b k q"],
    centered_updates: Float[Tensor, "b k d"],
    rank: Float[Tensor, " b"],
    *,
    hidden: int,
    ridge: float,
    seed: int,
) -> Network:
    """Minimise ``mean_j ‖t_j - f_j‖² + ridge (‖W₁‖² + ‖W₂‖² + ‖b₂‖²)``, t the centred updates over their RMS norm.

    Args:
        features: x̂ of the rows (b, k, q), zero past each fit's rank.
        centered_updates: ``δ_j - δ̄`` (b, k, d).
        rank: q of each fit.
        hidden: h.
        ridge: The penalty.
        seed: Seeds W₁, whose entries are N(0, 1/q); all other weights start at zero.

    Returns:
        The trained networks.
    """
    mean_square = centered_updates.double().square().sum((1, 2), keepdim=True) / features.shape[1]
    scale = torch.where(mean_square > 0, mean_square.sqrt(), 1.0).to(features.dtype)
    network = _initial(features, centered_updates.shape[2], rank, hidden, seed, scale)
    targets = centered_updates / scale
    # Adam's weight decay is the gradient of the penalty, which leaves the first bias out.
    groups: list[dict[str, Any]] = [
        {"params": [network.first, network.second, network.second_bias], "weight_decay": 2 * ridge},
        {"params": [network.first_bias]},
    ]
    optimizer = torch.optim.Adam(groups, lr=LEARNING_RATE, fused=True)
    gradients = Gradients.of(network, targets)
    for _ in range(STEPS):
        gradients.write(network, features, targets)
        optimizer.step()
    return network


def _initial(features: Tensor, width: int, rank: Tensor, hidden: int, seed: int, scale: Tensor) -> Network:
    b, _, axes = features.shape
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(axes, hidden, generator=generator, dtype=torch.float64).to(features)
    used = torch.arange(axes, device=features.device) < rank.unsqueeze(1)
    first = draws * (used / rank.clamp_min(1).sqrt().unsqueeze(1)).unsqueeze(2)
    zeros = features.new_zeros
    return Network(first.to(features.dtype), zeros(b, 1, hidden), zeros(b, hidden, width), zeros(b, 1, width), scale)


@dataclass(frozen=True)
class Gradients:
    """Room for a batch's errors and activations, so that steps allocate nothing large."""

    error: Float[Tensor, "b k d"]
    inner: Float[Tensor, "b k h"]
    inner_error: Float[Tensor, "b k h"]

    @staticmethod
    def of(network: Network, targets: Float[Tensor, "b k d"]) -> "Gradients":
        """Room for a batch, with every weight's gradient in place."""
        for weight in (network.first, network.first_bias, network.second, network.second_bias):
            weight.grad = torch.empty_like(weight)
        b, k, _ = targets.shape
        hidden = network.first.shape[2]
        return Gradients(torch.empty_like(targets), targets.new_empty(b, k, hidden), targets.new_empty(b, k, hidden))

    def write(self, network: Network, features: Float[Tensor, "b k q"], targets: Float[Tensor, "b k d"]) -> None:
        """Write the gradients of the mean squared error into the weights' ``grad``."""
        share = 2 / features.shape[1]
        torch.bmm(features, network.first, out=self.inner).add_(network.first_bias)
        active = torch.nn.functional.gelu(self.inner)
        torch.bmm(active, network.second, out=self.error).add_(network.second_bias).sub_(targets)
        torch.bmm(self.error, network.second.mT, out=self.inner_error)
        # Targets sum to zero; leaving them out of the sum keeps rounding from becoming Adam's first step.
        mean_active = active.mean(1, keepdim=True)
        torch.bmm(mean_active, network.second, out=network.second_bias.grad).add_(network.second_bias).mul_(2)
        torch.bmm(active.mul_(share).mT, self.error, out=network.second.grad)
        inner_gradient = torch.ops.aten.gelu_backward(self.inner_error.mul_(share), self.inner)
        torch.bmm(features.mT, inner_gradient, out=network.first.grad)
        torch.sum(inner_gradient, 1, keepdim=True, out=network.first_bias.grad)

"""Matched perturbations and shuffled pairs: what the same numbers would be without the structure in question."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.errors import InputError

ATTEMPTS = 200
"""Random reshuffles of colliding pairs before the pairing by a shift."""


def layer_seed(seed: int, layer: int) -> int:
    """The seed of one layer's draws: ``(seed + 2654435769 (layer + 1)) mod 2³²``, another at every layer.

    Args:
        seed: The run's seed.
        layer: The layer, from 0.

    Returns:
        A seed of 32 bits, which is all that torch's generator on a CPU reads.

    Source:
        The random controls of docs/method.md.

    Example:
        >>> len({layer_seed(0, layer) for layer in range(1000)})
        1000
    """
    return (seed + 2654435769 * (layer + 1)) % 2**32


def derangement(windows: Int[Tensor, " n"], included: Bool[Tensor, " n"], seed: int) -> Int[Tensor, " n"]:
    """Pair every included token with an included token of another window, one to one where that is possible.

    Args:
        windows: Each token's window (n,).
        included: Which tokens take part (n,).
        seed: Seeds the pairing.

    Returns:
        The partner's index (n,), -1 for excluded tokens and where there is no other window. One to one unless one
        window holds more than half of the tokens.

    Raises:
        InputError: Lengths differ.

    Source:
        The shuffled control of docs/method.md.

    Example:
        >>> import torch
        >>> derangement(torch.tensor([0, 1, 1]), torch.tensor([True, True, False]), seed=0).tolist()
        [1, 0, -1]
    """
    if windows.shape != included.shape:
        raise InputError(f"windows has {windows.shape[0]} tokens, but included has {included.shape[0]}")
    generator = torch.Generator().manual_seed(seed)
    partner = torch.full(windows.shape, -1, dtype=torch.long, device=windows.device)
    members = included.nonzero()[:, 0].cpu()
    labels = windows.cpu()[members]
    if torch.unique(labels).shape[0] < 2:
        return partner
    chosen = _paired(labels, generator)
    partner[members.to(partner.device)] = members[chosen].to(partner.device)
    return partner


def _paired(labels: Tensor, generator: torch.Generator) -> Tensor:
    count = labels.shape[0]
    largest = int(torch.bincount(torch.unique(labels, return_inverse=True)[1]).max())
    if 2 * largest > count:
        return _drawn_from_other_windows(labels, generator)
    chosen = torch.randperm(count, generator=generator)
    for _ in range(ATTEMPTS):
        clashing = (labels[chosen] == labels).nonzero()[:, 0]
        if clashing.numel() == 0:
            return chosen
        others = torch.randint(count, (clashing.shape[0],), generator=generator)
        mixed = torch.unique(torch.cat([clashing, others]))
        chosen[mixed] = chosen[mixed[torch.randperm(mixed.shape[0], generator=generator)]]
    order = torch.randperm(count, generator=generator)
    order = order[labels[order].argsort(stable=True)]
    shifted = torch.empty_like(order)
    shifted[order] = order.roll(largest)
    return shifted


def _drawn_from_other_windows(labels: Tensor, generator: torch.Generator) -> Tensor:
    chosen = torch.empty_like(labels, dtype=torch.long)
    for label in torch.unique(labels):
        own = labels == label
        elsewhere = (~own).nonzero()[:, 0]
        draws = torch.randint(elsewhere.shape[0], (int(own.sum()),), generator=generator)
        chosen[own] = elsewhere[draws]
    return chosen


def random_directions(residual: Float[Tensor, "n d"], seed: int) -> Float[Tensor, "n d"]:
    """``‖r‖ u`` with u uniform on the sphere: perturbations of the residuals' sizes in random directions.

    Args:
        residual: Residuals (n, d).
        seed: Seeds the directions.

    Returns:
        Vectors of the same norms, to be subtracted from y.

    Source:
        The control of arXiv 2602.11169 and of sensitive-direction studies.

    Example:
        >>> import torch
        >>> random_directions(torch.tensor([[3.0, 4.0]]), seed=0).norm().round().item()
        5.0
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(residual.shape, generator=generator, dtype=torch.float64).to(residual.device)
    return _resized(draws, residual)


def shuffled_directions(residual: Float[Tensor, "n d"], partner: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
    """``‖r‖ r_j / ‖r_j‖`` with j the partner token: the size of one's own residual, the direction of another's.

    Args:
        residual: Residuals (n, d).
        partner: The token whose direction is taken (n,), -1 for none.

    Returns:
        Vectors of the same norms, to be subtracted from y; NaN without a partner, or with a zero one.

    Source:
        The shuffled control of docs/method.md.

    Example:
        >>> import torch
        >>> shuffled_directions(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([1, 0])).tolist()
        [[0.0, 1.0], [2.0, 0.0]]
    """
    directions = residual.double()[partner.clamp_min(0)]
    return _resized(torch.where((partner >= 0).unsqueeze(1), directions, torch.nan), residual)


def covariance_directions(
    residual: Float[Tensor, "n d"], included: Bool[Tensor, " n"], seed: int
) -> Float[Tensor, "n d"]:
    """``‖r‖ u`` with u a Gaussian draw of the included residuals' covariance, brought to length one.

    Args:
        residual: Residuals (n, d).
        included: Which tokens the covariance is taken over (n,).
        seed: Seeds the draws.

    Returns:
        Vectors of the same norms, to be subtracted from y; NaN where the covariance is zero.

    Source:
        The option ``kl_single_covariance`` of docs/method.md.

    Example:
        >>> import torch
        >>> residual = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> covariance_directions(residual, torch.tensor([True, True]), seed=0).abs().tolist()
        [[1.0, 0.0], [1.0, 0.0]]
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(residual.shape, generator=generator, dtype=torch.float64).to(residual.device)
    kept = residual.double()[included]
    centered = kept - kept.mean(0)
    values, vectors = torch.linalg.eigh(centered.T @ centered / max(1, kept.shape[0]))
    noise = values.shape[0] * torch.finfo(values.dtype).eps * values.amax()
    spread = torch.where(values > noise, values.clamp_min(0).sqrt(), 0.0)
    return _resized((draws * spread) @ vectors.T, residual)


def permuted_updates(updates: Float[Tensor, "n d"], included: Bool[Tensor, " n"], seed: int) -> Float[Tensor, "n d"]:
    """Permute the included tokens' updates among themselves: pairs (x, δ) that have nothing to do with each other.

    Args:
        updates: ``δ = y - x`` (n, d).
        included: Which tokens take part (n,).
        seed: Seeds the permutation.

    Returns:
        The updates in their new places; excluded ones stay.

    Source:
        The null of docs/method.md.

    Example:
        >>> import torch
        >>> updates = torch.arange(3.0).unsqueeze(1)
        >>> permuted_updates(updates, torch.tensor([True, True, False]), seed=0)[2].item()
        2.0
    """
    generator = torch.Generator().manual_seed(seed)
    members = included.nonzero()[:, 0]
    moved = updates.clone()
    moved[members] = updates[members[torch.randperm(members.shape[0], generator=generator).to(members.device)]]
    return moved


def _resized(directions: Tensor, residual: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    size = torch.linalg.vector_norm(residual.double(), dim=1, keepdim=True)
    return torch.where(length > 0, directions / length * size, torch.nan).to(residual.dtype)

"""Divergences of next-token distributions and next-token losses, from logits, in chunks, in nats."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.errors import InputError

CHUNK_ENTRIES = 2**22
"""Logits that are in work at once."""

LARGEST_EXPONENT = 30.0
"""Centred logit differences beyond this go through log-probabilities in float64."""


def kl_divergence(original_logits: Float[Tensor, "*n v"], patched_logits: Float[Tensor, "*n v"]) -> Float[Tensor, "*n"]:
    """``KL(P_orig ‖ P_patched) = log Σ p₀ e^δ - Σ p₀ δ``, δ the logit difference centred under p₀.

    Args:
        original_logits: Logits of the unpatched run (..., v).
        patched_logits: Logits of the patched run (..., v).

    Returns:
        KL per position in nats, in float32 at least.

    Raises:
        InputError: Shapes differ.

    Source:
        Section 3 of arXiv 2604.02459 measures this divergence.

    Example:
        >>> import torch
        >>> original, patched = torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> round(kl_divergence(original, patched).item(), 4)
        0.1201
    """
    return _in_chunks(_kl_rows, original_logits, patched_logits)


def reverse_kl(original_logits: Float[Tensor, "*n v"], patched_logits: Float[Tensor, "*n v"]) -> Float[Tensor, "*n"]:
    """``KL(P_patched ‖ P_orig)``.

    Args:
        original_logits: Logits of the unpatched run (..., v).
        patched_logits: Logits of the patched run (..., v).

    Returns:
        Reverse KL per position in nats.

    Raises:
        InputError: Shapes differ.

    Source:
        Kullback and Leibler (1951).

    Example:
        >>> import torch
        >>> original, patched = torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> round(reverse_kl(original, patched).item(), 4)
        0.1109
    """
    return kl_divergence(patched_logits, original_logits)


def jensen_shannon(
    original_logits: Float[Tensor, "*n v"], patched_logits: Float[Tensor, "*n v"]
) -> Float[Tensor, "*n"]:
    """``½ KL(P ‖ M) + ½ KL(Q ‖ M)`` with ``M = (P + Q) / 2``, at most log 2.

    Args:
        original_logits: Logits of the unpatched run (..., v).
        patched_logits: Logits of the patched run (..., v).

    Returns:
        The divergence per position in nats.

    Raises:
        InputError: Shapes differ.

    Source:
        Lin (1991).

    Example:
        >>> import torch
        >>> far = torch.tensor([-200.0, 200.0])
        >>> round(jensen_shannon(far, -far).item(), 4)
        0.6931
    """
    return _in_chunks(_jensen_shannon_rows, original_logits, patched_logits)


def negative_log_likelihood(logits: Float[Tensor, "*n v"], targets: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """``-log p(target)``.

    Args:
        logits: Logits (..., v).
        targets: The next token at each position (...); a negative one gives NaN.

    Returns:
        The loss per position in nats.

    Raises:
        InputError: Shapes differ.

    Source:
        The usual next-token loss.

    Example:
        >>> import torch
        >>> round(negative_log_likelihood(torch.zeros(2), torch.tensor(0)).item(), 4)
        0.6931
    """
    if logits.shape[:-1] != targets.shape:
        raise InputError(f"logits of shape {tuple(logits.shape)} don't fit targets of shape {tuple(targets.shape)}")
    flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    parts = []
    for start in range(0, flat.shape[0], _chunk(flat)):
        rows = _at_least_float32(flat[start : start + _chunk(flat)])
        place = wanted[start : start + _chunk(flat)]
        loss = torch.logsumexp(rows, 1) - rows.gather(1, place.clamp_min(0).unsqueeze(1))[:, 0]
        parts.append(torch.where(place >= 0, loss, torch.nan))
    return _joined(parts, logits).reshape(targets.shape)


def top1_agreement(original_logits: Float[Tensor, "*n v"], patched_logits: Float[Tensor, "*n v"]) -> Bool[Tensor, "*n"]:
    """Whether the most likely next token stays.

    Args:
        original_logits: Logits of the unpatched run (..., v).
        patched_logits: Logits of the patched run (..., v).

    Returns:
        A truth value per position.

    Raises:
        InputError: Shapes differ.

    Source:
        The usual top-1 accuracy against the unpatched model.

    Example:
        >>> import torch
        >>> top1_agreement(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0])).item()
        True
    """
    _require_same_shape(original_logits, patched_logits)
    return original_logits.argmax(-1) == patched_logits.argmax(-1)


def _require_same_shape(original: Tensor, patched: Tensor) -> None:
    if original.shape != patched.shape:
        raise InputError(f"logits of shapes {tuple(original.shape)} and {tuple(patched.shape)} can't be compared")


def _at_least_float32(rows: Tensor) -> Tensor:
    return rows if rows.dtype == torch.float64 else rows.float()


def _chunk(flat: Tensor) -> int:
    return max(1, CHUNK_ENTRIES // max(1, flat.shape[1]))


def _joined(parts: list[Tensor], logits: Tensor) -> Tensor:
    return torch.cat(parts) if parts else _at_least_float32(logits.new_empty(0))


def _in_chunks(rows: Callable[[Tensor, Tensor], Tensor], original: Tensor, patched: Tensor) -> Tensor:
    _require_same_shape(original, patched)
    first, second = (logits.reshape(-1, logits.shape[-1]) for logits in (original, patched))
    step = _chunk(first)
    parts = [
        rows(_at_least_float32(first[start : start + step]), _at_least_float32(second[start : start + step]))
        for start in range(0, first.shape[0], step)
    ]
    return _joined(parts, original).reshape(original.shape[:-1])


def _kl_rows(original: Tensor, patched: Tensor) -> Tensor:
    probability = torch.softmax(original, 1)
    difference = patched - original
    difference -= torch.linalg.vecdot(probability, difference).unsqueeze(1)
    usual = difference.amax(1) < LARGEST_EXPONENT
    # Exact for any centring, as long as both sums keep their small values: hence expm1, log1p and float64 sums.
    drift = (probability * difference).sum(1, dtype=torch.float64)
    divergence = torch.log1p(difference.expm1_().mul_(probability).sum(1, dtype=torch.float64)) - drift
    divergence = torch.where(usual, divergence.clamp_min(0), torch.nan)
    unusual = ~torch.isfinite(divergence)
    if bool(unusual.any()):
        divergence[unusual] = _kl_from_log_probabilities(original[unusual].double(), patched[unusual].double())
    return divergence.to(original.dtype)


def _kl_from_log_probabilities(original: Tensor, patched: Tensor) -> Tensor:
    first, second = torch.log_softmax(original, 1), torch.log_softmax(patched, 1)
    terms = torch.where(first > -torch.inf, first.exp() * (first - second), 0.0)
    return torch.where(torch.isnan(first).any(1), torch.nan, terms.sum(1))


def _jensen_shannon_rows(original: Tensor, patched: Tensor) -> Tensor:
    first, second = torch.log_softmax(original.double(), 1), torch.log_softmax(patched.double(), 1)
    middle = torch.logaddexp(first, second) - torch.log(torch.tensor(2.0, dtype=torch.float64))
    terms = torch.where(first > -torch.inf, first.exp() * (first - middle), 0.0)
    terms += torch.where(second > -torch.inf, second.exp() * (second - middle), 0.0)
    return (terms.sum(1) / 2).clamp_min(0).to(original.dtype)

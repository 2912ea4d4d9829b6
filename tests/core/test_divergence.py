"""Divergences agree with float64, keep tiny values, and survive extreme logits."""

from inspect import unwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deltalens.core.divergence as module
from deltalens.core.divergence import (
    jensen_shannon,
    kl_divergence,
    negative_log_likelihood,
    reverse_kl,
    top1_agreement,
)
from deltalens.errors import InputError


def exact_kl(original, patched):
    p, q = torch.log_softmax(original.double(), -1), torch.log_softmax(patched.double(), -1)
    return torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1)


def logits(seed, rows=6, vocabulary=5000, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * spread


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e-2, 1.0, 10.0, 100.0])
def test_kl_in_float32_agrees_with_float64_from_tiny_to_huge(size):
    original = logits(0).float()
    patched = original + (logits(1) * size / 3).float()
    torch.testing.assert_close(
        kl_divergence(original, patched).double(),
        exact_kl(original, patched),
        rtol=2e-3 if size < 1e-3 else 1e-4,
        atol=0,
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-3, 50), st.floats(-100, 100))
def test_kl_is_never_negative_zero_at_equality_and_blind_to_shifts(seed, size, shift):
    original, patched = logits(seed, vocabulary=50), logits(seed + 1, vocabulary=50) * size
    divergence = kl_divergence(original, patched)
    assert (divergence >= 0).all()
    assert not kl_divergence(original.float(), original.float()).any()
    torch.testing.assert_close(kl_divergence(original, patched + shift), divergence, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(divergence, exact_kl(original, patched), rtol=1e-8, atol=1e-12)


def test_direction_is_from_the_original_to_the_patched():
    original, patched = torch.tensor([0.0, 0.0]), torch.tensor([0.0, 5.0])
    forward, backward = kl_divergence(original, patched), reverse_kl(original, patched)
    assert float(forward) == pytest.approx(float(exact_kl(original, patched)), rel=1e-5)
    assert float(backward) == pytest.approx(float(exact_kl(patched, original)), rel=1e-5)
    assert float(forward) > float(backward)


def test_half_precision_logits_are_measured_in_float32():
    original = logits(2).bfloat16()
    patched = (original.double() + logits(3) / 10).bfloat16()
    found = kl_divergence(original, patched)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact_kl(original, patched), rtol=1e-4, atol=0)


def test_excluded_tokens_and_impossible_ones_are_handled():
    masked = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert float(kl_divergence(masked, masked)) == 0
    other = torch.tensor([[1.0, 0.0, -torch.inf]])
    assert float(kl_divergence(masked, other)) == pytest.approx(float(exact_kl(masked, other)), rel=1e-5)
    assert float(kl_divergence(torch.zeros(1, 3), masked)) == torch.inf
    assert kl_divergence(torch.tensor([[0.0, torch.nan]]), torch.zeros(1, 2)).isnan().all()


def test_chunks_and_leading_shapes_change_nothing(monkeypatch):
    original, patched = logits(4, rows=12).float(), logits(5, rows=12).float()
    whole = kl_divergence(original, patched)
    targets = torch.arange(12)
    losses = negative_log_likelihood(original, targets)
    monkeypatch.setattr(module, "CHUNK_ENTRIES", 5000)
    assert torch.equal(kl_divergence(original.view(3, 4, -1), patched.view(3, 4, -1)), whole.view(3, 4))
    assert torch.equal(negative_log_likelihood(original.view(3, 4, -1), targets.view(3, 4)), losses.view(3, 4))
    assert kl_divergence(original[:0], patched[:0]).shape == (0,)


def test_jensen_shannon_is_symmetric_and_bounded():
    original, patched = logits(6), logits(7)
    found = jensen_shannon(original, patched)
    torch.testing.assert_close(found, jensen_shannon(patched, original))
    p, q = original.softmax(-1), patched.softmax(-1)
    middle = ((p + q) / 2).log()
    wanted = (exact_kl(original, middle) + exact_kl(patched, middle)) / 2
    torch.testing.assert_close(found, wanted)
    assert (found <= torch.log(torch.tensor(2.0))).all()


def test_loss_is_cross_entropy_and_missing_targets_are_nan():
    given_logits, targets = logits(8).float(), torch.tensor([3, 1, 4, -1, 5, 9])
    found = negative_log_likelihood(given_logits, targets)
    wanted = torch.nn.functional.cross_entropy(given_logits, targets.clamp_min(0), reduction="none")
    torch.testing.assert_close(found[targets >= 0], wanted[targets >= 0])
    assert found[3].isnan()


def test_top1_agreement_sees_the_argmax():
    assert top1_agreement(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[0.0, 9.0], [2.0, 1.0]])).tolist() == [
        True,
        False,
    ]


def test_other_shapes_are_refused():
    for measure in (kl_divergence, jensen_shannon, top1_agreement):
        with pytest.raises(InputError, match="can't be compared"):
            unwrap(measure)(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(InputError, match="targets"):
        unwrap(negative_log_likelihood)(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long))

"""A fast path that is wrong is caught before its numbers are used, and right numbers come all the same."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from intervention_models import family_model, other_states, windows

from deltalens.models import InterventionSession, Model, intervene, trusted_scheme
from deltalens.models.interventions import cached_keys, choice, patterns
from deltalens.models.interventions.parity import patch_and_rerun


def fresh(family: str, seed: int, **changes: Any) -> Model:
    """A model that no other test has had trusted already."""
    return family_model(family, seed=seed, **changes)


def everything(model: Model, ids: torch.Tensor, layer: int, states: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        rows = patch_and_rerun(
            model, ids, layer=layer, states=states, positions=torch.ones(ids.shape, dtype=torch.bool)
        )
    return rows.reshape(*ids.shape, -1)


def positions_of(ids: torch.Tensor) -> torch.Tensor:
    positions = torch.zeros(ids.shape, dtype=torch.bool)
    positions[0, [0, 7, ids.shape[1] - 1]] = True
    return positions


def sees_the_patched_past(mask: torch.Tensor | None, length: int, like: Any, *, doubled: bool) -> torch.Tensor:
    """A mask with the mistake of letting patched tokens see earlier patched tokens."""
    lowest = torch.finfo(like.dtype).min
    lower = torch.full((1, 1, length, length), lowest).triu(1)
    return torch.cat([torch.full_like(lower, lowest), lower], dim=-1)


@contextmanager
def keys_that_stay(cache: Any, count: int) -> Iterator[None]:
    """A cache that is never restored."""
    yield


def test_a_wrong_mask_is_caught_and_rerun_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = fresh("llama", 11), windows(2, 17)
    states = other_states(model, ids, 1)
    monkeypatch.setattr(patterns, "suffix_mask", sees_the_patched_past)
    with InterventionSession(model, ids, scheme="cached_keys") as session:
        wrong = session.replace(1, states)
    right = everything(model, ids, 1, states)
    assert (wrong - right).abs().max() > 1e-3 * (right.max() - right.min())
    with caplog.at_level(logging.WARNING):
        scheme, parity = trusted_scheme(model, ids, layers=[0, 1], positions=positions_of(ids))
        result = intervene(model, ids, layer=1, states=states)
    assert scheme == "rerun"
    assert parity.scheme == "cached_keys"
    assert not parity.holds
    assert parity.max_relative_difference > 1e-3
    assert "cached_keys differs from patch-and-rerun by" in caplog.text
    assert result.path == "rerun"
    torch.testing.assert_close(result.logits, right, rtol=1e-5, atol=1e-5)


def test_a_cache_that_is_not_restored_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = fresh("gpt2", 12), windows(2, 17)
    monkeypatch.setattr(cached_keys, "_restored_keys", keys_that_stay)
    scheme, parity = trusted_scheme(model, ids, layers=[0, 1], positions=positions_of(ids))
    assert scheme == "rerun"
    assert not parity.holds


def test_a_scheme_that_raises_is_replaced_by_rerun(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = fresh("llama", 13), windows(2, 17)

    class Broken:
        @staticmethod
        def start(*_: object) -> None:
            raise RuntimeError("no such cache")

    monkeypatch.setitem(choice.SCHEMES, "cached_keys", Broken)
    states = other_states(model, ids, 1)
    with caplog.at_level(logging.WARNING):
        result = intervene(model, ids, layer=1, states=states)
    assert result.path == "rerun"
    assert "no such cache" in caplog.text
    torch.testing.assert_close(result.logits, everything(model, ids, 1, states), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["mamba", "jamba", "zamba2", "recurrent_gemma"])
def test_cached_keys_on_a_recurrent_model_never_pass_for_right(family: str) -> None:
    model, ids = fresh(family, 14), windows(1, 17)
    scheme, parity = trusted_scheme(model, ids, layers=[0], positions=positions_of(ids), scheme="cached_keys")
    assert scheme == "rerun"
    assert not parity.holds


def test_a_difference_that_half_precision_would_hide_is_seen_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = fresh("llama", 15, dtype=torch.bfloat16), windows(2, 17)

    def slightly_wrong(mask: torch.Tensor | None, length: int, like: Any, *, doubled: bool) -> torch.Tensor:
        right = original(mask, length, like, doubled=doubled)
        return right.masked_fill(right == 0, 0.003 * torch.arange(2 * length).to(right).div(length).exp()[0]).add(
            torch.linspace(0, 0.01, 2 * length).to(right)
        )

    original = patterns.suffix_mask
    monkeypatch.setattr(patterns, "suffix_mask", slightly_wrong)
    scheme, parity = trusted_scheme(model, ids, layers=[0, 1], positions=positions_of(ids))
    assert parity.in_dtype <= parity.dtype_tolerance
    assert parity.max_relative_difference > parity.tolerance
    assert scheme == "rerun"


def test_a_right_scheme_is_trusted_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = fresh("llama", 16), windows(2, 17)
    with caplog.at_level(logging.WARNING):
        scheme, parity = trusted_scheme(model, ids, layers=[0, 3], positions=positions_of(ids))
    assert scheme == "cached_keys"
    assert parity.holds
    assert parity.layers == (0, 3)
    assert parity.positions == 3
    assert not caplog.records


def test_blocks_that_must_not_be_skipped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = fresh("llama", 17), windows(2, 17)
    states = other_states(model, ids, 1)
    handed_on: list[torch.Tensor] = []

    def later_block(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output + handed_on.pop() if handed_on else output

    def first_block(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        handed_on.append(0.1 * output[..., :1])

    handles = [
        model.blocks[0].mlp.register_forward_hook(first_block),
        model.blocks[3].register_forward_hook(later_block),
    ]
    try:
        result = intervene(model, ids, layer=1, states=states)
        together = intervene(model, ids, layer=1, states=states, scope="all")
        expected = everything(model, ids, 1, states)
    finally:
        for handle in handles:
            handle.remove()
    assert result.path == "rerun"
    torch.testing.assert_close(result.logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together.logits[:, 0], expected[:, 0], rtol=1e-5, atol=1e-5)

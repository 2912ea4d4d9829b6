"""`isolated` is the block on the token alone: what a window of that one token would have given it."""

import pytest
import torch
from intervention_models import FAMILIES, family_model, windows

from deltalens.errors import InputError
from deltalens.models import capture, isolated_outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_isolated_output_is_that_of_a_window_of_one_token(family: str) -> None:
    model, tokens = family_model(family), windows(1, 12)[0]
    with capture(model, tokens.unsqueeze(1)) as states:
        for layer in range(len(model.blocks)):
            found = isolated_outputs(
                model, layer, states.inputs[layer][:, 0], positions=torch.zeros_like(tokens), token_ids=tokens
            )
            torch.testing.assert_close(found, states.outputs[layer][:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mamba", "zamba2", "rwkv"])
def test_first_token_of_a_window_is_alone_already(family: str) -> None:
    model, ids = family_model(family), windows(3, 17)
    with capture(model, ids) as states:
        found = isolated_outputs(model, 2, states.inputs[2][:, 0], token_ids=ids[:, 0])
        torch.testing.assert_close(found, states.outputs[2][:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gpt_neo", "mamba"])
def test_position_of_a_token_alone_means_nothing_without_a_reset(family: str) -> None:
    model = family_model(family)
    inputs = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    first = isolated_outputs(model, 1, inputs, positions=torch.zeros(5, dtype=torch.long))
    later = isolated_outputs(model, 1, inputs, positions=torch.arange(5) + 20)
    torch.testing.assert_close(first, later, rtol=1e-4, atol=1e-4)


def test_recurrences_that_start_anew_at_position_zero_need_the_position() -> None:
    model = family_model("recurrent_gemma")
    inputs = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    first = isolated_outputs(model, 0, inputs, positions=torch.zeros(5, dtype=torch.long))
    later = isolated_outputs(model, 0, inputs, positions=torch.full((5,), 7))
    assert (first - later).abs().max() > 1e-3


def test_rows_do_not_meet_and_any_number_of_them_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("llama")
    inputs = torch.randn(11, 32, generator=torch.Generator().manual_seed(0))
    together = isolated_outputs(model, 1, inputs)
    monkeypatch.setattr("deltalens.models.interventions.isolated.ROWS", 4)
    torch.testing.assert_close(isolated_outputs(model, 1, inputs), together, rtol=1e-5, atol=1e-5)
    assert isolated_outputs(model, 1, inputs[:0]).shape == (0, 32)


def test_bad_requests_are_refused() -> None:
    model = family_model("llama")
    with pytest.raises(InputError, match="Layer 9"):
        isolated_outputs(model, 9, torch.zeros(2, 32))

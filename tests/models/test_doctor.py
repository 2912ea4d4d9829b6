"""Planted faults: for each known pitfall a model with that defect, which the doctor must catch."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty_models as faulty
import pytest
import torch
from tiny_models import tiny_model, token_ids

from deltalens.errors import InputError, ModelError
from deltalens.models import capture, check_chain, check_needed, doctor, load, open_model

Plant = Callable[[], Any]

#: Pitfall, defect, the check that must fail, whether a run needs it.
PLANTED: list[tuple[int, Plant, str, bool]] = [
    (1, faulty.scaled_between_blocks, "chain", True),
    (1, faulty.hidden_block, "stream tail", True),
    (1, faulty.hidden_block, "depth", True),
    (2, faulty.second_stream, "stream shape", True),
    (2, faulty.nameless_output, "stream shape", True),
    (3, faulty.weights_that_drift, "restoration", True),
    (3, faulty.hooks_that_pile_up, "restoration", True),
    (4, faulty.sees_padding, "padding", True),
    (4, faulty.sees_padding, "patch locality", True),
    (4, faulty.positions_from_the_end, "padding", True),
    (5, faulty.mask_from_pad_id, "pad id is a token", True),
    (6, faulty.one_loud_token, "sinks", False),
    (7, faulty.constant_embedding, "duplicates", False),
    (9, faulty.coarse_logits, "logit precision", False),
    (11, faulty.alternating_kernel, "determinism", False),
    (12, faulty.head_beside_the_stream, "stream tail", True),
    (13, faulty.four_dimensional_stream, "stream shape", True),
    (15, faulty.reversed_order, "chain", True),
    (15, faulty.called_twice, "chain", True),
    (15, faulty.skipped_block, "chain", True),
    (16, faulty.block_on_another_device, "stream shape", True),
    (16, faulty.wider_dtype, "block dtypes", False),
    (22, faulty.not_finite, "finite logits", True),
]


@pytest.mark.parametrize(
    ("pitfall", "plant", "check", "needed"), PLANTED, ids=[f"{p}-{f.__name__}-{c}" for p, f, c, _ in PLANTED]
)
def test_planted_fault_is_caught(pitfall: int, plant: Plant, check: str, needed: bool) -> None:
    found = doctor(plant())
    assert not found[check].holds, str(found)
    assert found[check].needed is needed
    assert math.isnan(found[check].value) or found[check].value > found[check].tolerance
    assert found.holds is not needed


def test_the_model_they_are_planted_in_is_healthy() -> None:
    found = doctor(faulty.llama())
    assert all(check.holds for check in found.checks), str(found)


@pytest.mark.parametrize(
    "plant", [faulty.scaled_between_blocks, faulty.reversed_order, faulty.called_twice, faulty.second_stream,
              faulty.four_dimensional_stream, faulty.not_finite, faulty.weights_that_drift],
)  # fmt: skip
def test_load_refuses_a_broken_stream_in_one_line(plant: Plant) -> None:
    with pytest.raises(ModelError, match="can't be measured") as caught:
        load(plant())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("plant", [faulty.sees_padding, faulty.head_beside_the_stream, faulty.mask_from_pad_id])
def test_unknown_types_must_show_everything_that_a_run_needs(plant: Plant) -> None:
    known, unknown = plant(), plant()
    load(known)
    unknown.config.model_type = "never-heard-of"
    with pytest.raises(ModelError, match="can't be measured"):
        load(unknown)


def test_needed_checks_run_on_your_own_windows() -> None:
    model = load(tiny_model("gpt2"))
    checks = check_needed(model, token_ids(2, 16))
    assert all(check.needed and check.holds for check in checks)
    assert {"chain", "patch locality", "padding", "restoration"} <= {check.name for check in checks}


def test_rwkv_rescaling_left_on_breaks_the_chain_and_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalens.models.opening.apply_handling", lambda *_: None)
    found = doctor(tiny_model("rwkv"))
    assert not found.holds
    assert found["chain"].value == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("run_before", [False, True])
def test_rwkv_rescaling_is_undone_whatever_ran_before(run_before: bool) -> None:
    hf, ids = tiny_model("rwkv"), token_ids(1, 12)
    expected = tiny_model("rwkv")(ids).logits
    if run_before:
        hf(ids)
    model = load(hf)
    assert check_chain(model, ids).value == 0.0
    # Not to the last bit: the norms' epsilon weighs more on a halved stream.
    torch.testing.assert_close(model.hf(ids).logits, expected, rtol=0, atol=5e-4)
    assert model.identity.weight_hash == load(tiny_model("rwkv")).identity.weight_hash


def test_a_refused_model_can_still_be_examined() -> None:
    hf = faulty.reversed_order()
    with pytest.raises(ModelError):
        load(hf)
    assert not doctor(open_model(hf)).holds


def test_diagnosis_fits_a_terminal_and_says_what_failed() -> None:
    text = str(doctor(faulty.sees_padding()))
    assert max(map(len, text.splitlines())) <= 80
    assert "can't trust this model" in text
    assert "patch locality" in text.split("can't trust")[1]


def test_every_check_is_documented_with_the_part_it_plays() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf8")
    needed, advice = page.split("## What is good to know")
    for check in doctor(faulty.llama()).checks:
        assert f"| {check.name} |" in (needed if check.needed else advice)


@pytest.mark.parametrize(
    "batch",
    [
        "some text",
        ["some text"],
        [[1, 2]],
        torch.ones(3, dtype=torch.long),
        torch.ones(1, 3),
        torch.ones(1, 0, dtype=torch.long),
        torch.tensor([[96]]),
        torch.tensor([[-1]]),
    ],
    ids=str,
)
def test_a_batch_that_is_not_token_ids_is_refused(batch: object) -> None:
    with pytest.raises(InputError), capture(load(tiny_model("gpt2")), batch):
        pass


@pytest.mark.parametrize("mask", [[0, 0, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]])
def test_left_padding_and_gaps_are_refused(mask: list[int]) -> None:
    fields = {"input_ids": torch.ones(1, 4, dtype=torch.long), "attention_mask": torch.tensor([mask])}
    with pytest.raises(InputError, match="padding_side"), capture(load(tiny_model("llama")), fields):
        pass


@pytest.mark.parametrize("name", ["gpt2", "llama", "mamba", "jamba"])
def test_right_padding_leaves_real_tokens_alone(name: str) -> None:
    model, ids = load(tiny_model(name)), token_ids(1, 10)
    padded = {"input_ids": torch.nn.functional.pad(ids, (0, 6)), "attention_mask": torch.tensor([[1] * 10 + [0] * 6])}
    with capture(model, ids) as short, capture(model, padded) as long:
        for x, y in zip(short.outputs, long.outputs, strict=True):
            torch.testing.assert_close(x, y[:, :10], rtol=1e-4, atol=1e-4)

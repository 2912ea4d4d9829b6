"""Every scheme gives what patching one position and running the model again gives."""

import pytest
import torch
from intervention_models import FAMILIES, OTHER_SCHEMES, family_model, scan_error, windows
from tiny_models import tiny_model

from deltalens.models import builtin_models, check_parity, choose_scheme, load

HALF = ("llama", "gpt2", "gemma2", "bloom", "mamba", "jamba", "rwkv", "recurrent_gemma")
LONG = ("gpt2", "gpt_neox", "llama", "gemma2", "mistral", "qwen2", "bloom", "mpt", "gpt_neo", "mamba", "mamba2",
        "jamba", "zamba2", "rwkv", "recurrent_gemma", "openai-gpt")  # fmt: skip
DOUBLED = ("gpt2", "llama", "gemma2", "bloom", "mpt", "gpt_neo", "falcon-alibi", "gpt_oss")
EAGER = ("llama", "mistral", "gemma2", "mpt", "falcon-alibi", "gpt_neo", "jamba", "recurrent_gemma")


def sampled(count: int, tokens: int) -> torch.Tensor:
    """First, second, middle and last positions of the first window, others of the second."""
    positions = torch.zeros(count, tokens, dtype=torch.bool)
    positions[0, [0, 1, tokens // 2, tokens - 1]] = True
    if count > 1:
        positions[1, [0, 2, tokens - 2]] = True
    return positions


@pytest.mark.parametrize("family", FAMILIES)
def test_structure_chooses_a_scheme_that_equals_rerun(family: str) -> None:
    model = family_model(family)
    scheme = choose_scheme(model)
    assert scheme == OTHER_SCHEMES.get(family, "cached_keys")
    parity = check_parity(
        model, windows(2, 17), layers=range(len(model.blocks)), positions=sampled(2, 17), scheme=scheme
    )
    assert parity.max_relative_difference <= 1e-5
    assert parity.holds


@pytest.mark.parametrize("family", ["mamba2", "zamba2", "nemotron_h"])
def test_over_several_chunks_a_scan_differs_from_single_steps_by_no_more_than_from_itself(family: str) -> None:
    model = load(tiny_model(family))
    parity = check_parity(model, windows(2, 33), layers=range(4), positions=sampled(2, 33), scheme="state_bank")
    assert parity.max_relative_difference <= max(1e-5, 2 * scan_error(family))


@pytest.mark.parametrize("family", LONG)
def test_chosen_scheme_equals_rerun_on_long_windows(family: str) -> None:
    model = family_model(family, tokens=256)
    parity = check_parity(model, windows(1, 256), layers=[0, 2], positions=sampled(1, 256), scheme=choose_scheme(model))
    assert parity.max_relative_difference <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", HALF)
def test_half_precision_is_judged_in_float32_and_again_in_its_own_dtype(family: str, dtype: torch.dtype) -> None:
    model = family_model(family, dtype=dtype)
    parity = check_parity(model, windows(2, 17), layers=[1], positions=sampled(2, 17), scheme=choose_scheme(model))
    assert parity.max_relative_difference <= 1e-5
    assert parity.in_dtype <= (3e-2 if dtype == torch.bfloat16 else 5e-3)
    assert next(model.hf.parameters()).dtype == dtype


@pytest.mark.parametrize("family", EAGER)
def test_eager_attention_gets_masks_that_it_can_add(family: str) -> None:
    model = family_model(family, attn_implementation="eager")
    parity = check_parity(model, windows(2, 17), layers=[0, 2], positions=sampled(2, 17), scheme=choose_scheme(model))
    assert parity.max_relative_difference <= 1e-5


@pytest.mark.parametrize("family", DOUBLED)
def test_doubled_length_serves_attention_models_too(family: str) -> None:
    model = family_model(family)
    parity = check_parity(model, windows(2, 17), layers=[0, 2], positions=sampled(2, 17), scheme="doubled_length")
    assert parity.max_relative_difference <= 1e-5


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "zamba2", "recurrent_gemma", "lfm2"])
def test_doubled_batch_serves_where_states_cannot_be_kept(family: str) -> None:
    model = family_model(family)
    parity = check_parity(model, windows(2, 17), layers=[0, 2], positions=sampled(2, 17), scheme="doubled_batch")
    assert parity.max_relative_difference <= 1e-5


@pytest.mark.parametrize("family", ["llama", "mamba", "rwkv"])
def test_fallback_equals_the_judge(family: str) -> None:
    model = family_model(family)
    parity = check_parity(model, windows(2, 17), layers=[0, 3], positions=sampled(2, 17), scheme="rerun")
    assert parity.max_relative_difference <= 1e-5


def test_a_bank_that_does_not_fit_makes_way_for_the_doubled_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("mamba")
    monkeypatch.setattr("deltalens.models.interventions.choice.BANK_BYTES", 1000)
    assert choose_scheme(model, (4, 64)) == "doubled_batch"
    assert choose_scheme(model) == "state_bank"


def test_kernels_that_take_no_mask_are_rerun(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("llama")
    monkeypatch.setattr(model.hf.config, "_attn_implementation", "flash_attention_2")
    assert choose_scheme(model) == "rerun"


@pytest.mark.parametrize("name", sorted(builtin_models()))
def test_built_in_models_are_served_exactly(name: str) -> None:
    model = load(name)
    ids = torch.randint(3, model.vocabulary, (2, 128), generator=torch.Generator().manual_seed(0))
    parity = check_parity(
        model, ids, layers=[0, model.n_layers - 2], positions=sampled(2, 128), scheme=choose_scheme(model)
    )
    assert parity.scheme == ("state_bank" if "mamba" in name else "cached_keys")
    assert parity.max_relative_difference <= 1e-4

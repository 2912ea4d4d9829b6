"""4- and 8-bit weights, where the extra is installed: stamped, healthy, and not changed by being looked at."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, token_ids

from deltalens.models import doctor, intervene, load
from deltalens.models.identity import weight_hash

pytest.importorskip("bitsandbytes", reason="needs the extra deltalens[quantized]")


def quantized(folder: Path, bits: int) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(folder)
    config = {4: {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}, 8: {"load_in_8bit": True}}[bits]
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**config), dtype=torch.float32
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_model_is_stamped_and_healthy(bits: int, tmp_path: Path) -> None:
    model = load(quantized(tmp_path, bits))
    assert model.identity.quantization == f"bitsandbytes-{bits}bit"
    found = doctor(model)
    assert found.holds, str(found)
    before = model.hf(token_ids(), use_cache=False).logits
    hashed = weight_hash(model.hf)
    states = torch.zeros(2, 33, 64)
    assert intervene(model, token_ids(), layer=1, states=states, scope="all").kl.min() >= 0
    assert weight_hash(model.hf) == hashed
    assert torch.equal(model.hf(token_ids(), use_cache=False).logits, before)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_folder_loads_with_the_same_stamp(bits: int, tmp_path: Path) -> None:
    quantized(tmp_path / "plain", bits).save_pretrained(tmp_path / "small")
    model = load(tmp_path / "small")
    assert model.identity.quantization == f"bitsandbytes-{bits}bit"
    assert model.identity.weight_hash == load(tmp_path / "small").identity.weight_hash

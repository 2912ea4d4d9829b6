"""The matrix: every family, tiny and random, through load, capture, interventions, the doctor, folders and dtypes."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, HEADS, LAYERS, MULTI_STREAM, WIDTH, from_config, tiny_model, token_ids
from torch import Tensor

from deltalens.errors import ModelError
from deltalens.models import ARCHITECTURES, Diagnosis, Model, capture, doctor, intervene, load, stream_states

#: Without a row: generic discovery must find their blocks.
UNLISTED: dict[str, dict[str, Any]] = {
    "codegen": {
        "vocab_size": 96,
        "n_positions": 128,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "rotary_dim": 4,
    },
    "glm": {"head_dim": 8, "pad_token_id": 0},
    "persimmon": {},
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"] * 2},
}
_PLAIN = {
    "vocab_size": 96, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 64, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

every_family = pytest.mark.parametrize("name", FAMILIES)


@cache
def loaded(name: str) -> Model:
    return load(tiny_model(name))


@cache
def diagnosis(name: str) -> Diagnosis:
    return doctor(loaded(name))


@every_family
def test_row_finds_every_block_and_its_kind(name: str) -> None:
    model = loaded(name)
    assert not model.architecture.discovered
    assert model.block_kinds == FAMILIES[name].kinds
    assert (model.n_layers, model.width, model.vocabulary) == (LAYERS, WIDTH, 96)
    assert model.embedding is model.hf.get_input_embeddings()
    assert any(model.hf.get_output_embeddings() is model.hf.get_submodule(head) for head in _heads(model))


def _heads(model: Model) -> list[str]:
    names = {name for name, _ in model.hf.named_modules(remove_duplicate=False)}
    return [head for head in model.architecture.heads if head in names]


@every_family
def test_row_says_what_a_block_returns(name: str) -> None:
    model, seen = loaded(name), set()
    handles = [b.register_forward_hook(lambda *call: seen.add(isinstance(call[2], tuple))) for b in model.blocks]
    model.hf(token_ids(), use_cache=False)
    for handle in handles:
        handle.remove()
    assert model.architecture.returns == "either" or seen == {model.architecture.returns == "tuple"}


@every_family
def test_tiny_model_uses_context(name: str) -> None:
    """Else the matrix would prove nothing: a change at position 20 must show four positions later."""
    hf, ids = tiny_model(name), token_ids(1)
    changed = ids.clone()
    changed[0, 20] = 3 if int(ids[0, 20]) != 3 else 4
    with torch.no_grad():
        difference = (hf(ids).logits - hf(changed).logits)[0].abs().amax(dim=-1)
        assert difference[24:].max() > 0.01 * (hf(ids).logits.max() - hf(ids).logits.min())


@every_family
def test_capture_is_one_chain_from_the_embedding_to_the_last_block(name: str) -> None:
    model, ids = loaded(name), token_ids()
    with capture(model, ids) as states:
        assert len(states.inputs) == len(states.outputs) == LAYERS
        for before, after in zip(states.outputs, states.inputs[1:], strict=False):
            assert torch.equal(before, after)
        assert states.outputs[-1].shape == (*ids.shape, WIDTH)
        assert not any(x.requires_grad for x in (*states.inputs, *states.outputs))
        assert torch.equal(states.logits, model.hf(ids, use_cache=False).logits)
        some = stream_states(model, ids, None, [2, 1])
        assert list(some) == [2, 1]
        for layer, (x, y) in some.items():
            assert torch.equal(x, states.inputs[layer])
            assert torch.equal(y, states.outputs[layer])


@every_family
def test_doctor_finds_a_healthy_model(name: str) -> None:
    found = diagnosis(name)
    assert found.holds, str(found)
    for check in ("chain", "identity patch", "patch locality", "stream tail", "padding", "batch size", "restoration"):
        assert found[check].value <= found[check].tolerance
    assert max(len(line) for line in str(found).splitlines()) <= 80
    assert json.loads(found.to_json())["holds"] is True
    assert len(found.to_frame()) == len(found.checks)


@every_family
@pytest.mark.parametrize("scope", ["single", "all"])
def test_interventions_of_both_scopes(name: str, scope: str) -> None:
    model, ids = loaded(name), token_ids(2, 17)
    with capture(model, ids) as states:
        own, other = states.outputs[1], states.outputs[1].roll(1, dims=0)
    same = intervene(model, ids, layer=1, states=own, scope=scope)
    assert same.kl.max() < 1e-5
    patched = intervene(model, ids, layer=1, states=other, scope=scope)
    assert bool(torch.isfinite(patched.kl).all())
    assert patched.kl.median() > 1e-4


@every_family
def test_folder_round_trip(name: str, tmp_path: Path) -> None:
    model, ids = loaded(name), token_ids()
    model.hf.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.identity.weight_hash == model.identity.weight_hash
    assert again.identity.source == "folder"
    assert again.tokenizer is None
    assert torch.allclose(again.hf(ids).logits, model.hf(ids).logits, atol=1e-5)


@every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_the_chain_and_the_dtype(name: str, dtype: torch.dtype) -> None:
    model = load(tiny_model(name), dtype=dtype)
    assert model.dtype == dtype
    assert model.identity.dtype == str(dtype).removeprefix("torch.")
    with capture(model, token_ids()) as states:
        for before, after in zip(states.outputs, states.inputs[1:], strict=False):
            assert torch.equal(before.to(after.dtype), after)
        reference = _float32_states(name)
        assert all(bool(torch.isfinite(y).all()) for y in states.outputs)
        error = (states.outputs[0].float() - reference).norm() / reference.norm()
        assert error < 0.05


@cache
def _float32_states(name: str) -> Tensor:
    with capture(loaded(name), token_ids()) as states:
        return states.outputs[0]


@every_family
def test_generic_discovery_agrees_with_the_row(name: str) -> None:
    model = loaded(name)
    hf = model.hf
    known = hf.config.model_type
    hf.config.model_type = "never-heard-of"
    try:
        found = load(hf)
    finally:
        hf.config.model_type = known
    assert found.architecture.discovered
    assert found.blocks == model.blocks
    assert found.architecture.blocks == model.architecture.blocks
    assert [_coarse(kind) for kind in found.block_kinds] == [_coarse(kind) for kind in model.block_kinds]


def _coarse(kind: str) -> str:
    """Without a row, names of classes don't tell Mamba's versions apart."""
    return kind.removeprefix("sliding_").removesuffix("2")


@pytest.mark.parametrize("model_type", UNLISTED)
def test_unlisted_types_are_discovered_and_healthy(model_type: str) -> None:
    assert model_type not in ARCHITECTURES
    base = {} if model_type == "codegen" else _PLAIN
    found = doctor(from_config(model_type, {**base, **UNLISTED[model_type]}))
    assert found.holds, str(found)
    assert "found by its forward pass" in found.summary


def test_shared_weights_inside_blocks_keep_their_own_layers() -> None:
    model = loaded("zamba2")
    shared = [next(m for m in block.modules() if type(m).__name__ == "Zamba2Attention") for block in model.blocks[1::2]]
    assert shared[0].q_proj.weight is shared[1].q_proj.weight
    assert len({id(block) for block in model.blocks}) == LAYERS


def test_multi_stream_models_are_refused_with_the_reason() -> None:
    hf = from_config("gemma3n_text", MULTI_STREAM)
    with pytest.raises(ModelError, match="several residual streams"):
        load(hf)
    hf.config.model_type = "never-heard-of"
    with pytest.raises(ModelError, match=r"\(2, 2, 8, 32\)"):
        load(hf)

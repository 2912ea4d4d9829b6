"""A module in place of a block is the model with that output patched, also with a cache, and is always undone."""

import inspect
from typing import Any

import pytest
import torch
from tiny_models import LAYERS, tiny_model
from torch import nn

import deltalens as dl
from deltalens.core.global_fit import fit_global
from deltalens.core.maps import parse_map
from deltalens.errors import InputError, ModelError
from deltalens.models.blocks import override_output
from deltalens.models.identity import weight_hash
from deltalens.models.replacement import Replacement, ReplacementFacts, cache_layer, output_kinds

#: One of every way to cache and to return: learned, rotary and ALiBi positions, sliding windows, states, hybrids.
FAMILIES = ("gpt2", "gpt_neox", "bloom", "falcon", "mistral", "gemma2", "mamba", "mamba2", "jamba", "zamba2", "rwkv",
            "recurrent_gemma")  # fmt: skip


def replacement(model: dl.Model, layer: int, map: str = "affine") -> Replacement:
    generator = torch.Generator().manual_seed(layer)
    x = torch.randn(200, model.width, generator=generator)
    y = x + 0.3 * x @ torch.randn(model.width, model.width, generator=generator) / model.width**0.5 + 0.1
    facts = ReplacementFacts(
        map, layer, model.width, model.identity, output_kinds(model)[layer], cache_layer(model.blocks[layer], layer)
    )
    return Replacement(fit_global(x, y, parse_map(map)), facts)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> dl.Model:
    return dl.load(tiny_model(request.param))


@pytest.fixture(scope="module")
def gpt2() -> dl.Model:
    return dl.load(tiny_model("gpt2"))


def some_ids(rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 90, (rows, 14), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: dl.Model, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.hf(input_ids=ids, use_cache=False, **options).logits


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_it_is_the_model_with_that_output_patched(model: dl.Model, layer: int) -> None:
    ids, kept = some_ids(), replacement(model, layer)
    with dl.capture(model, ids) as states:
        patched = kept.states(states.inputs[layer])
    with override_output(model.blocks[layer], patched):
        expected = logits(model, ids)
    with dl.replaced_blocks(model, {layer: kept}):
        found = logits(model, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert not torch.allclose(found, logits(model, ids), rtol=1e-2)


@pytest.mark.parametrize("layers", [(0,), (2,), (0, 1, LAYERS - 1)])
def test_generating_with_a_cache_predicts_what_the_whole_text_does(model: dl.Model, layers: tuple[int, ...]) -> None:
    ids = some_ids()[:, :10]  # 16 in the end, one chunk of a scan: some of transformers' err between chunks
    with dl.replaced_blocks(model, {layer: replacement(model, layer) for layer in layers}):
        made = model.hf.generate(
            ids, max_new_tokens=6, do_sample=False, use_cache=True, output_logits=True, return_dict_in_generate=True,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        whole = logits(model, made.sequences)[:, ids.shape[1] - 1 : -1]
    stepped = torch.stack(made.logits, dim=1)
    assert float((stepped - whole).abs().max()) < 1e-5 * float(whole.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("layers", [(0,), (0, 1)])
def test_a_cache_stepped_by_hand_counts_the_tokens_of_a_replaced_first_layer(
    gpt2: dl.Model, layers: tuple[int, ...]
) -> None:
    ids = some_ids(rows=2)
    with dl.replaced_blocks(gpt2, {layer: replacement(gpt2, layer) for layer in layers}):
        whole = logits(gpt2, ids)
        first = gpt2.hf(input_ids=ids[:, :9], use_cache=True)
        assert first.past_key_values.get_seq_length() == 9
        name = "cache" if "cache" in inspect.signature(type(gpt2.hf).forward).parameters else "past_key_values"
        rest = gpt2.hf(input_ids=ids[:, 9:], use_cache=True, **{name: first.past_key_values})
        assert rest.past_key_values.get_seq_length() == 14
    torch.testing.assert_close(rest.logits, whole[:, 9:], rtol=1e-4, atol=1e-5 * float(whole.abs().max()))


def test_the_module_itself_may_take_the_block_s_place(gpt2: dl.Model) -> None:
    kept, ids = replacement(gpt2, 0), some_ids()
    with dl.replaced_blocks(gpt2, {0: kept}):
        expected = logits(gpt2, ids)
    blocks = gpt2.hf.transformer.h
    own = blocks[0]
    blocks[0] = kept
    try:
        torch.testing.assert_close(logits(gpt2, ids), expected)
        made = gpt2.hf.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert torch.equal(logits(gpt2, made)[:, -5:-1].argmax(-1), made[:, -4:])
    finally:
        blocks[0] = own


def test_the_model_is_bit_identical_afterwards_also_on_an_exception(gpt2: dl.Model) -> None:
    before, forwards = weight_hash(gpt2.hf), [dict(block.__dict__) for block in gpt2.blocks]
    with pytest.raises(KeyboardInterrupt), dl.replaced_blocks(gpt2, {1: replacement(gpt2, 1)}):
        raise KeyboardInterrupt
    assert weight_hash(gpt2.hf) == before
    assert [dict(block.__dict__) for block in gpt2.blocks] == forwards
    assert len(gpt2.hf.transformer.h) == LAYERS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("map", ["linear", "mlp:4", "low_rank:3", "mean"])
def test_half_precision_states_are_mapped_in_float32(map: str, dtype: torch.dtype) -> None:
    half = dl.load(tiny_model("gpt2").to(dtype))
    kept = replacement(half, 1, map)
    x = torch.randn(2, 5, half.width, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert kept.states(x).dtype == dtype
    assert torch.equal(kept.states(x), kept.states(x.float()).to(dtype))
    with dl.replaced_blocks(half, {1: kept}):
        assert torch.isfinite(logits(half, some_ids())).all()


def test_any_module_may_stand_in(gpt2: dl.Model) -> None:
    with dl.replaced_blocks(gpt2, {2: nn.Identity()}):
        skipped = logits(gpt2, some_ids())
    with dl.capture(gpt2, some_ids()) as states, override_output(gpt2.blocks[2], states.inputs[2]):
        torch.testing.assert_close(skipped, logits(gpt2, some_ids()))


def test_what_does_not_belong_is_refused(gpt2: dl.Model) -> None:
    kept = replacement(gpt2, 1)
    other = dl.load(tiny_model("gpt_neox"))
    cases = [
        (gpt2, {2: kept}, InputError, "of layer 1"),
        (gpt2, {9: kept}, InputError, "layers 0 to 3"),
        (other, {1: kept}, InputError, "fit one on this model"),
        (gpt2, {1: nn.Linear(gpt2.width, 3)}, ModelError, "in place of block 1"),
    ]
    for where, chosen, kind, says in cases:
        with pytest.raises(kind, match=says), dl.replaced_blocks(where, chosen):
            logits(where, some_ids())


def test_a_replacement_says_what_it_is(gpt2: dl.Model) -> None:
    assert "affine, layer 1→2" in repr(replacement(gpt2, 1))
    assert replacement(gpt2, 1).formula == "T(x) = x + shift + matrix (x - center)"

"""The residual stream, captured: where it is, what it isn't, and on which device and in which dtype."""

from typing import Any

import faulty_models as faulty
import pytest
import torch
from tiny_models import LAYERS, WIDTH, tiny_model, token_ids
from torch import Tensor

from deltalens.core.decompose import decompose
from deltalens.errors import InputError
from deltalens.models import capture, intervene, load, stream_states, watch_stream

_NORMED = ["gpt2", "llama", "gemma2", "mamba", "gpt_neox", "opt"]


@pytest.mark.parametrize("name", _NORMED)
def test_last_state_is_before_the_final_norm(name: str) -> None:
    model, ids = load(tiny_model(name)), token_ids()
    with capture(model, ids) as states:
        tuple_end = model.hf(ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
        assert not torch.allclose(states.outputs[-1], tuple_end, atol=1e-3)


def test_capture_is_a_copy_that_a_block_cannot_change_in_place() -> None:
    hf = tiny_model("llama")
    inner = hf.model.layers[1].forward

    def in_place(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return states.add_(inner(states, *args, **kwargs) - states)

    with torch.no_grad():
        with capture(load(tiny_model("llama")), token_ids()) as states:
            expected = states.inputs[1]
        hf.model.layers[1].forward = in_place
        with capture(load(hf), token_ids()) as states:
            torch.testing.assert_close(states.inputs[1], expected)
            torch.testing.assert_close(states.outputs[0], expected)


def test_neighbouring_layers_share_one_tensor() -> None:
    streamed = stream_states(load(tiny_model("gpt2")), token_ids(), None, [0, 1, 3])
    assert streamed[1][0] is streamed[0][1]
    assert set(streamed) == {0, 1, 3}


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_layer_out_of_range_names_the_range(layer: int) -> None:
    with pytest.raises(InputError, match=f"layers 0 to {LAYERS - 1}"):
        stream_states(load(tiny_model("gpt2")), token_ids(), None, [layer])


def test_windows_longer_than_learned_positions_are_refused_with_both_lengths() -> None:
    model = load(tiny_model("gpt2"))
    longest = model.longest_window
    assert longest is not None
    with pytest.raises(InputError, match=rf"{longest + 1} tokens, but this model takes {longest}"):
        stream_states(model, torch.zeros(1, longest + 1, dtype=torch.long), None, [0])


def test_capture_leaves_no_hook_behind_even_when_the_model_fails() -> None:
    model = load(tiny_model("gpt2"))

    def explode(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[2].register_forward_pre_hook(explode)
    with pytest.raises(KeyboardInterrupt), capture(model, token_ids()):
        pass
    handle.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.hf.modules())


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mamba", "rwkv", "jamba"])
def test_the_stream_passes_by_as_capture_sees_it(name: str) -> None:
    model, ids = load(tiny_model(name)), token_ids()
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    passed: dict[int, torch.Tensor] = {}
    watch_stream(model, {"input_ids": ids, "attention_mask": mask}, lambda at, h: passed.update({at: h.clone()}))
    with capture(model, {"input_ids": ids, "attention_mask": mask}) as states:
        expected = (*states.inputs, states.outputs[-1])
    assert list(passed) == list(range(model.n_layers + 1))
    for found, wanted in zip(passed.values(), expected, strict=True):
        torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=1e-5, atol=1e-5)


def test_blocks_that_return_another_dtype_are_captured_as_they_flow() -> None:
    model, ids = load(faulty.wider_dtype()), token_ids()
    with capture(model, ids) as states:
        assert states.outputs[1].dtype == torch.float64
        assert states.inputs[2].dtype == torch.float32
        assert torch.equal(states.outputs[1].float(), states.inputs[2])
        same = intervene(model, ids, layer=1, states=states.outputs[1], scope="all")
    assert same.kl.max() < 1e-6


def test_states_follow_a_model_that_is_spread_over_devices(tmp_path: Any) -> None:
    """Layers kept on disk and moved in for their turn, as device_map does it; sums and hashes stay the same."""
    from accelerate import cpu_offload, disk_offload

    plain, ids = load(tiny_model("llama")), token_ids()
    with capture(plain, ids) as states:
        expected = states.outputs
    for spread in (
        cpu_offload(tiny_model("llama"), execution_device=torch.device("cpu")),
        disk_offload(tiny_model("llama"), str(tmp_path), execution_device=torch.device("cpu")),
    ):
        assert any(p.is_meta for p in spread.parameters())
        model = load(spread)
        assert model.device == torch.device("cpu")
        assert model.identity.weight_hash == plain.identity.weight_hash
        with capture(model, ids) as states:
            for x, y in zip(states.outputs, expected, strict=True):
                assert torch.equal(x, y)
        patched = intervene(model, ids, layer=1, states=expected[1].roll(1, dims=0), scope="all")
        reference = intervene(plain, ids, layer=1, states=expected[1].roll(1, dims=0), scope="all")
        torch.testing.assert_close(patched.kl, reference.kl)


def test_kernel_is_recorded_and_the_same_in_both_runs() -> None:
    for kernel in ("sdpa", "eager"):
        model = load(tiny_model("llama", attn_implementation=kernel))
        assert model.identity.attention == kernel
        with capture(model, token_ids()) as states:
            same = intervene(model, token_ids(), layer=2, states=states.outputs[2], scope="all")
        assert torch.equal(same.logits, states.logits)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "mpt"])
def test_logits_are_the_models_own_not_a_rebuilt_head(name: str) -> None:
    changes = {"final_logit_softcapping": 2.0} if name == "gemma2" else {}
    model, ids = load(tiny_model(name, **changes)), token_ids()
    with capture(model, ids) as states:
        rebuilt = model.hf.get_output_embeddings()(states.outputs[-1])
        same = intervene(model, ids, layer=LAYERS - 1, states=states.outputs[-1], scope="all")
    assert torch.equal(same.logits, model.hf(ids, use_cache=False).logits)
    assert not torch.allclose(rebuilt, same.logits, atol=1e-2)


def test_kl_is_from_the_original_to_the_patched_prediction_in_nats() -> None:
    model, ids = load(tiny_model("llama")), token_ids()
    with capture(model, ids) as states:
        patched = intervene(model, ids, layer=1, states=states.outputs[1].roll(1, dims=0), scope="all")
        p, q = states.logits.double().log_softmax(-1), patched.logits.double().log_softmax(-1)
    forward, backward = (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1)
    torch.testing.assert_close(patched.kl.double(), forward, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(patched.kl.double(), backward, rtol=0.05)


def test_kl_of_a_bfloat16_model_is_never_negative() -> None:
    model, ids = load(tiny_model("llama"), dtype="bfloat16"), token_ids()
    with capture(model, ids) as states:
        nudged = states.outputs[2] * 1.004
        patched = intervene(model, ids, layer=2, states=nudged, scope="all")
        p, q = states.logits.double().log_softmax(-1), patched.logits.double().log_softmax(-1)
    assert patched.kl.min() >= 0
    torch.testing.assert_close(patched.kl.double(), (p.exp() * (p - q)).sum(-1), rtol=1e-2, atol=1e-6)


def test_layer_0_of_a_rotary_model_sees_bitwise_duplicates_and_later_layers_do_not() -> None:
    model, ids = load(tiny_model("gpt_neox")), torch.tensor([[5, 6, 5, 7, 5, 6]])
    with capture(model, ids) as states:
        distinct = [len(torch.unique(x[0], dim=0)) for x in states.inputs]
    assert distinct == [3, 6, 6, 6]


def test_unrelated_updates_fit_in_sample_and_not_held_out() -> None:
    """n <= d: the in-sample fit of states to another window's updates is perfect, and means nothing."""
    model, ids = load(tiny_model("llama")), token_ids(2, 24)
    with capture(model, ids) as states:
        x, y = (
            states.inputs[2][0],
            states.inputs[2][0] + torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0)),
        )
        pool = states.inputs[2][1], states.outputs[2][1]
    fitted = {"map": "linear", "neighbors": 24, "ridge": 1e-6}
    vacuous = decompose(x, y, protocol="in_sample", **fitted)
    honest = decompose(x, y, pool=pool, protocol="held_out", **fitted)
    size = (y - x).norm(dim=-1)
    assert float((vacuous.residual.norm(dim=-1) / size).median()) < 0.05
    assert float((honest.residual.norm(dim=-1) / size).median()) > 0.5


def test_gradients_are_off_and_the_model_stays_in_eval_mode() -> None:
    hf = tiny_model("gpt2").train()
    model = load(hf)
    with capture(model, token_ids()) as states:
        assert not states.logits.requires_grad
    assert not hf.training

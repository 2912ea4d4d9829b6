"""What each sub-layer adds to the stream: the sum of both is the block's update, in every family that names them."""

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, LAYERS, tiny_model, token_ids

from deltalens.errors import ModelError
from deltalens.models import Model, capture, load
from deltalens.models.block_call import BlockRunner
from deltalens.models.interventions.backbone import undisturbed
from deltalens.models.sublayers import SUM_TOLERANCE, Contributions, contributions, sum_error

#: Blocks that add something beside mixer and MLP: a norm of RWKV's embeddings is part of its first block.
MORE_IS_ADDED = {("rwkv", 0)}


def contributed(model: Model, ids: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor, Contributions]:
    with capture(model, ids) as states:
        x, y = states.inputs[layer], states.outputs[layer]
    with undisturbed(model.hf):
        return x, y, contributions(model, BlockRunner(model, layer), layer, ids, x)


def error_of(x: torch.Tensor, y: torch.Tensor, found: Contributions) -> float:
    parts = [torch.zeros_like(x) if part is None else part for part in (found.mixer, found.mlp)]
    return sum_error(*(states.flatten(0, 1) for states in (x, y, *parts)))


@pytest.mark.parametrize("name", FAMILIES)
def test_output_is_input_plus_mixer_plus_mlp(name: str) -> None:
    model, ids = load(tiny_model(name)), token_ids()
    for layer in range(LAYERS):
        x, y, found = contributed(model, ids, layer)
        torch.testing.assert_close(found.output, y, rtol=1e-4, atol=1e-5)
        error = error_of(x, y, found)
        assert (error > 0.01) if (name, layer) in MORE_IS_ADDED else (error < SUM_TOLERANCE)


LAST_OF_MLP = {
    "gpt2": "mlp.c_proj", "gemma2": "mlp.down_proj", "gptj": "mlp.fc_out", "falcon": "mlp.dense_4h_to_h",
    "granite": "mlp.down_proj", "bloom": "mlp.dense_4h_to_h", "mpt": "ffn.down_proj", "opt": "fc2",
}  # fmt: skip


@pytest.mark.parametrize("name", LAST_OF_MLP)
def test_the_mixer_is_what_an_idle_mlp_leaves(name: str) -> None:
    """Told apart, not only summed: with the MLP's last weights at zero, the update is the mixer's alone."""
    hf, ids = tiny_model(name), token_ids()
    model = load(hf)
    silence(model.blocks[2].get_submodule(LAST_OF_MLP[name]))
    x, y, found = contributed(model, ids, 2)
    assert found.mixer is not None
    torch.testing.assert_close(found.mixer, y - x, rtol=1e-4, atol=1e-5)


def test_a_block_that_holds_an_mlp_alone_has_no_mixer() -> None:
    model, ids = load(tiny_model("nemotron_h")), token_ids()
    assert model.block_kinds[2] == "mlp"
    _, _, found = contributed(model, ids, 2)
    assert found.mixer is None
    assert found.mlp is not None


def test_a_row_without_sub_layers_says_so() -> None:
    hf = tiny_model("llama")
    hf.config.model_type = "unheard_of"
    model = load(hf)
    assert model.architecture.discovered
    with pytest.raises(ModelError, match="names no sub-layers"):
        contributed(model, token_ids(), 1)


def test_the_sum_test_fails_where_something_else_is_added() -> None:
    hf = tiny_model("llama")
    inner = hf.model.layers[1].forward
    hf.model.layers[1].forward = lambda *a, **k: inner(*a, **k) * 1.05
    x, y, found = contributed(load(hf), token_ids(), 1)
    assert error_of(x, y, found) > 0.01


def silence(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()

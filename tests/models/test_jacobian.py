"""The block's own local map at a token, against finite differences and the Jacobian written out, family by family."""

import pytest
import torch
from tiny_models import FAMILIES, WIDTH, tiny_model, token_ids

from deltalens.errors import ModelError
from deltalens.models import capture, load
from deltalens.models.block_call import BlockRunner
from deltalens.models.interventions.backbone import undisturbed
from deltalens.models.jacobian import TokenJacobian

LAYER, WINDOW, POSITION = 1, 1, 20


def directions(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


#: Grouped products of experts have no float64, so there the judge is a coarser difference. Norms compute in float32
#: anywhere, which is why the step can't be small.
EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "jamba"}


@pytest.mark.parametrize("name", FAMILIES)
def test_products_are_the_derivative_in_the_true_context(name: str) -> None:
    """A central difference of the model's own block, patched at the token with the window as it is."""
    step, tolerance = (1e-2, 2e-2) if name in EXPERTS else (2e-3, 2e-3)
    hf, ids = tiny_model(name), token_ids()
    model = load(hf if name in EXPERTS else hf.double())
    with capture(model, ids) as states:
        x, y = states.inputs[LAYER], states.outputs[LAYER]
    v, u = directions(3).to(x), directions(2, seed=1).to(x)
    with undisturbed(model.hf):
        runner = BlockRunner(model, LAYER)
        jacobian = TokenJacobian(runner, ids[WINDOW], x[WINDOW], POSITION)
        torch.testing.assert_close(jacobian.output(), y[WINDOW, POSITION], rtol=1e-4, atol=1e-4)
        forward, transposed = jacobian.forward(v), jacobian.transposed(u)

        def moved(by: torch.Tensor) -> torch.Tensor:
            patched = x.clone()
            patched[WINDOW, POSITION] += by
            return runner.run(ids, patched).output[WINDOW, POSITION]

        slow = torch.stack([(moved(step * row) - moved(-step * row)) / (2 * step) for row in v])
    assert (forward - slow).norm() < tolerance * slow.norm()
    torch.testing.assert_close(u @ forward.T, transposed @ v.T, rtol=1e-3, atol=1e-3)


def test_more_directions_than_run_together_give_the_whole_matrix() -> None:
    model, ids = load(tiny_model("llama")), token_ids()
    with capture(model, ids) as states:
        x = states.inputs[LAYER]
    with undisturbed(model.hf):
        jacobian = TokenJacobian(BlockRunner(model, LAYER), ids[0], x[0], 5)
        identity = torch.eye(WIDTH)
        torch.testing.assert_close(jacobian.forward(identity).T, jacobian.transposed(identity), rtol=1e-4, atol=1e-5)


def test_a_half_precision_model_is_differentiated_in_float32() -> None:
    ids, v = token_ids(), directions(4).float()
    found = {}
    for dtype in ("float32", "bfloat16"):
        model = load(tiny_model("llama"), dtype=dtype)
        with capture(load(tiny_model("llama"), dtype="bfloat16"), ids) as states:
            x = states.inputs[LAYER]
        with undisturbed(model.hf):
            found[dtype] = TokenJacobian(BlockRunner(model, LAYER), ids[0], x[0].to(model.dtype), 9).forward(v)
        assert all(parameter.dtype == model.dtype for parameter in model.hf.parameters())
    assert (found["bfloat16"] - found["float32"]).norm() < 0.02 * found["float32"].norm()


def test_a_block_without_derivatives_is_refused_in_one_line() -> None:
    hf = tiny_model("llama")
    inner = hf.model.layers[LAYER].forward
    hf.model.layers[LAYER].forward = lambda states, **named: torch.from_numpy(inner(states, **named).numpy().copy())
    model, ids = load(hf), token_ids()
    with capture(model, ids) as states:
        x = states.inputs[LAYER]
    with undisturbed(model.hf), pytest.raises(ModelError, match="can't be differentiated") as refusal:
        TokenJacobian(BlockRunner(model, LAYER), ids[0], x[0], 5).forward(torch.eye(WIDTH))
    assert "\n" not in str(refusal.value)

"""What holds for any intervention: identities, causality, padding, batches, and a model that's left as it was."""

import copy
from typing import Any

import pytest
import torch
from intervention_models import OTHER_SCHEMES, family_model, other_states, windows

from deltalens.errors import InputError
from deltalens.models import InterventionSession, Model, capture, intervene
from deltalens.models.interventions.cached_keys import CachedKeys

SCHEMES = {
    "cached_keys": "gemma2",
    "doubled_length": "openai-gpt",
    "state_bank": "jamba",
    "doubled_batch": "mamba",
    "rerun": "llama",
}
by_scheme = pytest.mark.parametrize(("scheme", "family"), SCHEMES.items())
across_families = pytest.mark.parametrize(
    "family",
    ["gpt2", "gemma2", "bloom", "gpt_neo", "openai-gpt", "mamba", "jamba", "zamba2", "rwkv", "recurrent_gemma"],
)


def outputs(model: Model, input_ids: torch.Tensor, layer: int) -> torch.Tensor:
    with capture(model, input_ids) as states:
        return states.outputs[layer]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / (expected.max() - expected.min()))


@across_families
def test_identity_patch_gives_the_original_logits(family: str) -> None:
    model, ids = family_model(family), windows(2, 17)
    with InterventionSession(model, ids) as session:
        for layer in range(len(model.blocks)):
            assert relative(session.replace(layer, outputs(model, ids, layer)), session.logits) <= 1e-5


@across_families
def test_true_output_everywhere_gives_exactly_the_original_logits(family: str) -> None:
    model, ids = family_model(family), windows(2, 17)
    with torch.no_grad():
        plain = model.hf(input_ids=ids, use_cache=False).logits
    with InterventionSession(model, ids) as session:
        assert torch.equal(session.logits, plain)
        for layer in range(len(model.blocks)):
            assert torch.equal(session.replace(layer, outputs(model, ids, layer), "all"), plain)


@across_families
def test_original_logits_are_those_of_a_plain_forward(family: str) -> None:
    model, ids = family_model(family), windows(3, 20)
    with torch.no_grad():
        plain = model.hf(input_ids=ids, use_cache=False).logits
    assert torch.equal(intervene(model, ids, layer=1, states=outputs(model, ids, 1), scope="all").logits, plain)


@across_families
def test_a_patch_changes_nothing_before_its_position(family: str) -> None:
    model, ids, position = family_model(family), windows(1, 17), 9
    states, other = outputs(model, ids, 1), other_states(model, ids, 1)
    states[:, position] = other[:, position]
    with InterventionSession(model, ids) as session:
        logits, single = session.replace(1, states, "all"), session.replace(1, other)
        # Experts take the tokens that are routed to them together, so one token's change moves others by rounding.
        assert relative(logits[:, :position], session.logits[:, :position]) <= (1e-6 if family == "jamba" else 0.0)
        assert relative(logits[:, position], single[:, position]) <= 1e-5
        assert relative(logits[:, -1], session.logits[:, -1]) > 1e-4


@across_families
def test_single_and_all_agree_at_the_first_replaced_position(family: str) -> None:
    model, ids = family_model(family), windows(2, 17)
    states = other_states(model, ids, 2)
    later = torch.zeros(2, 17, dtype=torch.bool)
    later[:, 5:] = True
    with InterventionSession(model, ids) as session:
        single, together = session.replace(2, states), session.replace(2, states, "all", later)
    assert relative(together[:, 5], single[:, 5]) <= 1e-5
    assert relative(together[:, 16], single[:, 16]) > 1e-3


@across_families
def test_padded_windows_equal_windows_without_padding(family: str) -> None:
    model, ids = family_model(family), windows(2, 17)
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    ids[1, 11:] = 0
    states = other_states(model, ids, 1)
    with InterventionSession(model, ids, mask) as session:
        for scope in ("single", "all"):
            padded = session.replace(1, states, scope)
            assert torch.isnan(padded[1, 11:]).all()
            with InterventionSession(model, ids[1:, :11]) as short:
                alone = short.replace(1, states[1:, :11], scope)
            assert relative(padded[1, :11], alone[0]) <= 1e-5
            assert not torch.isnan(padded[0]).any()


@by_scheme
def test_windows_of_a_batch_do_not_mix(scheme: str, family: str) -> None:
    model, ids = family_model(family), windows(3, 17)
    states = other_states(model, ids, 1)
    with InterventionSession(model, ids, scheme=scheme) as session:
        together = session.replace(1, states)
    for window in range(3):
        with InterventionSession(model, ids[window : window + 1], scheme=scheme) as session:
            alone = session.replace(1, states[window : window + 1])
        assert relative(together[window], alone[0]) <= 1e-5


@by_scheme
def test_patches_of_a_layer_together_equal_patches_one_by_one(scheme: str, family: str) -> None:
    model, ids = family_model(family), windows(2, 17)
    patches = [outputs(model, ids, 1) * factor for factor in (0.5, 1.0, 2.0)]
    with InterventionSession(model, ids, scheme=scheme) as session:
        one_by_one = [session.replace(1, states) for states in patches]
        together = [torch.full_like(session.logits, torch.nan) for _ in patches]
        for chunk in session.stream(1, patches):
            together[chunk.patch][chunk.windows, chunk.positions] = chunk.patched
            assert torch.equal(chunk.original, session.logits[chunk.windows, chunk.positions])
    for found, expected in zip(together, one_by_one, strict=True):
        assert relative(found, expected) <= 1e-5


@by_scheme
def test_only_asked_positions_are_answered(scheme: str, family: str) -> None:
    model, ids = family_model(family), windows(2, 17)
    positions = torch.zeros(2, 17, dtype=torch.bool)
    positions[0, 3] = positions[1, 16] = True
    states = other_states(model, ids, 1)
    with InterventionSession(model, ids, scheme=scheme) as session:
        few, every = session.replace(1, states, "single", positions), session.replace(1, states)
    assert torch.equal(~torch.isnan(few).any(-1), positions)
    assert relative(few[positions], every[positions]) <= 1e-5


@by_scheme
def test_a_session_answers_the_same_again_after_other_layers_and_scopes(scheme: str, family: str) -> None:
    model, ids = family_model(family), windows(2, 17)
    states = {layer: other_states(model, ids, layer) for layer in range(len(model.blocks))}
    with InterventionSession(model, ids, scheme=scheme) as session:
        first = session.replace(2, states[2])
        for layer, replacement in states.items():
            session.replace(layer, replacement, "all")
            session.replace(layer, replacement)
        assert torch.equal(session.replace(2, states[2]), first)


def test_module_states_survive_a_plain_pass_between_queries() -> None:
    model, ids = family_model("recurrent_gemma"), windows(2, 17)
    states = other_states(model, ids, 1)
    with InterventionSession(model, ids) as session:
        first = session.replace(1, states)
        session.replace(1, states, "all")
        assert torch.equal(session.replace(1, states), first)


class Photograph:
    """Everything about a model that an intervention might leave changed."""

    def __init__(self, model: Model) -> None:
        hf = model.hf
        self.weights = {name: tensor.clone() for name, tensor in hf.state_dict(keep_vars=False).items()}
        self.modules = [self._of(module) for module in hf.modules()]

    @staticmethod
    def _of(module: torch.nn.Module) -> dict[str, Any]:
        hooks = {name: len(value) for name, value in module.__dict__.items() if name.endswith("hooks")}
        plain = {name: id(value) for name, value in module.__dict__.items() if not name.startswith("_")}
        parts = {name: id(value) for name, value in (module._modules | module._buffers | module._parameters).items()}
        return {"hooks": hooks, "plain": plain, "parts": parts, "buffers": dict(module._buffers)}

    def same_as(self, other: "Photograph") -> bool:
        weights = all(torch.equal(tensor, other.weights[name]) for name, tensor in self.weights.items())
        shapes = [{key: part[key] for key in ("hooks", "plain", "parts")} for part in self.modules]
        others = [{key: part[key] for key in ("hooks", "plain", "parts")} for part in other.modules]
        return weights and shapes == others


@across_families
def test_a_model_is_left_bit_identical(family: str) -> None:
    model, ids = family_model(family), windows(2, 17)
    logits = model.hf(input_ids=ids, use_cache=False).logits
    before = Photograph(model)
    with InterventionSession(model, ids) as session:
        for scope in ("single", "all"):
            session.replace(1, other_states(model, ids, 1), scope)
    assert Photograph(model).same_as(before)
    assert torch.equal(model.hf(input_ids=ids, use_cache=False).logits, logits)


class Interrupted(torch.nn.Module):
    """Counts block calls and interrupts one of them."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def hook(self, *_: object) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [0, 3, 9, 40])
@by_scheme
def test_an_interrupt_leaves_the_model_as_it_was(scheme: str, family: str, at: int) -> None:
    model, ids = family_model(family), windows(1, 9)
    states = other_states(model, ids, 0)
    before = Photograph(model)
    handle = model.blocks[2].register_forward_hook(Interrupted(at).hook)
    try:
        with pytest.raises(KeyboardInterrupt), InterventionSession(model, ids, scheme=scheme) as session:  # noqa: PT012
            for _ in range(60):
                session.replace(0, states)
    finally:
        handle.remove()
    assert Photograph(model).same_as(before)


def test_the_cache_holds_the_original_keys_after_each_use_and_after_errors() -> None:
    model, ids = family_model("gemma2"), windows(2, 17)
    with torch.no_grad():
        scheme = CachedKeys.start(model, ids)
        kept = [(layer.keys, layer.values, layer.keys.clone()) for layer in scheme.base.cache.layers]
        states = other_states(model, ids, 1).unsqueeze(0)
        scheme.patched(1, states, torch.ones(2, 17, dtype=torch.bool))
        handle = model.blocks[3].register_forward_hook(Interrupted(0).hook)
        with pytest.raises(KeyboardInterrupt):
            scheme.patched(1, states, torch.ones(2, 17, dtype=torch.bool))
        handle.remove()
    for layer, (keys, values, copied) in zip(scheme.base.cache.layers, kept, strict=True):
        assert layer.keys is keys
        assert layer.values is values
        assert torch.equal(keys, copied)


def test_an_instance_forward_of_a_block_comes_back() -> None:
    model, ids = family_model("llama", seed=3), windows(1, 9)
    block = model.blocks[1]
    own = copy.copy(block.forward)
    calls: list[int] = []

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return own(*args, **kwargs)

    block.forward = counted
    try:
        intervene(model, ids, layer=2, states=other_states(model, ids, 2))
        assert block.__dict__["forward"] is counted
        assert calls
    finally:
        del block.__dict__["forward"]


def test_training_mode_is_left_on_and_dropout_is_off_inside() -> None:
    model, ids = family_model("gpt2"), windows(1, 9)
    states = other_states(model, ids, 1)
    expected = intervene(model, ids, layer=1, states=states).logits
    model.hf.train()
    try:
        assert torch.equal(intervene(model, ids, layer=1, states=states).logits, expected)
        assert all(module.training for module in model.hf.modules())
    finally:
        model.hf.eval()


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "openai-gpt", "mamba", "jamba", "rwkv", "recurrent_gemma"])
def test_windows_of_a_few_tokens_work(family: str, tokens: int) -> None:
    model, ids = family_model(family), windows(2, tokens)
    result = intervene(model, ids, layer=1, states=other_states(model, ids, 1))
    assert result.path == OTHER_SCHEMES.get(family, "cached_keys")
    assert torch.isfinite(result.kl).all()


@pytest.mark.parametrize("scope", ["single", "all"])
def test_intervene_gives_logits_divergence_and_path(scope: Any) -> None:
    model, ids = family_model("llama"), windows(2, 17)
    true = intervene(model, ids, layer=2, states=outputs(model, ids, 2), scope=scope)
    other = intervene(model, ids, layer=2, states=other_states(model, ids, 2), scope=scope)
    assert other.logits.shape == (2, 17, 96)
    assert true.kl.abs().max() < 1e-6
    assert (other.kl[:, 1:] > 1e-4).all()
    assert other.path == ("cached_keys" if scope == "single" else "plain")


def test_bad_requests_name_what_arrived() -> None:
    model, ids = family_model("llama"), windows(2, 17)
    states = other_states(model, ids, 1)
    with InterventionSession(model, ids) as session:
        with pytest.raises(InputError, match="Layer 4"):
            session.replace(4, states)
        with pytest.raises(InputError, match=r"\(1, 17, 32\)"):
            session.replace(1, states[:1])
        with pytest.raises(InputError, match="positions"):
            session.replace(1, states, "single", torch.ones(1, 17, dtype=torch.bool))
    with (
        pytest.raises(InputError, match="Unknown intervention scheme 'magic'"),
        InterventionSession(model, ids, scheme="magic"),
    ):
        pass
    left = torch.ones_like(ids)
    left[0, 0] = 0
    with pytest.raises(InputError, match="padded on the left"):
        InterventionSession(model, ids, left)
    with pytest.raises(InputError, match="with"):
        session.replace(1, states)

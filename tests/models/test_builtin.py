"""The models that come with the package: their cards, measured again, and what makes them worth analysing."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from deltalens.models import builtin_models, capture, load
from deltalens.models.builtin_models import BUILTIN_FOLDER, TOKENIZER_FOLDER

NAMES = ["tiny-gpt2", "tiny-mamba", "tiny-neox"]
_SCRIPT = Path(__file__).parents[2] / "training" / "measure.py"

every_model = pytest.mark.parametrize("name", NAMES)


@cache
def script() -> ModuleType:
    """The script that writes the cards, so that the test measures what they say in the same way."""
    spec = importlib.util.spec_from_file_location("measure", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def measured(name: str) -> dict[str, float]:
    model = load(name)
    return script().summarize(script().losses(model.hf, script().held_out_windows(model.tokenizer)))


def test_all_three_are_there() -> None:
    assert sorted(builtin_models()) == NAMES


@every_model
def test_card_says_what_is_measured(name: str) -> None:
    card = builtin_models()[name]
    # The help topics differ a little between versions of CPython.
    for figure, value in measured(name).items():
        assert value == pytest.approx(card[figure], abs=0.1), figure
    assert card["bytes"] == script().folder_bytes(BUILTIN_FOLDER / name)
    assert card["parameters"] == load(name).identity.parameters
    readme = (BUILTIN_FOLDER / name / "README.md").read_text(encoding="utf8")
    assert f"{card['cross_entropy']:.3f} nats" in readme
    assert f"{card['unigram']:.3f} nats" in readme


@every_model
def test_it_predicts_far_better_than_token_frequencies(name: str) -> None:
    assert measured(name)["cross_entropy"] <= builtin_models()[name]["unigram"] - 1.5


@every_model
def test_it_uses_context(name: str) -> None:
    assert measured(name)["later"] <= measured(name)["early"] - 0.3


@every_model
def test_it_is_small_and_in_half_precision_on_disk(name: str) -> None:
    folder = BUILTIN_FOLDER / name
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4_000_000
    assert load(name).dtype == torch.float32
    assert load(folder).dtype == torch.float16


@every_model
def test_it_is_an_ordinary_folder_with_the_shared_tokenizer(name: str) -> None:
    model = load(name)
    assert model.identity.source == "built-in"
    assert not model.architecture.discovered
    assert model.tokenizer.name_or_path == str(TOKENIZER_FOLDER)
    ids = model.tokenizer("The class of an object", return_tensors="pt")
    with capture(model, ids) as states:
        assert len(states.outputs) == 6
    assert model.tokenizer.decode(ids["input_ids"][0]) == "The class of an object"


def test_cross_entropy_of_a_uniform_model_is_the_log_of_the_vocabulary() -> None:
    """The script's own arithmetic, against a model whose loss is known."""

    class Uniform(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
            return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 50)})()

    windows = torch.randint(0, 50, (3, 128), generator=torch.Generator().manual_seed(0))
    loss = script().losses(Uniform(), windows)
    assert loss.shape == (3, 127)
    assert float(loss.mean()) == pytest.approx(3.912, abs=1e-3)
    assert script().unigram_loss(torch.zeros(50), windows) == pytest.approx(3.912, abs=1e-3)

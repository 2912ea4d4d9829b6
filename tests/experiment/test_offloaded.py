"""Models whose weights lie elsewhere: a run on them has the numbers of a run on the plain model."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

import deltalens as dl

SMALL: dict[str, Any] = {
    "layers": [1, 4], "maps": ["linear"], "tokens": 96, "pool_tokens": 192, "window": 24, "neighbors": 16,
    "resamples": 100, "protocol": ["held_out"],
}  # fmt: skip
HERE = torch.device("cpu")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dl.Run:
    return dl.run(dl.load("tiny-gpt2"), out=tmp_path_factory.mktemp("plain") / "r", **SMALL)


def half_on_disk(hf: Any, folder: str) -> Any:
    """The first blocks here, the others on disk, as `device_map` splits a model that doesn't fit."""
    places: dict[str, Any] = {"transformer.wte": "cpu", "transformer.wpe": "cpu", "transformer.ln_f": "cpu"}
    places |= {f"transformer.h.{at}": "cpu" if at < 3 else "disk" for at in range(6)} | {"lm_head": "cpu"}
    return dispatch_model(hf, places, main_device="cpu", offload_dir=folder, force_hooks=True)


@pytest.mark.parametrize("where", ["memory", "disk", "half on disk"])
def test_offloaded_weights_change_no_number(plain: dl.Run, tmp_path: Path, where: str) -> None:
    model = dl.load("tiny-gpt2")
    moved = {
        "memory": lambda hf: cpu_offload(hf, execution_device=HERE),
        "disk": lambda hf: disk_offload(hf, str(tmp_path / "weights"), execution_device=HERE),
        "half on disk": lambda hf: half_on_disk(hf, str(tmp_path / "weights")),
    }[where](model.hf)
    assert any(weight.is_meta for weight in moved.parameters())
    offloaded = dl.load(moved, tokenizer=model.tokenizer)
    assert offloaded.identity.weight_hash == model.identity.weight_hash
    run = dl.run(offloaded, out=tmp_path / "r", **SMALL)
    assert run.manifest["interventions"]["single"]["path"] == "cached_keys"
    pd.testing.assert_frame_equal(run.tokens(), plain.tokens(), rtol=1e-4, atol=1e-6)

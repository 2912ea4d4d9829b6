"""Evaluation windows are worked on in blocks, and nothing but the seeded partners depends on where they are cut."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import deltalens as dl
from deltalens.experiment import blocks, layer
from deltalens.experiment.blocks import all_partners, cut_blocks, window_blocks
from deltalens.experiment.store import RunFolder

SMALL: dict[str, Any] = {
    "layers": [1, 4], "maps": ["linear", "orthogonal", "mlp:4"], "tokens": 240, "pool_tokens": 384, "window": 48,
    "neighbors": 24, "resamples": 100, "protocol": ["held_out", "leave_one_out"], "null_tokens": 100,
}  # fmt: skip
#: Controls whose partner or random direction is drawn within the block.
DRAWN = {"kl_single_random", "kl_single_shuffled"}


@pytest.fixture(scope="module")
def model() -> dl.Model:
    return dl.load("tiny-gpt2")


@pytest.mark.parametrize("windows", [1, 2, 3, 4, 5, 9, 40])
@pytest.mark.parametrize("length", [24, 200, 256, 900, 4000])
def test_blocks_cover_all_windows_and_none_stands_alone(windows: int, length: int) -> None:
    cut = window_blocks(windows, length)
    assert [window for part in cut for window in range(windows)[part]] == list(range(windows))
    sizes = [part.stop - part.start for part in cut]
    assert all(size >= 2 for size in sizes) or windows == 1
    assert all(size * length <= blocks.BLOCK_TOKENS or size <= 3 for size in sizes[:-1])


def test_partners_are_in_another_window_of_the_same_block() -> None:
    included = torch.rand(11, 300, generator=torch.Generator().manual_seed(0)) > 0.1
    cut = cut_blocks(included, seed=3)
    assert len(cut) == 4
    owner = torch.nonzero(included)[:, 0]
    partner = all_partners(cut)
    assert (owner[partner] != owner).all()
    for block in cut:
        inside = partner[block.tokens]
        assert bool(((inside >= block.tokens.start) & (inside < block.tokens.stop)).all())
        if block.windows.stop - block.windows.start > 2:  # of two windows one may hold more than half
            assert sorted(inside.tolist()) == list(range(block.tokens.start, block.tokens.stop))


@pytest.mark.parametrize("size", [96, 144])
def test_no_measure_depends_on_the_size_of_blocks(
    model: dl.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    whole = dl.run(model, out=tmp_path / "whole", **SMALL)
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", size)
    cut = dl.run(model, out=tmp_path / "cut", **SMALL)
    ours, theirs = whole.tokens(), cut.tokens()
    assert set(ours.columns) == set(theirs.columns) >= DRAWN
    same = [name for name in ours if name not in DRAWN]
    pd.testing.assert_frame_equal(ours[same], theirs[same], rtol=1e-4, atol=1e-6)
    assert not ours["kl_single_random"].equals(theirs["kl_single_random"])
    pd.testing.assert_frame_equal(
        pd.read_parquet(whole.folder / "neighbors.parquet"), pd.read_parquet(cut.folder / "neighbors.parquet")
    )
    nulls = [name for name in whole.summary() if name.endswith("_null")]
    assert nulls
    pd.testing.assert_frame_equal(whole.summary()[nulls], cut.summary()[nulls], rtol=1e-4, atol=1e-6)


def test_a_block_without_included_tokens_keeps_its_rows(
    model: dl.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 96)
    from deltalens.experiment import captured

    exclude = captured.exclude

    def without_the_first_block(*given: Any, **options: Any) -> Any:
        found = exclude(*given, **options)
        found[0].reason[:2] = 3
        return found

    monkeypatch.setattr(captured, "exclude", without_the_first_block)
    options = SMALL | {"layers": [1], "maps": ["mean"], "protocol": ["held_out"]}
    rows = dl.run(model, out=tmp_path / "r", **options).tokens()
    assert len(rows) == 240
    left_out = rows["window"] < 2
    assert rows.loc[left_out, ["relative_error", "kl_single", "nll"]].isna().all(axis=None)
    assert rows.loc[~left_out & ~rows["excluded"], "kl_single"].notna().all()


@pytest.mark.parametrize(("size", "measured"), [(1024, [1, 2, 3]), (96, [4, 5, 6])])
def test_a_unit_is_committed_before_the_last_block_measures_the_next(
    model: dl.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, measured: list[int]
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", size)
    parts, found = [], []
    part, write = layer._BlockMeasure.part, RunFolder.write_unit

    def counted(self: layer._BlockMeasure, *given: Any, **options: Any) -> Any:
        parts.append(given)
        return part(self, *given, **options)

    def written(self: RunFolder, *given: Any) -> None:
        found.append(len(parts))
        write(self, *given)

    monkeypatch.setattr(layer._BlockMeasure, "part", counted)
    monkeypatch.setattr(RunFolder, "write_unit", written)
    own = {"layers": [1], "maps": ["identity", "mean", "diagonal"], "protocol": "in_sample", "scope": ""}
    dl.run(model, out=tmp_path / "r", **(SMALL | own | {"tokens": 192}))
    assert found == measured

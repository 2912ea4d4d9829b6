"""A run on one prompt: all of its tokens, judged on a pool that leaves it out, and refused where nothing would hold."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import CHROMIUM, chromium, opened

import deltalens as dl
from deltalens.experiment.documents import Document, Documents, built_in_documents
from deltalens.experiment.manifest import command
from deltalens.experiment.plan import make_plan

PROMPT = "The loop reads each line of the file, and the function returns a list of the strings that it found."
SMALL: dict[str, Any] = {
    "prompt": PROMPT,
    "layers": [1, 3],
    "maps": ["linear", "mean"],
    "pool_tokens": 512,
    "window": 48,
    "neighbors": 24,
    "resamples": 100,
}


@pytest.fixture(scope="module")
def model() -> dl.Model:
    return dl.load("tiny-gpt2")


@pytest.fixture(scope="module")
def run(model: dl.Model, tmp_path_factory: pytest.TempPathFactory) -> dl.Run:
    return dl.run(model, out=tmp_path_factory.mktemp("prompt") / "r", **SMALL)


def planned(model: dl.Model, folder: Path, documents: Documents | None = None, **changes: Any) -> Any:
    spec = dl.RunSpec.parse(**(SMALL | changes))
    return make_plan(spec, model, documents or built_in_documents(), folder)


def test_the_rows_are_the_tokens_of_the_prompt(model: dl.Model, run: dl.Run) -> None:
    rows = run.tokens(layer=1, map="mean")
    assert rows["token_id"].tolist() == model.tokenizer(PROMPT)["input_ids"]
    assert set(rows["document"]) == {"prompt"}
    assert set(rows["protocol"]) == {"held_out"}
    assert rows["excluded"].tolist() == [True] + [False] * (len(rows) - 1)


def test_its_figures_are_those_of_the_prompt_alone_on_the_pool(model: dl.Model, run: dl.Run, tmp_path: Path) -> None:
    pool = planned(model, tmp_path).corpus.pool
    ids = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with dl.capture(model, ids) as states:
        x, y = states.inputs[3][0, 1:], states.outputs[3][0, 1:]
    with dl.capture(model, {"input_ids": pool.input_ids, "attention_mask": pool.attention_mask}) as states:
        kept = pool.attention_mask.bool() & (torch.arange(pool.input_ids.shape[1]) >= 1)
        pairs = states.inputs[3][kept], states.outputs[3][kept]
    parts = dl.decompose(x, y, pool=pairs, map="linear", neighbors=24)
    rows = run.tokens(layer=3, map="linear")
    rows = rows[~rows["excluded"]]
    np.testing.assert_allclose(rows["residual_norm"], parts.residual.norm(dim=1), rtol=1e-3)
    logits = model.hf(input_ids=ids).logits[0, :-1]
    nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")[1:]
    np.testing.assert_allclose(rows["nll"].to_numpy()[:-1], nll.detach(), rtol=1e-3, atol=1e-5)
    assert np.isnan(rows["nll"].iloc[-1])


def test_the_pool_leaves_out_a_document_that_is_the_prompt(model: dl.Model, tmp_path: Path) -> None:
    secret = " ".join(["zebra"] * 200)
    texts = {"secret": f"{secret}\n", "other": " ".join(["giraffe"] * 400)}
    documents = Documents("made", tuple(Document(name, text) for name, text in texts.items()))

    def pooled(prompt: str) -> set[str]:
        corpus = planned(model, tmp_path, documents, prompt=prompt, pool_tokens=800).corpus
        return {corpus.document_names[number] for number in corpus.pool.documents}

    assert pooled(secret) == {"other"}
    assert pooled(PROMPT) == {"secret", "other"}


def test_a_long_prompt_is_several_windows_and_loses_no_token(model: dl.Model, tmp_path: Path) -> None:
    text = " ".join([PROMPT] * 7)
    evaluation = planned(model, tmp_path, prompt=text).corpus.evaluation
    ids = [int(token) for row, n in zip(evaluation.input_ids, evaluation.lengths, strict=True) for token in row[:n]]
    assert ids == model.tokenizer(text)["input_ids"]
    assert len(evaluation) > 2
    assert set(evaluation.documents.tolist()) == {0}


def test_too_few_windows_leave_intervals_undefined_and_say_so(run: dl.Run) -> None:
    summary = run.summary()
    assert summary[["kl_single_lo", "kl_single_hi", "spearman_lo", "relative_error_lo"]].isna().all(axis=None)
    assert summary[["kl_single", "spearman", "relative_error"]].notna().all(axis=None)
    said = " ".join(run.manifest["warnings"])
    assert "intervals need 8" in said
    assert "second window" in said
    assert "intervals need 8" in (run.folder / "report.html").read_text(encoding="utf8")


def test_what_was_asked_of_a_long_prompt_is_measured(model: dl.Model, tmp_path: Path) -> None:
    text = " ".join([PROMPT] * 3)
    run = dl.run(model, out=tmp_path / "r", **(SMALL | {"prompt": text, "protocol": ["in_sample", "held_out"]}))
    assert set(run.summary()["protocol"]) == {"held_out", "in_sample"}
    assert run.summary()["kl_single"].notna().all()


@pytest.mark.parametrize(
    "changes", [{}, {"protocol": "held_out,in_sample", "neighbors": 8}, {"protocol": "leave_one_out"}]
)
def test_the_command_of_a_run_repeats_it(changes: dict[str, Any]) -> None:
    spec = dl.RunSpec.parse(**(SMALL | changes))
    words = shlex.split(command(spec))
    assert words[:3] == ["deltalens", "run", spec.model]
    names = [word.removeprefix("--").replace("-", "_") for word in words[3::2]]
    assert dl.RunSpec.parse(model=words[2], **dict(zip(names, words[4::2], strict=True))) == spec


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": " \n "}, "empty"),
        ({"prompt": "half \ud800"}, "surrogate"),
        ({"prompt": 7}, "prompt"),
        ({"tokens": 64}, "drop tokens"),
        ({"prompt": "a"}, "longer prompt or lower skip_first"),
        ({"protocol": "in_sample", "neighbors": 64}, "tokens as the pool of in_sample, 64 are needed"),
        ({"protocol": "held_out,leave_one_out", "neighbors": 64}, "pool of leave_one_out, 65 are needed"),
        ({"protocol": "in_sample", "fit": "global", "maps": "low_rank:40"}, "pool of in_sample, 40 are needed"),
        ({"pool_tokens": 10}, "pool_tokens is 10"),
        ({"pool_tokens": 10**9}, "--pool-tokens"),
        ({"window": 1000000}, "window"),
    ],
)
def test_what_cannot_hold_is_refused_in_one_line(
    model: dl.Model, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises((dl.InputError, dl.CorpusError), match=says) as caught:
        planned(model, tmp_path, **changes)
    assert "\n" not in str(caught.value)


def test_another_prompt_is_another_run(model: dl.Model, run: dl.Run) -> None:
    with pytest.raises(dl.StoreError, match="prompt was"):
        dl.run(model, out=run.folder, resume=True, **(SMALL | {"prompt": PROMPT + " And more."}))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium")
def test_the_report_opens_on_the_prompt_with_its_last_token_chosen(run: dl.Run) -> None:
    with chromium() as browser, opened(browser, run.folder / "report.html") as (page, record):
        top = page.eval_on_selector("#tokens", "node => node.getBoundingClientRect().top")
        assert 0 < top < 900
        assert page.inner_text("#text .intro").startswith("Every token of the prompt")
        tokens = run.tokens(layer=1, map="mean")
        assert page.locator("#tokens .token").count() == len(tokens)
        assert page.get_attribute("#tokens .token.chosen", "data-slot") == str(len(tokens) - 1)
        assert record.console == []

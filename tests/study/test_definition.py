"""A study as data: what the shipped files say, and what is refused before anything runs."""

from pathlib import Path

import pytest

from deltalens.errors import InputError
from deltalens.study.definition import PAPER, SMALL, StudyDefinition, read_definition
from deltalens.study.forecast import forecast
from deltalens.study.members import over_revisions, over_seeds

BASIC = {"title": "t", "shared": {"tokens": 256}, "entries": [{"run": {"model": "tiny-gpt2"}}]}


def written(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf8")
    return path


def test_the_papers_study_has_its_eight_models_in_single_precision() -> None:
    members = read_definition(PAPER).members()
    assert [m.name for m in members] == [
        "distilgpt2", "pythia-70m", "pythia-160m", "pythia-410m", "pythia-1b", "pythia-1.4b", "mamba-130m",
        "mamba-370m",
    ]  # fmt: skip
    assert {m.spec.dtype for m in members} == {"float32"}
    assert all("/" in m.spec.model and m.blocks and m.megabytes for m in members)


@pytest.mark.parametrize("path", [PAPER, SMALL])
def test_shipped_studies_can_answer_every_claim(path: Path) -> None:
    for member in read_definition(path).members():
        assert {"diagonal", "low_rank:8", "mlp:32"} <= set(member.spec.maps)
        assert member.spec.protocol == ("held_out", "leave_one_out", "in_sample")
        assert member.spec.controls


def test_the_small_study_needs_no_hub() -> None:
    plan = forecast(read_definition(SMALL).members())
    assert {row.source for row in plan} == {"built in", "package index"}
    assert {row.name: row.units for row in plan} == {
        "tiny-gpt2": 72, "tiny-neox": 72, "tiny-mamba": 72, "smollm2-135m": 90,
    }  # fmt: skip
    smollm = read_definition(SMALL).members()[-1].spec
    assert (smollm.tokens or 0) // (smollm.window or 1) >= 8  # fewer windows have no intervals


def test_what_a_plan_cannot_know_is_left_open() -> None:
    definition = StudyDefinition.model_validate(BASIC).only(["nowhere/none"])
    row = forecast(definition.members())[0]
    assert (row.source, row.here, row.layers, row.units, row.megabytes) == ("Hub", False, None, None, None)


def test_entries_win_over_shared_fields_and_models_take_them_too() -> None:
    definition = StudyDefinition.model_validate(
        BASIC | {"entries": [{"name": "mine", "run": {"model": "tiny-gpt2", "tokens": 512}}]}
    )
    assert [m.spec.tokens for m in definition.members()] == [512]
    chosen = definition.only(["mine", "tiny-gpt2", "tiny-neox"]).members()
    assert [(m.name, m.spec.model, m.spec.tokens) for m in chosen] == [
        ("mine", "tiny-gpt2", 512), ("mine-2", "tiny-gpt2", 512), ("tiny-neox", "tiny-neox", 256),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no fields"),
        ("- 1", "holds no fields"),
        ("title: [", "can't be read"),
        ("title: t", "entries: field required"),
        ("title: t\nentries: []", "entries"),
        ("title: t\nmodels: [a]\nentries: [{run: {model: a}}]", "'models' is no field of a study"),
        ("title: t\nentries: [{run: {model: a}, layers: 3}]", "'entries.0.layers' is no field"),
        ("title: t\nentries: [{name: a}]", "entries.0.run: field required"),
        ("title: t\nentries: [{name: a, run: {}}]", "entry a of the study names no model"),
        ("title: t\nentries: [{run: {model: a, layer: 3}}]", "entry a of the study: 'layer' is no field of a run"),
        ("title: t\nshared: {ridge: 0}\nentries: [{run: {model: a}}]", "ridge"),
        ("title: t\nentries: [{name: ../up, run: {model: a}}]", "named '../up'"),
        ("title: t\nentries: [{name: claims, run: {model: a}}]", "named 'claims'"),
        ("title: t\nentries: [{name: A, run: {model: a}}, {name: a, run: {model: b}}]", "two runs"),
    ],
)
def test_what_is_no_study_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        read_definition(written(tmp_path, text)).members()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_definition(tmp_path / "none.yaml")


def test_every_run_comes_once_per_seed() -> None:
    members = StudyDefinition.model_validate(BASIC).members()
    assert [(m.name, m.group, m.spec.seed) for m in over_seeds(members, [3, 5])] == [
        ("tiny-gpt2-seed-3", "tiny-gpt2", 3), ("tiny-gpt2-seed-5", "tiny-gpt2", 5),
    ]  # fmt: skip
    assert [m.name for m in over_seeds(members, [3])] == ["tiny-gpt2"]
    for bad in ([], [1, 1], [-1]):
        with pytest.raises(InputError):
            over_seeds(members, bad)


def test_revisions_become_names_of_their_own() -> None:
    spec = StudyDefinition.model_validate(BASIC).members()[0].spec
    members = over_revisions(spec, ["step0", "refs/pr/1", "other/1"])
    assert [(m.name, m.spec.revision) for m in members] == [
        ("step0", "step0"), ("1", "refs/pr/1"), ("1-2", "other/1"),
    ]  # fmt: skip

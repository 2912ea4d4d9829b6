"""Whatever is typed, written in a spec, put in a corpus or found in a run folder: an answer or a one-line error."""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltalens import cli
from deltalens.errors import DeltalensError
from deltalens.experiment.documents import read_paths
from deltalens.experiment.spec import RunSpec, select_layers
from deltalens.experiment.store import StoredRun

FIELDS = sorted(RunSpec.model_fields)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["linear", "0:2", "held_out"]),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
)
specs = st.dictionaries(st.sampled_from([*FIELDS, "unknown"]), values, max_size=5)


def require_one_line(error: BaseException) -> None:
    text = str(error)
    assert text
    assert "\n" not in text
    assert len(text) < 2000


@given(specs)
@settings(max_examples=300, deadline=None)
def test_any_fields_make_a_spec_or_one_line(fields: dict[str, Any]) -> None:
    try:
        spec = RunSpec.parse(**fields)
    except DeltalensError as error:
        require_one_line(error)
    else:
        assert RunSpec.parse(**spec.model_dump(mode="json")) == spec


@given(st.one_of(specs.map(lambda s: yaml.safe_dump(s).encode()), st.binary(max_size=80)))
@settings(max_examples=200, deadline=None)
def test_any_config_file_makes_a_spec_or_one_line(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_bytes(content)
        try:
            RunSpec.from_yaml(path)
        except DeltalensError as error:
            require_one_line(error)


@given(st.text(max_size=20), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_any_layers_text_names_layers_of_the_model_or_one_line(text: str, n_layers: int) -> None:
    try:
        chosen = select_layers(text, n_layers)
    except DeltalensError as error:
        require_one_line(error)
    else:
        assert chosen
        assert all(0 <= layer < n_layers for layer in chosen)


@given(st.binary(max_size=200), st.sampled_from([".txt", ".jsonl"]))
@settings(max_examples=200, deadline=None)
def test_any_file_is_text_or_one_line(content: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{suffix}"
        path.write_bytes(content)
        try:
            documents = read_paths([path])
        except DeltalensError as error:
            require_one_line(error)
        else:
            assert all(document.text.strip() for document in documents.items)
            assert len(documents.hash) == 64


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)
manifests = st.fixed_dictionaries(
    {},
    optional={"schema": st.just(1) | json_values, "status": st.just("complete") | json_values, "tables": json_values},
)


@given(st.one_of(manifests.map(lambda m: json.dumps(m).encode()), st.binary(max_size=60)), st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_run_folder_is_a_run_or_one_line(manifest: bytes, table: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.json").write_bytes(manifest)
        (folder / "tokens.parquet").write_bytes(table)
        with pytest.raises(DeltalensError) as caught:
            StoredRun(folder).tokens()
        require_one_line(caught.value)


words = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), max_size=8)
flags = st.sampled_from(
    ["--" + name.replace("_", "-") for name in FIELDS] + ["--out", "--config", "--resume", "--json"]
)


@given(st.lists(words | flags, max_size=5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_arguments_end_in_an_exit_code_and_at_most_one_line(arguments: list[str]) -> None:
    # Layers that no model has: a well-formed line stops there, before any long work.
    err = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["deltalens", "run", *arguments, "--layers", "9999"])
        with (
            contextlib.redirect_stderr(err),
            contextlib.redirect_stdout(io.StringIO()) as out,
            pytest.raises(SystemExit) as caught,
        ):
            cli.main()
        assert not list(Path(folder).rglob("*"))
    helped = "Usage" in out.getvalue()
    assert caught.value.code in ({0} if helped else {1, 2})
    assert helped or err.getvalue().count("\n") == 1

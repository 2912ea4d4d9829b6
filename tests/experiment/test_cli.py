"""The command line: what can't work ends in one line and the right exit code, before anything is written."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deltalens import cli
from deltalens.experiment.spec import RunSpec

SMALL = ["--tokens", "128", "--pool-tokens", "256", "--neighbors", "16", "--layers", "2", "--maps", "diagonal"]


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["deltalens", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    code = caught.value.code
    return (code if isinstance(code, int) else 0), out, err


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: call(monkeypatch, capsys, *arguments)


def test_help_waits_for_no_library_that_only_measuring_needs() -> None:
    heavy = ("transformers", "pandas", "matplotlib", "plotly", "ray")
    asked = f"import sys, deltalens.cli; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "short.txt").write_text("Only a few words.")
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin1"))
    (tmp_path / "no_config").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--text", "short.txt"], 1, "too short"),
        (["--text", "empty.txt"], 1, "empty"),
        (["--text", "latin.txt"], 1, "UTF-8"),
        (["--text", "missing.txt"], 1, "does not exist"),
        (["--tokens", "100000000"], 1, "--tokens"),
        (["--pool-tokens", "100000000"], 1, "--pool-tokens"),
        (["--neighbors", "5000"], 1, "raise pool_tokens"),
        (["--maps", "cubic"], 2, "cubic"),
        (["--maps", "low_rank:0"], 2, "low_rank"),
        (["--maps", "low_rank:100"], 2, "100"),
        (["--maps", "low_rank:200", "--fit", "global"], 2, "200"),
        (["--maps", "low_rank:100", "--fit", "global", "--pool-tokens", "64"], 1, "largest rank"),
        (["--layers", "6"], 2, "layers 0 to 5"),
        (["--layers", "0:7"], 2, "layers 0 to 5"),
        (["--ridge", "0"], 2, "ridge"),
        (["--ridge", "x"], 2, "ridge"),
        (["--nonsense", "1"], 2, "--nonsense"),
        (["--window", "100000"], 2, "window"),
        (["--protocol", "leave_one_out", "--fit", "global"], 2, "leave_one_out"),
        (["--resume"], 2, "--out"),
        (["x" * 300], 1, "x" * 40),
        (["--out", "x" * 300], 1, "too long"),
        (["--text", "x" * 300], 1, "too long"),
        (["--ridge", "1e300"], 2, "ridge"),
        (["--skip-first", "128"], 2, "lower skip_first"),
        (["--neighbors", "600", "--tokens", "256"], 1, "pool of in_sample"),
        (["no_config"], 1, "no_config"),
        (["/no/such/folder"], 1, "/no/such/folder"),
        (["--device", "nowhere"], 2, "nowhere"),
        (["--config", "missing.yaml"], 2, "missing.yaml"),
        (["--dataset", "x", "--text", "short.txt"], 2, "one of them"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_is_written(run_cli, texts, arguments, code, says) -> None:
    before = sorted(texts.rglob("*"))
    found, out, err = run_cli("run", *arguments)
    assert (found, out) == (code, "")
    assert says in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sorted(texts.rglob("*")) == before


def test_a_folder_without_write_permission_is_one_line(run_cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, _, err = run_cli("run", *SMALL, "--quiet", "--out", "file/run")
    assert code == 1
    assert err.count("\n") == 1


def test_every_field_of_the_spec_is_a_flag_and_every_flag_a_field(run_cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    code, out, _ = run_cli("run", "--help")
    assert code == 0
    flags = {word.split("/")[0] for word in re.findall(r"--[a-z][a-z-/]*", out)}
    fields = {"--" + name.replace("_", "-") for name in RunSpec.model_fields if name != "model"}
    assert fields <= flags
    assert {flag for flag in flags - fields if not flag.startswith("--no-")} == {
        "--config", "--out", "--resume", "--quiet", "--json", "--help",
    }  # fmt: skip


def test_a_run_prints_its_report_and_refuses_the_folder_the_second_time(run_cli, tmp_path: Path) -> None:
    code, out, _ = run_cli("run", *SMALL, "--out", "a")
    assert code == 0
    assert (tmp_path / "a" / "report.html").exists()
    assert "a/report.html" in out
    assert max(len(line) for line in out.splitlines()) <= 80
    code, _, err = run_cli("run", *SMALL, "--out", "a")
    assert code == 1
    assert "--resume" in err
    code, out, _ = run_cli("run", "--resume", "--out", "a", "--quiet")
    assert code == 0
    code, _, err = run_cli("run", *SMALL[:-1], "mean", "--quiet", "--out", "a", "--resume")
    assert code == 1
    assert "maps was" in err


def test_json_output_is_one_object_and_nothing_else(run_cli) -> None:
    code, out, err = run_cli("run", *SMALL, "--json", "--out", "b")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert [row["layer"] for row in answer["summary"]] == [2, 2]


def test_report_claims_and_compare_read_a_run(run_cli, tmp_path: Path) -> None:
    assert run_cli("run", *SMALL, "--quiet", "--out", "c")[0] == 0
    assert run_cli("run", *SMALL, "--quiet", "--seed", "1", "--out", "d")[0] == 0
    assert run_cli("report", "c", "--out", "r.html", "--figures", "figures")[0] == 0
    assert list((tmp_path / "figures").glob("*.pdf"))
    code, out, _ = run_cli("claims", "c", "--json")
    assert code == 0
    claims = json.loads(out)
    assert [set(claim) for claim in claims] == [{"id", "title", "verdict", "evidence", "rule"}] * 9
    assert run_cli("compare", "c", "d", "--out", "compare.html")[0] == 0
    assert run_cli("compare", "c")[0] == 2


@pytest.mark.parametrize("command", ["report", "claims"])
def test_a_folder_that_is_no_run_is_one_line(run_cli, command: str) -> None:
    code, _, err = run_cli(command, "nowhere")
    assert code == 1
    assert err.count("\n") == 1


def test_models_lists_the_built_in_ones(run_cli) -> None:
    code, out, _ = run_cli("models")
    assert code == 0
    for name in ("tiny-gpt2", "tiny-neox", "tiny-mamba", "smollm2-135m"):
        assert name in out


def test_importing_the_package_brings_neither_transformers_nor_matplotlib() -> None:
    program = "import sys, deltalens; print(sorted({'transformers', 'matplotlib', 'torch'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

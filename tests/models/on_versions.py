"""The models matrix on the oldest and the newest transformers that ``pyproject.toml`` allows, each built afresh.

Each version gets a fresh virtual environment with the package, its test tools and the versions of ``constraints.txt``,
less the pins that belong to transformers itself. ``--record`` first writes what is found into ``verified.json`` and
``docs/architectures.md``. Needs nothing but Python >= 3.11 and a package index.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Each version of transformers asks for its own range of these.
_FOLLOW_TRANSFORMERS = ("transformers", "tokenizers", "huggingface-hub")


def allowed_range() -> str:
    """What ``pyproject.toml`` says of transformers, such as ``>=5.9,<6``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
    return next(
        line.removeprefix("transformers") for line in project["dependencies"] if line.startswith("transformers")
    )


def requirement(which: str) -> str:
    """What to ask pip for: the lower end of the range, or the newest in it."""
    allowed = allowed_range()
    if which == "newest":
        return f"transformers{allowed}"
    lowest = re.match(r">=([\d.]+)", allowed)
    if lowest is None:
        raise SystemExit(f"pyproject.toml gives no lowest transformers: {allowed}")
    return f"transformers=={lowest[1]}"


def relaxed_constraints() -> str:
    """``constraints.txt`` without the pins that follow transformers."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf8").splitlines()
    return "\n".join(line for line in lines if line.split("==")[0] not in _FOLLOW_TRANSFORMERS) + "\n"


def build(folder: Path, which: str) -> Path:
    """Make the environment and return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    constraints = folder / "constraints.txt"
    constraints.write_text(relaxed_constraints(), encoding="utf8")
    wanted = ["-e", f"{ROOT}[test]", requirement(which)]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--constraint", constraints, *wanted], check=True)
    return python


def check(which: str, folder: Path, *, record: bool) -> bool:
    """Build, say which version it is, and run the matrix in it."""
    python = build(folder, which)
    print(f"{which}: transformers", end=" ", flush=True)
    subprocess.run([python, "-c", "import transformers; print(transformers.__version__)"], check=True)
    if record:
        subprocess.run([python, "tests/models/coverage_table.py"], cwd=ROOT, check=True)
    tests = [python, "-m", "pytest", "tests/models", "src/deltalens/models", "-p", "no:cacheprovider"]
    return subprocess.run(tests, cwd=ROOT, check=False).returncode == 0


def main() -> None:
    """Check what was asked for; exit with 1 if anything fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="?", choices=("oldest", "newest"), help="default: both, one after the other")
    parser.add_argument("--record", action="store_true", help="write the findings into verified.json and docs")
    parser.add_argument("--folder", type=Path, help="where the environments are made and kept; default: temporary")
    asked = parser.parse_args()
    which = [asked.which] if asked.which else ["oldest", "newest"]
    with tempfile.TemporaryDirectory(prefix="deltalens-") as scratch:
        home = asked.folder or Path(scratch)
        held = {name: check(name, home / name, record=asked.record) for name in which}
    for name, holds in held.items():
        print(f"{name}: {'holds' if holds else 'FAILS'}")
    sys.exit(0 if all(held.values()) else 1)


if __name__ == "__main__":
    main()

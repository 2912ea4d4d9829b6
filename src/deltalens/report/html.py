"""One run as one HTML file that needs no network: claims, profiles, the text, distributions, tables, provenance."""

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from deltalens.errors import StoreError
from deltalens.report.claims import SHARED_RULE, claims_for
from deltalens.report.encode import script_json
from deltalens.report.payload import page_payload
from deltalens.report.points import at_point
from deltalens.report.protocol import RunLike, run_name
from deltalens.report.provenance import headline_facts, page_warnings, provenance_blocks
from deltalens.report.sweep_section import sweep_section

MARKS = {"supported": "✓", "partly": "◐", "not supported": "✕", "not measured": "–"}
SCRIPTS = (
    "base", "state", "scales", "model", "tip", "visible", "profiles", "text", "story", "ridges", "scatter", "table",
    "main",
)  # fmt: skip
CONSTRUCTION = (
    "What holds by construction: least squares makes in-sample residuals orthogonal to what was fitted, "
    "and in high dimension any unrelated vector lies near 90° from a given one. Broad angles and low "
    "projections are what nothing at all would give; the distance from chance and null, held out, is the "
    "evidence. Likewise any larger perturbation gives a larger KL, so a correlation of error with KL is "
    "read against a random vector of the same size."
)


@cache
def environment() -> Environment:
    """The templates, with every inserted value escaped and a missing one an error."""
    return Environment(
        loader=PackageLoader("deltalens.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )


def package_version() -> str:
    """The installed version of deltalens, for the page's foot."""
    try:
        return version("deltalens")
    except PackageNotFoundError:
        return "(not installed)"


def template_text(name: str) -> str:
    """A file of the templates folder."""
    return (files("deltalens.report") / "templates" / name).read_text(encoding="utf-8")


def joined_script(names: tuple[str, ...] = SCRIPTS) -> str:
    """The page's scripts as one closed function."""
    parts = [template_text(f"js/{name}.js") for name in names]
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "})();"


def content_hash(script: str) -> str:
    """The hash by which the page's security policy lets this one script run."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")


def token_note(sample: dict[str, Any], manifest: dict[str, Any]) -> str:
    """What part of the per-token tables the page carries, and what the run itself only sampled."""
    text = f"{sample['tokens']:,} of {sample['of']:,} tokens are shown"
    if sample["columns"] < sample["ofColumns"]:
        text += f", with {sample['columns']} of {sample['ofColumns']} columns of measure and protocol"
    sampled = ((manifest.get("interventions") or {}).get("single") or {}).get("sampled")
    if sampled:
        text += f"; single-position KL was measured at {sampled:,} sampled positions"
    return text + ". Values on this page have three digits; the run folder has them all."


def render(whole: RunLike, point: Mapping[str, object] | None = None) -> str:
    """The page of a run as text; of a sweep, one point."""
    run = at_point(whole, point)
    light, heavy = page_payload(run)
    script = joined_script()
    claims = claims_for([run])
    manifest = run.manifest
    evaluation = (manifest.get("corpus") or {}).get("evaluation") or {}
    documents = int(evaluation.get("documents") or 0)
    note = token_note(heavy["sample"], manifest)
    page = environment().get_template("report.html.j2")
    return page.render(
        name=run_name(run),
        version=package_version(),
        facts=headline_facts(manifest),
        warnings=page_warnings(manifest),
        claims=claims,
        tally=[(verdict, n) for verdict in MARKS if (n := sum(c.verdict == verdict for c in claims))],
        shared_rule=SHARED_RULE,
        marks=MARKS,
        construction=CONSTRUCTION,
        clusters="documents" if documents >= 8 else "windows",
        prompt=bool((manifest.get("spec") or {}).get("prompt")),
        token_note=note,
        sample_note=note,
        python_open=f'dl.open("{run.folder}")',
        command=manifest.get("command") or "No command line repeats this run: its text was given in Python.",
        sweep=sweep_section(whole),
        checks=manifest.get("checks") or [],
        provenance=provenance_blocks(manifest),
        css=Markup(template_text("page.css")),  # our own file, holding no data
        script=Markup(script),
        script_hash=content_hash(script),
        page_json=Markup(script_json(light)),  # escaped for script context by script_json
        token_json=Markup(script_json(heavy)),
    )


def write_report(run: RunLike, path: str | Path, point: Mapping[str, object] | None = None) -> Path:
    """Writes a run's page to `path`: one file, no network, light and dark.

    Args:
        run: a finished run.
        path: where the page goes; its folder must exist.
        point: the point of a sweep that is shown; what isn't named is at its first value.

    Returns:
        The path written.

    Raises:
        StoreError: the run has no rows, or the file can't be written.
    """
    target = Path(path)
    if run.summary().empty:
        raise StoreError(f"{run.folder}: the run has no finished unit to report; finish it with --resume")
    text = render(run, point)
    try:
        target.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise StoreError(f"{target}: the report can't be written ({error.strerror}); choose another path") from error
    return target

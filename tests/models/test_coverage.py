"""The documented table is the matrix's own finding, and what is listed in the terminal comes from the same file."""

import io
import json
from typing import Any

import pytest
import transformers
from coverage_table import DOCUMENT, VERIFIED, document, measure
from rich.console import Console
from tiny_models import FAMILIES

from deltalens.models import ARCHITECTURES, models_table, verifications


@pytest.fixture(scope="module")
def findings() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(VERIFIED.read_text(encoding="utf8"))
    return found


def test_document_is_made_from_the_findings(findings: dict[str, list[dict[str, Any]]]) -> None:
    assert DOCUMENT.read_text(encoding="utf8") == document(findings)


def test_findings_cover_every_family_and_every_row(findings: dict[str, list[dict[str, Any]]]) -> None:
    for rows in findings.values():
        assert [row["family"] for row in rows] == [family.title for family in FAMILIES.values()]
    listed = {family.model_type for family in FAMILIES.values()}
    assert listed == {row.model_type for row in ARCHITECTURES.values() if not row.refused}


def test_findings_hold_on_at_least_two_versions(findings: dict[str, list[dict[str, Any]]]) -> None:
    assert len(findings) >= 2
    assert all(row["holds"] for rows in findings.values() for row in rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_finding_is_what_is_measured_here(name: str, findings: dict[str, list[dict[str, Any]]]) -> None:
    installed = findings.get(transformers.__version__)
    if installed is None:
        pytest.skip(f"no findings for transformers {transformers.__version__}; run tests/models/coverage_table.py")
    written = next(row for row in installed if row["family"] == FAMILIES[name].title)
    now = measure(name)
    assert {**now, "parity": None} == {**written, "parity": None}


def test_listing_fits_a_terminal_and_names_versions() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(models_table())
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for name in ("tiny-gpt2", "smollm2-135m", "rwkv", "gemma3n"):
        assert name in text
    assert {v.model_type for v in verifications()} <= set(ARCHITECTURES)

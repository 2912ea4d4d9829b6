"""Write the coverage table from the matrix itself: ``python tests/models/coverage_table.py``.

Every family of ``tiny_models.py`` goes through the doctor on the transformers that is installed. The findings are
merged into ``src/deltalens/models/verified.json`` under that version, and ``docs/architectures.md`` is made from the
whole file; run it once in each environment that should be listed.
"""

import json
from pathlib import Path
from typing import Any

import transformers
from tiny_models import FAMILIES, tiny_model

from deltalens.models import ARCHITECTURES, choose_scheme, doctor, load

ROOT = Path(__file__).resolve().parents[2]
VERIFIED = ROOT / "src" / "deltalens" / "models" / "verified.json"
DOCUMENT = ROOT / "docs" / "architectures.md"

_HEAD = """# Architectures

Made by `python tests/models/coverage_table.py` from the test matrix; don't edit by hand.

Each family is a tiny random model built from its config (4 blocks, width 32, windows of 24 tokens, weights large enough
for attention to matter). It goes through `deltalens doctor`: the chain of blocks, identity patch, patch locality, right
padding, batch sizes, cache, restoration and the rest. *Parity* is the largest difference of a logit between the fast
single-position intervention and patch-and-rerun, in float32, as a share of the logits' range.

A type without a row is found by its forward pass, and accepted if every check that a run needs holds. The matrix also
proves that generic discovery finds the same blocks as each row.
"""

_NAMES = {"attention": "attention", "sliding_attention": "sliding attention", "mlp": "MLP", "mamba2": "Mamba 2",
          "mamba": "Mamba", "rwkv": "RWKV", "recurrent": "RG-LRU", "hybrid": "hybrid"}  # fmt: skip


def measure(name: str) -> dict[str, Any]:
    """What the doctor finds about one family."""
    model = load(tiny_model(name))
    found = doctor(model)
    parity = found["fast interventions"].value
    return {
        "family": FAMILIES[name].title,
        "model_type": FAMILIES[name].model_type,
        "holds": found.holds,
        "scheme": choose_scheme(model) if found["fast interventions"].holds else "rerun",
        "parity": parity if parity == parity else None,
        "kinds": ", ".join(dict.fromkeys(_NAMES[kind] for kind in model.block_kinds)),
        "advice": [check.name for check in found.checks if not check.needed and not check.holds],
    }


def table(version: str, rows: list[dict[str, Any]]) -> str:
    """One Markdown table."""
    lines = [
        f"## On transformers {version}", "",
        "| family | `model_type` | token mixing | a run's checks | single positions | parity | worth knowing |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        parity = "-" if row["parity"] is None else f"{row['parity']:.0e}"
        lines.append(
            f"| {row['family']} | `{row['model_type']}` | {row['kinds']} | {'hold' if row['holds'] else 'FAIL'} "
            f"| `{row['scheme']}` | {parity} | {', '.join(row['advice']) or '-'} |"
        )
    return "\n".join(lines)


def document(findings: dict[str, list[dict[str, Any]]]) -> str:
    """The whole page, newest version first."""
    versions = sorted(findings, key=lambda version: [int(part) for part in version.split(".")[:2]], reverse=True)
    refused = [f"- `{row.model_type}`: {row.refused}." for row in ARCHITECTURES.values() if row.refused]
    parts = [_HEAD, *(table(version, findings[version]) for version in versions), "## Refused", "\n".join(refused)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    """Measure, merge, write."""
    findings = json.loads(VERIFIED.read_text(encoding="utf8"))
    findings[transformers.__version__] = [measure(name) for name in FAMILIES]
    VERIFIED.write_text(json.dumps(findings, indent=1, sort_keys=True) + "\n", encoding="utf8")
    DOCUMENT.write_text(document(findings), encoding="utf8")


if __name__ == "__main__":
    main()

"""Write the coverage table from the matrix itself: ``python tests/models/coverage_table.py``.

Every family of ``tiny_models.py`` goes through the doctor on the transformers that is installed. The findings are
merged into ``src/deltalens/models/verified.json`` under that version, and ``docs/architectures.md`` is made from the
whole file. ``python tests/models/on_versions.py --record`` does it on the oldest and the newest transformers.
"""

import json
from collections.abc import Iterable
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

*Verified on* names the versions of transformers on which everything that a run needs holds. To repeat it on the oldest
and the newest that the package allows, each in a fresh environment of its own:

```
python tests/models/on_versions.py
```

A type without a row is found by its forward pass, and accepted if every check that a run needs holds. The matrix also
proves that generic discovery finds the same blocks as each row, and that a whole `deltalens run` on each family's
folder ends with finite figures on the scheme named here.
"""

_NOTES = """## Worth knowing

A check named in the last column doesn't hold, and a run takes care of it: RecurrentGemma keeps its states on its
modules and returns no cache. On transformers 5.9 the chunked scan of Zamba 2 and Nemotron-H errs slightly from the
second chunk on, in float64 too, so windows longer than `chunk_size` (16 here) differ from the same model's own single
steps; where the difference passes the limit of parity, a run falls back to patch-and-rerun and says so.
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


def table(findings: dict[str, list[dict[str, Any]]]) -> str:
    """One Markdown table: a line per family, a column of parity per version, newest first."""
    versions = _newest_first(findings)
    parity = "".join(f" parity on {version} |" for version in versions)
    lines = [
        f"| family | `model_type` | token mixing | verified on | single positions |{parity} worth knowing |",
        "|---" * (6 + len(versions)) + "|",
    ]
    for family in zip(*(findings[version] for version in versions), strict=True):
        found = dict(zip(versions, family, strict=True))
        first = family[0]
        verified = ", ".join(version for version, row in found.items() if row["holds"]) or "-"
        figures = "".join(f" {_figure(row['parity'])} |" for row in family)
        lines.append(
            f"| {first['family']} | `{first['model_type']}` | {first['kinds']} | {verified} | {_schemes(found)} "
            f"|{figures} {_advice(found)} |"
        )
    return "\n".join(lines)


def _newest_first(versions: Iterable[str]) -> list[str]:
    return sorted(versions, key=lambda version: [int(part) for part in version.split(".")[:2]], reverse=True)


def _figure(parity: float | None) -> str:
    return "-" if parity is None else f"{parity:.0e}"


def _schemes(found: dict[str, dict[str, Any]]) -> str:
    """The scheme, with versions where they differ."""
    schemes = dict.fromkeys(row["scheme"] for row in found.values())
    if len(schemes) == 1:
        return f"`{next(iter(schemes))}`"
    return ", ".join(f"`{row['scheme']}` on {version}" for version, row in found.items())


def _advice(found: dict[str, dict[str, Any]]) -> str:
    """What doesn't hold of the checks that a run can do without, with the versions where that isn't all of them."""
    names = dict.fromkeys(name for row in found.values() for name in row["advice"])
    where = {name: [version for version, row in found.items() if name in row["advice"]] for name in names}
    parts = [name if len(on) == len(found) else f"{name} on {', '.join(on)}" for name, on in where.items()]
    return "; ".join(parts) or "-"


def document(findings: dict[str, list[dict[str, Any]]]) -> str:
    """The whole page."""
    refused = [f"- `{row.model_type}`: {row.refused}." for row in ARCHITECTURES.values() if row.refused]
    parts = [_HEAD, table(findings), _NOTES, "## Refused", "\n".join(refused)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    """Measure, merge, write."""
    findings = json.loads(VERIFIED.read_text(encoding="utf8"))
    findings[transformers.__version__] = [measure(name) for name in FAMILIES]
    VERIFIED.write_text(json.dumps(findings, indent=1, sort_keys=True) + "\n", encoding="utf8")
    DOCUMENT.write_text(document(findings), encoding="utf8")


if __name__ == "__main__":
    main()

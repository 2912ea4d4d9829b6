"""The small trained models that come with the package, and their cards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

BUILTIN_FOLDER = Path(__file__).parent / "builtin"
TOKENIZER_FOLDER = BUILTIN_FOLDER / "tokenizer"


def builtin_models() -> Mapping[str, Mapping[str, object]]:
    """Return the measured card of every built-in model by name.

    Returns:
        Name -> the fields of its `card.json`: parameters, bytes, steps, seed and the cross-entropies in nats per token.

    Example:
        >>> "tiny-gpt2" in builtin_models()
        True
    """
    folders = sorted(path.parent for path in BUILTIN_FOLDER.glob("*/config.json"))
    return {folder.name: _card(folder) for folder in folders}


def _card(folder: Path) -> Mapping[str, object]:
    path = folder / "card.json"
    if not path.is_file():
        return {}
    card: dict[str, object] = json.loads(path.read_text(encoding="utf8"))
    return card

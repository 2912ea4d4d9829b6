"""The built-in text: help topics that come with every CPython and that the built-in models have never seen."""

from pydoc_data.topics import topics

#: Topics held out from the training of the built-in models. None shares a paragraph of length with another one.
HELD_OUT_TOPICS: tuple[str, ...] = (
    "assignment", "binary", "booleans", "calls", "comparisons", "conversions", "debugger", "exprlists",
    "formatstrings", "global", "identifiers", "import", "integers", "objects", "operator-summary", "power", "raise",
    "slicings", "string-methods", "strings", "subscriptions", "types", "typesmapping", "typesmethods", "unary", "yield",
)  # fmt: skip


def builtin_topics() -> dict[str, str]:
    """The held-out topics of this CPython by name, one document each; their wording differs between versions.

    A run records the hash of what it read, so that two Python versions are never compared unnoticed.
    """
    return {name: topics[name] for name in HELD_OUT_TOPICS if name in topics}


def builtin_documents() -> list[str]:
    """The texts of `builtin_topics`, in order."""
    return list(builtin_topics().values())

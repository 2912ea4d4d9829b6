"""What the studies beside a run take: their defaults, the fields of a run that they decide, and those without meaning.

The command line reads this for its options, so nothing here loads a model library.
"""

from collections.abc import Mapping
from typing import Any

from deltalens.errors import InputError

DEFAULT_GLOBAL_MAP, DEFAULT_LOCAL_MAP = "linear", "low_rank:8"

#: What a look inside the residual measures unless told otherwise, and tokens at which local maps are compared.
INSIDE: dict[str, object] = {"maps": ("affine", "low_rank:8"), "protocol": ("held_out",)}
JACOBIAN_TOKENS = 16

#: What effects on later tokens are measured of unless told otherwise; each map costs as much as the first.
LATER: dict[str, object] = {"maps": ("low_rank:8",), "protocol": ("held_out",)}
POSITIONS = 64

_RANKED: dict[str, Any] = {"fit": "local", "protocol": ("held_out",), "scope": ("all",), "controls": False}
#: One map for all tokens, fitted on text that it isn't judged on.
_REPLACED: dict[str, Any] = {"fit": "global", "protocol": ("held_out",), "scope": (), "controls": False}

#: Fields of a run that have no meaning for a ranking.
NOT_RANKED = frozenset(
    {"maps", "exclude_window", "subspace", "null_tokens", "covariance", "dose", "divergence", "error", "sample",
     "keep_states", *_RANKED}
)  # fmt: skip

#: Fields of a run that measure what a replacement doesn't.
NOT_REPLACED = frozenset(
    {"neighbors", "metric", "distinct", "exclude_window", "subspace", "null_tokens", "covariance", "dose",
     "divergence", "error", "sample", "keep_states", *_REPLACED}
)  # fmt: skip


def ranking_fields(fields: Mapping[str, object], local_map: str) -> dict[str, object]:
    """The fields of a run that ranks layers, from what was given of them.

    Raises:
        InputError: a field has no meaning here.
    """
    given = sorted(NOT_RANKED & set(fields))
    if given:
        more = " (give global_map or local_map)" if given[0] == "maps" else ""
        raise InputError(f"{given[0]} has no meaning for a ranking{more}; drop it")
    return {**fields, **_RANKED, "maps": (local_map,)}


def replacement_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """The fields of a run that fits replacements, from what was given of them.

    Raises:
        InputError: a field has no meaning here.
    """
    given = sorted(NOT_REPLACED & set(fields))
    if given:
        raise InputError(f"{given[0]} has no meaning for replacements, which are global and held out; drop it")
    return {**fields, **_REPLACED}

"""The tokenwise maps: one file each, the protocol they share, and their registry."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from deltalens.core.maps.affine import Affine
from deltalens.core.maps.diagonal import Diagonal
from deltalens.core.maps.global_map import GlobalMap
from deltalens.core.maps.identity import Identity
from deltalens.core.maps.isolated import Isolated
from deltalens.core.maps.linear import Linear
from deltalens.core.maps.low_rank import LowRank
from deltalens.core.maps.mean import Mean
from deltalens.core.maps.mlp import Mlp
from deltalens.core.maps.orthogonal import Orthogonal
from deltalens.core.maps.protocol import FitProblem, MapFit, Table, TokenwiseMap
from deltalens.core.maps.scalar import Scalar
from deltalens.errors import InputError

MAPS: Mapping[str, str] = MappingProxyType(
    {
        "identity": "T(x) = x, the layer is skipped",
        "mean": "T(x) = x + the mean update",
        "scalar": "T(x) = a x",
        "diagonal": "T(x) = a ⊙ x with a >= 0",
        "linear": "T(x) = x + B x, ridge",
        "affine": "T(x) = x + mean update + B (x - mean), ridge",
        "low_rank:r": "T(x) = x + B x with rank B <= r (8), reduced-rank ridge",
        "orthogonal": "T(x) = Q x, a rotation",
        "orthogonal:scaled": "T(x) = s Q x, a rotation and one factor",
        "mlp:h": "T(x) = x + mean update + a network of h (32) hidden units",
        "isolated": "the layer run on the token alone, without context",
    }
)
"""Every map's form and one line on what it is."""

RIDGE_FREE = frozenset({"identity", "mean", "isolated"})
"""Maps that no ridge changes."""

_PLAIN: Mapping[str, TokenwiseMap] = MappingProxyType(
    {
        "identity": Identity(),
        "mean": Mean(),
        "scalar": Scalar(),
        "diagonal": Diagonal(),
        "linear": Linear(),
        "affine": Affine(),
        "low_rank": LowRank(),
        "orthogonal": Orthogonal(),
        "orthogonal:scaled": Orthogonal(scaled=True),
        "mlp": Mlp(),
        "isolated": Isolated(),
    }
)


def parse_map(text: str) -> TokenwiseMap:
    """The map that a string names; its ``name`` is the canonical string.

    Args:
        text: A key of ``MAPS``, with a positive whole number in place of r or h (or without it, for the default).

    Returns:
        The map.

    Raises:
        InputError: The string names no map, or its number isn't positive.

    Source:
        Section 3 of arXiv 2604.02459 names the diagonal, low-rank, orthogonal and network classes.

    Example:
        >>> parse_map("low_rank").name
        'low_rank:8'
    """
    asked = text.strip()
    if asked in _PLAIN:
        return _PLAIN[asked]
    sized = re.fullmatch(r"(low_rank|mlp):(\d{1,6})", asked)
    if sized is None:
        raise InputError(f"the map {text!r} is unknown; use one of {', '.join(MAPS)}")
    size = int(sized[2])
    if size < 1:
        raise InputError(f"the map {text!r} has size 0; give at least 1, as in '{sized[1]}:8'")
    return LowRank(size) if sized[1] == "low_rank" else Mlp(size)


__all__ = [
    "MAPS",
    "RIDGE_FREE",
    "Affine",
    "Diagonal",
    "FitProblem",
    "GlobalMap",
    "Identity",
    "Isolated",
    "Linear",
    "LowRank",
    "MapFit",
    "Mean",
    "Mlp",
    "Orthogonal",
    "Scalar",
    "Table",
    "TokenwiseMap",
    "parse_map",
]

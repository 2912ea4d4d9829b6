"""The form of every map that can be kept: its parameters' class, names and shapes, and its formula."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from deltalens.core.maps.global_map import (
    CenteredMatrix,
    CenteredNetwork,
    Factored,
    Factors,
    GlobalMap,
    Matrix,
    Shift,
    Still,
)
from deltalens.errors import InputError


@dataclass(frozen=True)
class Form:
    """What a kept map consists of.

    Attributes:
        kind: class of its parameters.
        shapes: each parameter's axes: ``d`` the width, ``r`` and ``h`` the map's own number, ``1``, and ``q``, any
            number up to the width.
        formula: T in terms of the parameters' names.
    """

    kind: type[GlobalMap]
    shapes: Mapping[str, str]
    formula: str


_NETWORK = {
    "axes": "q d", "center": "d", "shift": "d", "first": "h q", "first_bias": "h", "second": "d h", "second_bias": "d",
    "scale": "1",
}  # fmt: skip

FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "identity": Form(Still, {}, "T(x) = x"),
        "mean": Form(Shift, {"shift": "d"}, "T(x) = x + shift"),
        "scalar": Form(Factors, {"excess": "1"}, "T(x) = x + excess x"),
        "diagonal": Form(Factors, {"excess": "d"}, "T(x) = x + excess * x"),
        "linear": Form(Matrix, {"matrix": "d d"}, "T(x) = x + matrix x"),
        "affine": Form(
            CenteredMatrix,
            {"matrix": "d d", "center": "d", "shift": "d"},
            "T(x) = x + shift + matrix (x - center)",
        ),
        "low_rank": Form(Factored, {"left": "d r", "right": "r d"}, "T(x) = x + left right x"),
        "orthogonal": Form(Matrix, {"matrix": "d d"}, "T(x) = x + matrix x"),
        "orthogonal:scaled": Form(Matrix, {"matrix": "d d"}, "T(x) = x + matrix x"),
        "mlp": Form(
            CenteredNetwork,
            _NETWORK,
            "T(x) = x + shift + scale (second gelu(first axes (x - center) + first_bias) + second_bias)",
        ),
    }
)


def form_of(name: str) -> Form:
    """The form of a map by its canonical name.

    Raises:
        InputError: the map has no parameters to keep.

    Example:
        >>> form_of("low_rank:8").formula
        'T(x) = x + left right x'
    """
    form = FORMS.get(name) or FORMS.get(name.partition(":")[0])
    if form is None:
        raise InputError(f"the map '{name}' is the block itself and has no parameters to keep; use another map")
    return form


def rebuild(name: str, tensors: Mapping[str, Tensor], width: int) -> GlobalMap:
    """A kept map from its parameters.

    Args:
        name: the map's canonical name.
        tensors: its parameters by name.
        width: d, the width of states.

    Raises:
        InputError: a parameter is missing, unknown, of another shape or dtype, or not finite.

    Example:
        >>> rebuild("mean", {"shift": torch.ones(2)}, 2).update(torch.zeros(1, 2)).tolist()
        [[1.0, 1.0]]
    """
    form = form_of(name)
    if set(tensors) != set(form.shapes):
        raise InputError(f"the map '{name}' has the parameters {sorted(form.shapes)}, got {sorted(tensors)}")
    sizes = {"d": width, "1": 1, "r": min(_number(name), width), "h": _number(name)}
    for key, axes in form.shapes.items():
        _require_parameter(name, key, tensors[key], axes.split(), sizes)
    return form.kind(**tensors)


def _number(name: str) -> int:
    size = name.partition(":")[2]
    return int(size) if size.isdigit() else 0


def _require_parameter(name: str, key: str, tensor: Tensor, axes: list[str], sizes: dict[str, int]) -> None:
    if tensor.dim() == len(axes) and "q" in axes:
        sizes.setdefault("q", tensor.shape[axes.index("q")])
    expected = tuple(sizes.get(axis, 0) for axis in axes)
    if tuple(tensor.shape) != expected or sizes.get("q", 0) > sizes["d"]:
        raise InputError(f"parameter '{key}' of the map '{name}' has shape {tuple(tensor.shape)}, expected {expected}")
    if tensor.dtype not in (torch.float32, torch.float64) or not bool(torch.isfinite(tensor).all()):
        raise InputError(f"parameter '{key}' of the map '{name}' isn't finite float32 or float64 ({tensor.dtype})")

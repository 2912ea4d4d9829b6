"""Checks of tensors and settings at the door: one line that says what arrived and what to do."""

import torch
from torch import Tensor

from deltalens.errors import InputError


def require_matrix(name: str, value: Tensor, *, width: int | None = None, rows: int | None = None) -> None:
    """Refuse ``value`` unless it is a finite floating matrix of the given width and number of rows."""
    if value.ndim != 2:
        raise InputError(f"{name} must be a matrix of rows (n, d), but its shape is {tuple(value.shape)}")
    if not value.is_floating_point():
        raise InputError(f"{name} must hold floating-point states, but its dtype is {value.dtype}; cast it first")
    if width is not None and value.shape[1] != width:
        raise InputError(f"{name} has width {value.shape[1]}, but {width} was expected; give states of one layer")
    if rows is not None and value.shape[0] != rows:
        raise InputError(f"{name} has {value.shape[0]} rows, but {rows} were expected; give one row per token")
    finite = torch.isfinite(value).all(dim=1)
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0, 0])
        raise InputError(f"{name} holds NaN or infinite values, first in row {first}; drop such rows")


#: Above it a map is the identity (or the mean) to the last digit, and float32 comes near its end.
LARGEST_RIDGE = 1e12


def require_positive(name: str, value: float, meaning: str) -> None:
    """Refuse a setting that must be a finite number above 0."""
    if not 0 < value < float("inf"):
        raise InputError(f"{name} must be a finite number above 0 ({meaning}), but {value} was given")


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in: the widest of the inputs' dtypes, at least float32."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32

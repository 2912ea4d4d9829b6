"""Checks of tensors and settings at the door: one line that says what arrived and what to do."""

from numbers import Integral, Real

import torch
from torch import Tensor

from deltalens.errors import InputError


def require_matrix(name: str, value: Tensor, *, width: int | None = None, rows: int | None = None) -> None:
    """Refuse ``value`` unless it is a finite floating matrix of the given width and number of rows."""
    if value.ndim != 2:
        raise InputError(f"{name} must be a matrix of rows (n, d), but its shape is {tuple(value.shape)}")
    if not value.is_floating_point():
        raise InputError(f"{name} must hold floating-point states, but its dtype is {value.dtype}; cast it first")
    if value.shape[1] == 0:
        raise InputError(f"{name} has width 0; give states of at least one component")
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


def require_some_rows(name: str, value: Tensor) -> None:
    """Refuse a matrix without rows."""
    if value.shape[0] == 0:
        raise InputError(f"{name} has no rows; give at least one token")


def require_whole(name: str, value: object, *, least: int, unit: str = "") -> None:
    """Refuse a setting unless it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number, but {value!r} was given; give an int")
    if int(value) < least:
        raise InputError(f"{name} must be at least {least}{unit}, but {value} was given")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a setting unless it is one of a few words."""
    if not isinstance(value, str) or value not in choices:
        words = [repr(choice) for choice in choices]
        raise InputError(f"{name} {value!r} is unknown; use {', '.join(words[:-1])} or {words[-1]}")


def require_positive(name: str, value: object, meaning: str) -> None:
    """Refuse a setting that must be a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number above 0 ({meaning}), but {value!r} was given")
    if not 0 < float(value) < float("inf"):
        raise InputError(f"{name} must be a finite number above 0 ({meaning}), but {value} was given")


def require_ridge(value: object) -> None:
    """Refuse a ridge under which a fit isn't unique, or above which it is the identity anyway."""
    require_positive("ridge", value, "without it a fit isn't unique")
    if isinstance(value, Real) and float(value) > LARGEST_RIDGE:
        raise InputError(
            f"ridge is {float(value):g}, above {LARGEST_RIDGE:g}; use map='identity' for what an endless ridge gives"
        )


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in: the widest of the inputs' dtypes, at least float32."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32

"""One fitted map as the parameters that decide it: what is left when its fit is forgotten."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

Rows = Float[Tensor, "n d"]


@runtime_checkable
class GlobalMap(Protocol):
    """A tokenwise map given by its parameters alone; ``T(x) = x + update(x)``."""

    def update(self, x: Rows) -> Rows:
        """``T(x) - x`` of rows, computed in the dtype of the rows."""

    def tensors(self) -> Mapping[str, Tensor]:
        """The parameters by name."""

    def rescaled(self, unit: float) -> "GlobalMap":
        """The same map for states that are ``unit`` times as large."""


@dataclass(frozen=True)
class Still:
    """``T(x) = x``."""

    def update(self, x: Rows) -> Rows:
        """Zero."""
        return torch.zeros_like(x)

    def tensors(self) -> Mapping[str, Tensor]:
        """None."""
        return {}

    def rescaled(self, unit: float) -> "Still":  # noqa: ARG002
        """Itself."""
        return self


@dataclass(frozen=True)
class Shift:
    """``T(x) = x + shift``."""

    shift: Float[Tensor, " d"]

    def update(self, x: Rows) -> Rows:
        """``shift``."""
        return self.shift.to(x).expand_as(x)

    def tensors(self) -> Mapping[str, Tensor]:
        """``shift``."""
        return {"shift": self.shift}

    def rescaled(self, unit: float) -> "Shift":
        """The shift grows with the states."""
        return Shift(self.shift * unit)


@dataclass(frozen=True)
class Factors:
    """``T(x) = x + excess ⊙ x``, with one excess per coordinate, or one for all."""

    excess: Float[Tensor, " c"]

    def update(self, x: Rows) -> Rows:
        """``excess ⊙ x``."""
        return self.excess.to(x) * x

    def tensors(self) -> Mapping[str, Tensor]:
        """``excess``."""
        return {"excess": self.excess}

    def rescaled(self, unit: float) -> "Factors":  # noqa: ARG002
        """Itself: linear maps don't know the size of states."""
        return self


@dataclass(frozen=True)
class Matrix:
    """``T(x) = x + B x``."""

    matrix: Float[Tensor, "d d"]

    def update(self, x: Rows) -> Rows:
        """``B x``."""
        return x @ self.matrix.to(x).mT

    def tensors(self) -> Mapping[str, Tensor]:
        """``matrix``: B."""
        return {"matrix": self.matrix}

    def rescaled(self, unit: float) -> "Matrix":  # noqa: ARG002
        """Itself."""
        return self


@dataclass(frozen=True)
class CenteredMatrix:
    """``T(x) = x + shift + B (x - center)``."""

    matrix: Float[Tensor, "d d"]
    center: Float[Tensor, " d"]
    shift: Float[Tensor, " d"]

    def update(self, x: Rows) -> Rows:
        """``shift + B (x - center)``."""
        return self.shift.to(x) + (x - self.center.to(x)) @ self.matrix.to(x).mT

    def tensors(self) -> Mapping[str, Tensor]:
        """``matrix`` (B), ``center`` (x̄), ``shift`` (δ̄)."""
        return {"matrix": self.matrix, "center": self.center, "shift": self.shift}

    def rescaled(self, unit: float) -> "CenteredMatrix":
        """Centre and shift grow with the states."""
        return CenteredMatrix(self.matrix, self.center * unit, self.shift * unit)


@dataclass(frozen=True)
class Factored:
    """``T(x) = x + U V x``, U with r columns."""

    left: Float[Tensor, "d r"]
    right: Float[Tensor, "r d"]

    def update(self, x: Rows) -> Rows:
        """``U (V x)``."""
        return (x @ self.right.to(x).mT) @ self.left.to(x).mT

    def tensors(self) -> Mapping[str, Tensor]:
        """``left`` (U) and ``right`` (V)."""
        return {"left": self.left, "right": self.right}

    def rescaled(self, unit: float) -> "Factored":  # noqa: ARG002
        """Itself."""
        return self


@dataclass(frozen=True)
class CenteredNetwork:
    """``T(x) = x + shift + scale (W₂ gelu(W₁ E (x - center) + b₁) + b₂)``; E holds the axes over the RMS norm."""

    axes: Float[Tensor, "q d"]
    center: Float[Tensor, " d"]
    shift: Float[Tensor, " d"]
    first: Float[Tensor, "h q"]
    first_bias: Float[Tensor, " h"]
    second: Float[Tensor, "d h"]
    second_bias: Float[Tensor, " d"]
    scale: Float[Tensor, " 1"]

    def update(self, x: Rows) -> Rows:
        """``shift + scale (W₂ gelu(W₁ E (x - center) + b₁) + b₂)``."""
        features = (x - self.center.to(x)) @ self.axes.to(x).mT
        hidden = torch.nn.functional.gelu(features @ self.first.to(x).mT + self.first_bias.to(x))
        return self.shift.to(x) + self.scale.to(x) * (hidden @ self.second.to(x).mT + self.second_bias.to(x))

    def tensors(self) -> Mapping[str, Tensor]:
        """Axes, means, weights, biases and scale, under their own names."""
        return vars(self)

    def rescaled(self, unit: float) -> "CenteredNetwork":
        """Means and scale grow with the states, the axes' unit with them."""
        return CenteredNetwork(
            self.axes / unit, self.center * unit, self.shift * unit, self.first, self.first_bias, self.second,
            self.second_bias, self.scale * unit,
        )  # fmt: skip

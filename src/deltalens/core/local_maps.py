"""Linear maps known only by their products, fitted ones by their factors: singular vectors, and how far two agree."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.errors import InputError

Products = Callable[[Tensor], Tensor]

#: Rows beyond those asked for, and rounds of both products; leading vectors to three digits on real blocks.
OVERSAMPLING, ROUNDS = 8, 5


@dataclass(frozen=True)
class LeadingPart:
    """Leading singular triplets of a d × d matrix: ``output`` (d, m) left, ``gains`` (m,), ``input`` (d, m) right."""

    output: Float[Tensor, "d m"]
    gains: Float[Tensor, " m"]
    input: Float[Tensor, "d m"]


def leading_part(
    forward: Products, transposed: Products, width: int, count: int, *, seed: int, device: torch.device | None = None
) -> LeadingPart:
    """Leading singular triplets of ``A`` from products alone, by randomised subspace iteration.

    Args:
        forward: Rows v_i (q, d) to ``A v_i`` (q, d).
        transposed: Rows u_i (q, d) to ``Aᵀ u_i`` (q, d).
        width: d.
        count: m, how many triplets.
        seed: Seeds the start.
        device: Where the rows go.

    Returns:
        The triplets, in float64.

    Raises:
        InputError: More triplets than dimensions.

    Source:
        Halko, Martinsson & Tropp (2011), algorithms 4.4 and 5.1.

    Example:
        >>> import torch
        >>> a = torch.diag(torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64))
        >>> [round(gain, 6) for gain in leading_part(lambda v: v @ a.T, lambda u: u @ a, 3, 2, seed=0).gains.tolist()]
        [3.0, 2.0]
    """
    if not 1 <= count <= width:
        raise InputError(f"{count} singular vectors were asked of a map of {width} dimensions; ask for 1 to {width}")
    generator = torch.Generator().manual_seed(seed)
    rows = min(width, count + OVERSAMPLING)
    inputs = torch.randn((rows, width), generator=generator, dtype=torch.float64).to(device or torch.device("cpu"))
    for _ in range(ROUNDS):
        outputs = _orthonormal_rows(forward(inputs).double())
        images = transposed(outputs).double()
        inputs = _orthonormal_rows(images)
    # A's leading part is outputsᵀ · images, whose rows are few.
    left, gains, right = torch.linalg.svd(images, full_matrices=False)
    return LeadingPart((outputs.mT @ left)[:, :count], gains[:count], right[:count].mT)


@dataclass(frozen=True)
class AffineFit:
    """The map ``affine`` of one neighbourhood, ``T(x) = x + δ̄ + B (x - x̄)``, with B by its factors.

    ``B = leftᵀ right``, both (k, d).
    """

    mean_input: Float[Tensor, " d"]
    mean_update: Float[Tensor, " d"]
    left: Float[Tensor, "k d"]
    right: Float[Tensor, "k d"]

    def forward(self, directions: Float[Tensor, "q d"]) -> Float[Tensor, "q d"]:
        """``B v`` for each row v."""
        return directions @ self.right.mT @ self.left

    def transposed(self, directions: Float[Tensor, "q d"]) -> Float[Tensor, "q d"]:
        """``Bᵀ u`` for each row u."""
        return directions @ self.left.mT @ self.right


def affine_fit(inputs: Float[Tensor, "k d"], updates: Float[Tensor, "k d"], ridge: float) -> AffineFit:
    """The map `affine` of one neighbourhood with its matrix in hand: ``B = D_cᵀ (X_c X_cᵀ + λI)⁻¹ X_c``.

    Args:
        inputs: The neighbourhood's inputs (k, d).
        updates: Their updates (k, d).
        ridge: The penalty relative to the mean squared norm of the centred inputs.

    Returns:
        Means and factors, in float64.

    Source:
        The map ``affine`` of docs/method.md, whose own fit never needs the matrix.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> affine_fit(x, 2 * x, ridge=1e-12).forward(torch.eye(2, dtype=torch.float64)).round().tolist()
        [[2.0, 0.0], [0.0, 0.0]]
    """
    rows, moves = inputs.double(), updates.double()
    mean_input, mean_update = rows.mean(0), moves.mean(0)
    centered = rows - mean_input
    strength = ridge * centered.square().sum(1).mean()
    gram = centered @ centered.mT
    gram.diagonal().add_(strength if strength > 0 else 1.0)
    return AffineFit(mean_input, mean_update, torch.linalg.solve(gram, moves - mean_update), centered)


def principal_angles(first: Float[Tensor, "d m"], second: Float[Tensor, "d m"]) -> Float[Tensor, " m"]:
    """Principal angles of two subspaces in degrees, smallest first.

    Args:
        first: Orthonormal columns (d, m).
        second: Orthonormal columns (d, m).

    Returns:
        The angles, accurate near 0 and near 90 alike.

    Source:
        Björck & Golub (1973).

    Example:
        >>> import torch
        >>> principal_angles(torch.eye(3)[:, :1], torch.eye(3)[:, 1:2]).tolist()
        [90.0]
    """
    first, second = first.double(), second.double()
    left, cosines, right = torch.linalg.svd(first.mT @ second)
    # The sine of each angle, from the same pairing, where the cosine is too near 1 to tell.
    sines = (second @ right.mT - (first @ left) * cosines).norm(dim=0)
    return torch.rad2deg(torch.atan2(sines, cosines))


def overlap(first: Float[Tensor, "d m"], second: Float[Tensor, "d m"]) -> float:
    """``‖UᵀW‖² / m``: the mean squared cosine of the principal angles; m/d for unrelated subspaces."""
    return float((first.double().mT @ second.double()).square().sum()) / first.shape[1]


def agreement(true: Float[Tensor, "k d"], fitted: Float[Tensor, "k d"]) -> float:
    """``1 - ‖A - B‖² / ‖A‖²`` of two maps' images of the same rows: 1 for equal maps, 0 for a fit of nothing."""
    energy = float(true.double().square().sum())
    return 1 - float((true.double() - fitted.double()).square().sum()) / energy if energy > 0 else float("nan")


def _orthonormal_rows(rows: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(rows.mT).Q.mT
    return basis

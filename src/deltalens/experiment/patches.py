"""The states that stand in for a layer's output: tokenwise part, matched controls, swaps, and doses of the residual."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.core.controls import covariance_directions, random_directions, shuffled_directions
from deltalens.core.decomposition import Decomposition
from deltalens.core.geometry import split_residual
from deltalens.experiment.spec import RunSpec, Scope

Rows = Float[Tensor, "n d"]

#: Doses beside 1, which is the patch itself (`kl_single` and the controls' own columns).
DOSES = (0.25, 0.5, 2.0)


def control_patches(
    x: Rows,
    y: Rows,
    decomposition: Decomposition[Tensor],
    partner: Int[Tensor, " n"],
    spec: RunSpec,
    seed: int,
) -> dict[str, Rows]:
    """Patches beside ``T(x)`` itself, by the column that their KL fills; a row of NaN has no control.

    Args:
        x: inputs of the included tokens.
        y: outputs of the included tokens.
        decomposition: of these tokens.
        partner: a token of another window for each, -1 where there is none.
        spec: options of the run.
        seed: seeds the random directions; no two layers or blocks share one.
    """
    residual = decomposition.residual
    controls = {
        "kl_single_random": random_directions(residual, seed),
        "kl_single_shuffled": shuffled_directions(residual, partner),
    }
    if spec.covariance:
        controls["kl_single_covariance"] = covariance_directions(
            residual, torch.ones(len(residual), dtype=torch.bool, device=residual.device), seed
        )
    inside, outside = split_residual(decomposition)
    tokenwise = decomposition.tokenwise
    patches = {name: y - perturbation for name, perturbation in controls.items()} | {
        "kl_residual_only": x + residual,
        "kl_in": tokenwise + inside,
        "kl_out": tokenwise + outside,
        "kl_tokenwise_matched": y - _rescaled(tokenwise - x, residual),
    }
    return patches | (_doses(y, {"": residual, **_short(controls)}) if spec.dose else {})


@dataclass(frozen=True)
class Patch:
    """States that stand in for a layer's output, and where there is none to put: what isn't finite in its dtype."""

    states: Float[Tensor, "w s d"]
    undefined: Bool[Tensor, "w s"]

    @property
    def digest(self) -> bytes:
        """A hash by which equal patches are known."""
        numbers = self.states.contiguous().view(torch.uint8).cpu().numpy()
        return hashlib.blake2b(numbers.tobytes() + self.undefined.numpy().tobytes()).digest()

    def undefined_in(self, scope: Scope) -> Bool[Tensor, "w s"]:
        """Where a measurement says nothing: with all positions replaced, also after the first that couldn't be."""
        return self.undefined if scope == "single" else self.undefined.cumsum(dim=1) > 0


def spread(rows: Rows, onto: Float[Tensor, "w s d"], included: Bool[Tensor, "w s"]) -> Patch:
    """Put rows where ``included`` holds, and leave the original states elsewhere and where a row isn't finite."""
    cast = rows.to(onto.dtype)
    finite = torch.isfinite(cast).all(dim=-1)
    undefined = torch.zeros_like(included)
    undefined[included] = ~finite.to(included.device)
    patched = onto.clone()
    patched[included] = torch.where(finite.unsqueeze(-1), cast, patched[included].to(cast.device)).to(onto.device)
    return Patch(patched, undefined)


def _rescaled(direction: Rows, like: Rows) -> Rows:
    """``direction`` with the norms of ``like``; NaN where it has none."""
    ratio: Tensor = like.norm(dim=-1, keepdim=True) / direction.norm(dim=-1, keepdim=True)
    return direction * ratio


def _short(controls: Mapping[str, Rows]) -> dict[str, Rows]:
    return {f"{name.removeprefix('kl_single_')}_": perturbation for name, perturbation in controls.items()}


def _doses(y: Rows, perturbations: Mapping[str, Rows]) -> dict[str, Rows]:
    """``y - a p`` for every dose ``a``."""
    return {
        f"kl_dose_{name}{dose:g}": y - dose * perturbation
        for name, perturbation in perturbations.items()
        for dose in DOSES
    }

"""The layer's own local map at sampled tokens beside the fitted one: does the fit find what the layer does?"""

from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from deltalens.core.local_maps import (
    AffineFit,
    affine_fit,
    agreement,
    leading_part,
    overlap,
    principal_angles,
)
from deltalens.core.maps import parse_map
from deltalens.core.neighbors import Neighborhoods
from deltalens.errors import ModelError
from deltalens.experiment.fitting import LayerStates, ProtocolFits
from deltalens.experiment.spec import Protocol
from deltalens.experiment.workbench import Workbench
from deltalens.models.block_call import BlockRunner
from deltalens.models.interventions.backbone import undisturbed
from deltalens.models.jacobian import TokenJacobian

#: Relative difference up to which the differentiated call counts as the layer's own, by whether it runs in float32.
_SAME_OUTPUT = {True: 1e-3, False: 5e-2}


#: Columns of `LocalMaps.rows` that are measured.
MEASURES = (
    "gain_layer", "gain_fit", "angle_output", "angle_input", "overlap_output", "overlap_input", "overlap_chance",
    "overlap_neighbors", "agreement", "linearised_share", "homogeneity",
)  # fmt: skip


@dataclass(frozen=True)
class LocalMaps:
    """Measures at sampled tokens, one row each, and a note where there are none."""

    rows: pd.DataFrame
    note: str | None


def sampled_tokens(count: int, tokens: int, seed: int) -> Tensor:
    """Which of the included tokens are looked at, the same at every layer."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:tokens].sort().values


def local_maps(
    bench: Workbench, states: LayerStates, protocol: Protocol, fits: ProtocolFits, chosen: Tensor
) -> LocalMaps:
    """Compare ``J - I`` with the matrix of `affine` at each chosen token."""
    neighborhoods = fits.neighborhoods
    if neighborhoods is None:
        return LocalMaps(pd.DataFrame(), "local maps are compared for local fits only; use --fit local")
    table = _FittedMaps(states, protocol, neighborhoods, bench.plan.spec.point.ridge)
    residual = fits.fit(parse_map("affine")).decomposition.residual
    tokens = bench.captured.tokens[bench.captured.included_rows.numpy()]
    ids, inputs = bench.plan.corpus.evaluation.input_ids, bench.captured.evaluation.layer(states.layer)[0]
    rows = []
    try:
        with undisturbed(bench.plan.model.hf):
            runner = BlockRunner(bench.plan.model, states.layer)
            for row in chosen.tolist():
                window, position = int(tokens["window"].iloc[row]), int(tokens["position"].iloc[row])
                exact = TokenJacobian(runner, ids[window], inputs[window].to(states.x.device), position)
                _check_output(exact, states, row, bench)
                own = {"row": row, "window": window, "position": position}
                rows.append(own | _compared(exact, table, states, row, residual[row], bench))
    except ModelError as failure:
        return LocalMaps(pd.DataFrame(), f"layer {states.layer}: {failure}")
    return LocalMaps(pd.DataFrame(rows), None)


class _FittedMaps:
    """The map `affine` of each token's neighbourhood, with its matrix in hand."""

    def __init__(self, states: LayerStates, protocol: Protocol, neighborhoods: Neighborhoods, ridge: float) -> None:
        pool, merged = states.pool(protocol), neighborhoods.merged
        self._inputs, self._updates = pool.x[merged.representative], merged.averaged(pool.y - pool.x)
        self._rows, self._ridge = neighborhoods.rows, ridge

    def at(self, token: int) -> tuple[AffineFit, Float[Tensor, "k d"]]:
        """The fit of a token, and its centred neighbours."""
        rows = self._rows[token]
        fit = affine_fit(self._inputs[rows], self._updates[rows], self._ridge)
        return fit, self._inputs[rows].double() - fit.mean_input


def _compared(
    exact: TokenJacobian, table: _FittedMaps, states: LayerStates, token: int, residual: Tensor, bench: Workbench
) -> dict[str, float]:
    spec = bench.plan.spec
    fit, neighbors = table.at(token)
    x, y = states.x[token].double(), states.y[token].double()

    def change(directions: Tensor) -> Tensor:
        return exact.forward(directions) - directions

    def change_transposed(directions: Tensor) -> Tensor:
        return exact.transposed(directions) - directions

    moved = change(torch.stack([x - fit.mean_input, x]))
    linearised = fit.mean_input + fit.mean_update + (x - fit.mean_input) + moved[0]
    true, fitted = change(neighbors), fit.forward(neighbors)
    size = min(spec.subspace, len(x))
    own = leading_part(change, change_transposed, len(x), size, seed=spec.seed, device=x.device)
    found = leading_part(fit.forward, fit.transposed, len(x), size, seed=spec.seed, device=x.device)
    update = y - x
    return {
        "gain_layer": float(own.gains[0]),
        "gain_fit": float(found.gains[0]),
        "angle_output": float(principal_angles(own.output, found.output)[0]),
        "angle_input": float(principal_angles(own.input, found.input)[0]),
        "overlap_output": overlap(own.output, found.output),
        "overlap_input": overlap(own.input, found.input),
        "overlap_chance": size / len(x),
        "overlap_neighbors": _image_overlap(true, fitted, size),
        "agreement": agreement(true, fitted),
        "linearised_share": 1 - _ratio(float((y - linearised).square().sum()), float(residual.double().square().sum())),
        "homogeneity": _ratio(float(moved[1] @ update), float(update @ update)),
    }


def _image_overlap(true: Tensor, fitted: Tensor, size: int) -> float:
    """Overlap of the dominant output directions over the neighbourhood, of the layer's map and of the fit."""
    bases = []
    for images in (true, fitted):
        _, gains, right = torch.linalg.svd(images.double(), full_matrices=False)
        if not float(gains[0]) > 0:
            return float("nan")
        bases.append(right[:size].mT)
    return overlap(bases[0], bases[1])


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else float("nan")


def _check_output(exact: TokenJacobian, states: LayerStates, row: int, bench: Workbench) -> None:
    """Refuse to differentiate a call that isn't the one of the model's forward pass."""
    y = states.y[row].double()
    difference = float((exact.output().to(y) - y).norm()) / max(float(y.norm()), 1e-30)
    tolerance = _SAME_OUTPUT[torch.finfo(bench.plan.model.dtype).bits >= 32]
    if not difference <= tolerance:
        raise ModelError(
            f"the block run again alone differs by {difference:.2g} of its output; it isn't differentiated"
        )

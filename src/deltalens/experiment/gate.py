"""The gate before the numbers: the model's checks, the proof of the fast path, the noise floor, and the flags."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from deltalens.core.divergence import kl_divergence
from deltalens.errors import ModelError
from deltalens.experiment.corpus import Windows
from deltalens.experiment.functional import FunctionalMeter
from deltalens.experiment.plan import Plan
from deltalens.experiment.progress import Progress
from deltalens.models import Check, Model, Parity, capture, check_needed, trusted_scheme

RERUN = "rerun"
_GATE_WINDOWS = 2
_GATE_POSITIONS = 4

#: Tokens of a window that the model's checks read: what they ask for doesn't depend on the length, their cost does.
_CHECK_TOKENS = 64

#: Largest error of rounding to nearest, relative to the value; its rms is this over sqrt(3).
_HALF_ULP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@dataclass(frozen=True)
class Proof:
    """What was proven before measuring; it holds in every process that has the same weights and windows.

    Attributes:
        checks: the model's checks on the run's own windows.
        parity: the proof of the scheme that serves single positions, or of its failure.
        scheme: what serves single positions; ``rerun`` where no fast path was proven.
        sampled: positions that ``rerun`` patches, None where every position is served.
        noise_floor: largest KL of an identity patch, or between batch sizes, per scope.
        warnings: one line each.
    """

    checks: tuple[Check, ...]
    parity: Parity | None
    scheme: str
    sampled: Bool[Tensor, "windows length"] | None
    noise_floor: dict[str, float]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Gate:
    """What was proven, and the means to measure by it.

    Attributes:
        plan: the run.
        included: positions that take part.
        proof: what was proven.
    """

    plan: Plan
    included: Bool[Tensor, "windows length"]
    proof: Proof

    def meter(self) -> FunctionalMeter:
        """A meter over all evaluation windows."""
        spec = self.plan.spec
        return FunctionalMeter(
            self.plan.model,
            self.plan.corpus.evaluation,
            self.included,
            spec.batch_size,
            self.proof.scheme,
            spec.divergence,
            self.proof.sampled,
        )

    def flags(self, rows: pd.DataFrame) -> pd.Series:
        """Per row, what its figures drown in: ``kl_single<floor``, ``kl_all<floor``, ``error<rounding``."""
        conditions = {
            f"kl_{scope}<floor": rows[f"kl_{scope}"] <= floor
            for scope, floor in self.proof.noise_floor.items()
            if f"kl_{scope}" in rows
        }
        half_ulp = _HALF_ULP.get(self.plan.model.dtype)
        if half_ulp is not None:
            conditions["error<rounding"] = rows["residual_norm"] < half_ulp / np.sqrt(3) * rows["next_norm"]
        texts = [np.where(holds, name, "") for name, holds in conditions.items()]
        joined = [" ".join(filter(None, parts)) for parts in zip(*texts, strict=True)] if texts else [""] * len(rows)
        return pd.Series(joined, index=rows.index, dtype=object)

    def to_manifest(self) -> dict[str, Any]:
        """Checks, interventions and floors as the manifest holds them."""
        parity = None if self.proof.parity is None else vars(self.proof.parity)
        sampled = None if self.proof.sampled is None else int(self.proof.sampled.sum())
        return {
            "checks": [vars(check) for check in self.proof.checks],
            "interventions": {
                "single": {"path": self.proof.scheme, "parity": parity, "sampled": sampled},
                "all": {"path": "patched forward"},
            },
            "noise_floor": self.proof.noise_floor,
            "rounding_floor": self.rounding_floor(),
        }

    def rounding_floor(self) -> float | None:
        """The stream's rounding relative to ‖y‖ in a half-precision model, rms; None in full precision."""
        half_ulp = _HALF_ULP.get(self.plan.model.dtype)
        return None if half_ulp is None else half_ulp / float(np.sqrt(3))


def open_gate(plan: Plan, included: Bool[Tensor, "windows length"], progress: Progress) -> Gate:
    """Check the model on the run's own windows, prove the fast path, and measure the noise floor."""
    first = _full_windows(plan.corpus.evaluation)
    windows, inside = plan.corpus.evaluation.take(first), included[first]
    with progress.step("check model and fast path", 3) as advance:
        checks = _model_checks(plan.model, windows)
        advance(1)
        parity, scheme, warnings = _prove_scheme(plan, windows, inside)
        advance(1)
        sampled = _sample(included, plan) if scheme == RERUN else None
        floor = _noise_floor(plan, windows, inside, scheme) if plan.spec.scope else {}
        advance(1)
    for warning in warnings:
        progress.note(f"warning: {warning}")
    return Gate(plan, included, Proof(checks, parity, scheme, sampled, floor, tuple(warnings)))


def _model_checks(model: Model, windows: Windows) -> tuple[Check, ...]:
    ids, mask = windows.input_ids[:, :_CHECK_TOKENS], windows.attention_mask[:, :_CHECK_TOKENS]
    checks = check_needed(model, {"input_ids": ids, "attention_mask": mask})
    for check in checks:
        if not check.holds:
            raise ModelError(
                f"{model.identity.name} can't be measured: {check.name} fails, {check.value:.3g} against at most "
                f"{check.tolerance:.3g} ({check.detail}); see: deltalens doctor {model.identity.name}"
            )
    return checks


def _prove_scheme(plan: Plan, windows: Windows, included: Tensor) -> tuple[Parity | None, str, list[str]]:
    if "single" not in plan.spec.scope:
        return None, RERUN, []
    layers = sorted({plan.layers[0], plan.layers[len(plan.layers) // 2], plan.layers[-1]})
    scheme, parity = trusted_scheme(
        plan.model,
        windows.input_ids,
        windows.attention_mask,
        layers=layers,
        positions=_spaced_positions(included),
    )
    if scheme != RERUN:
        return parity, scheme, []
    found = "no fast path serves this model"
    if parity.scheme != RERUN:
        found = (
            f"the fast path '{parity.scheme}' differs from patch-and-rerun by {parity.max_relative_difference:.2g} of "
            f"the logits' range in float32 (tolerance {parity.tolerance:.2g}), {parity.in_dtype:.2g} in its own dtype"
        )
    return parity, RERUN, [f"{found}; {plan.spec.sample} sampled positions are patched one by one"]


def _full_windows(windows: Windows) -> Int[Tensor, " chosen"]:
    """The first windows without padding, or the longest ones where there are too few."""
    return torch.argsort(windows.lengths, descending=True, stable=True)[:_GATE_WINDOWS]


def _spaced_positions(included: Bool[Tensor, "windows length"]) -> Bool[Tensor, "windows length"]:
    """A few positions from the first to the last one of a window, dealt out to the windows in turn."""
    chosen = torch.zeros_like(included)
    for window, row in enumerate(included):
        positions = torch.nonzero(row)[:, 0]
        if len(positions):
            spaced = torch.linspace(0, len(positions) - 1, steps=_GATE_POSITIONS).round().long()
            chosen[window, positions[spaced[window :: len(included)]]] = True
    return chosen


def _sample(included: Bool[Tensor, "windows length"], plan: Plan) -> Bool[Tensor, "windows length"]:
    """A seeded sample of positions, spread evenly over the windows."""
    generator = torch.Generator().manual_seed(plan.spec.seed)
    order = torch.rand(included.shape, generator=generator).masked_fill(~included, 2.0).argsort(dim=1).argsort(dim=1)
    rank = torch.where(included, order, included.shape[1])
    flat = torch.argsort((rank * len(included) + torch.arange(len(included))[:, None]).flatten(), stable=True)
    sampled = torch.zeros(included.numel(), dtype=torch.bool)
    sampled[flat[: plan.spec.sample]] = True
    return sampled.view_as(included) & included


def _noise_floor(plan: Plan, windows: Windows, inside: Tensor, scheme: str) -> dict[str, float]:
    """The largest KL that nothing at all gives: the state patched by itself, and the window in another batch size."""
    middle = plan.layers[len(plan.layers) // 2]
    sampled = _few(inside) if scheme == RERUN else None
    with capture(plan.model, {"input_ids": windows.input_ids, "attention_mask": windows.attention_mask}) as states:
        own, together = states.outputs[middle].cpu(), states.logits.float().cpu()
    with FunctionalMeter(plan.model, windows, inside, len(windows), scheme, (), sampled) as meter:
        floors = {
            scope: _largest(meter.measure(middle, {"own": own}, scope)["own"].divergences["kl"])
            for scope in plan.spec.scope
        }
    other = _batch_size_floor(plan.model, windows, inside, together)
    return {scope: max(floor, other) for scope, floor in floors.items()}


def _batch_size_floor(model: Model, windows: Windows, inside: Tensor, together: Tensor) -> float:
    alone = torch.cat([_logits(model, windows.rows(row, row + 1)) for row in range(len(windows))])
    return _largest(torch.where(inside, kl_divergence(together, alone), torch.nan))


@torch.no_grad()
def _logits(model: Model, windows: Windows) -> Tensor:
    logits: Tensor = model.hf(
        input_ids=windows.input_ids.to(model.device),
        attention_mask=windows.attention_mask.to(model.device),
        use_cache=False,
    ).logits
    return logits.float().cpu()


def _few(inside: Tensor) -> Tensor:
    few = torch.zeros_like(inside)
    for window, position in torch.nonzero(inside)[:: max(1, int(inside.sum()) // 16)].tolist():
        few[window, position] = True
    return few


def _largest(kl: Tensor) -> float:
    kept = kl[~kl.isnan()]
    return float(kept.max()) if len(kept) else float("nan")

"""The doctor: every property that makes a model trustworthy here, measured, in one table."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from deltalens.errors import DeltalensError
from deltalens.models import advice, probes
from deltalens.models.batches import TokenBatch, token_batch
from deltalens.models.checks import Check, check_chain, check_identity_patch, first_line, probe_batch
from deltalens.models.model import Model
from deltalens.models.opening import open_model
from deltalens.models.probes import Probe
from deltalens.models.sources import quiet

WINDOWS, TOKENS = 2, 24
_COLUMNS = 80


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        model: Name of the model.
        summary: One line: class, layers, width, dtype, kernel, kinds of blocks.
        checks: Every check with its figure.
    """

    model: str
    summary: str
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        """Whether every check that a run needs holds."""
        return all(check.holds for check in self.checks if check.needed)

    def __getitem__(self, name: str) -> Check:
        """Return a check by name."""
        return next(check for check in self.checks if check.name == name)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame, one row per check."""
        import pandas as pd

        return pd.DataFrame([asdict(check) for check in self.checks])

    def to_json(self) -> str:
        """Return everything as JSON; a figure that isn't finite becomes null."""
        rows = [
            {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in asdict(check).items()}
            for check in self.checks
        ]
        whole = {"model": self.model, "summary": self.summary, "holds": self.holds, "checks": rows}
        return json.dumps(whole, indent=2)

    def __str__(self) -> str:
        """A table that fits 80 columns."""
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        yield from textwrap.wrap(f"{self.model}: {self.summary}", _COLUMNS)
        yield ""
        yield f"{'check':<19}{'figure':>9}{'limit':>9}  {'holds':<6}{'what the figure is'}"
        for check in self.checks:
            mark = "yes" if check.holds else ("NO" if check.needed else "no")
            head = f"{check.name:<19}{_figure(check.value):>9}{_figure(check.tolerance):>9}  {mark:<6}"
            first, *more = textwrap.wrap(check.detail, _COLUMNS - len(head)) or [""]
            yield head + first
            yield from (" " * len(head) + line for line in more)
        yield ""
        failed = [check.name for check in self.checks if check.needed and not check.holds]
        advice = [check.name for check in self.checks if not check.needed and not check.holds]
        yield (
            "Everything that a run needs holds."
            if not failed
            else f"A run can't trust this model: {', '.join(failed)}."
        )
        if advice:
            yield from textwrap.wrap(f"Worth knowing, a run takes care of it: {', '.join(advice)}.", _COLUMNS)


def doctor(model: Any) -> Diagnosis:
    """Measure every property that a run relies on, and some that are good to know.

    Args:
        model: A loaded `Model`, or anything that `load` takes; a model that `load` refuses is still examined as far as
            it goes.

    Returns:
        The checks with their figures.

    Raises:
        ModelError: The model can't be read, or no blocks are found.

    Source:
        Each check and its limit are described in docs/doctor.md.

    Example:
        >>> import deltalens as dl
        >>> dl.doctor("tiny-gpt2").holds
        True
    """
    examined = model if isinstance(model, Model) else open_model(model)
    batch = probe_batch(examined, windows=WINDOWS, tokens=TOKENS)
    with quiet():
        checks = tuple(_examine(examined, batch, thorough=True))
    return Diagnosis(examined.identity.name, _summary(examined), checks)


def check_needed(model: Model, batch: object) -> tuple[Check, ...]:
    """Measure on your own windows every property that a run needs.

    Args:
        model: A loaded model.
        batch: Token ids `(B, S)` of full windows, or a tokenizer's output; two windows are plenty.

    Returns:
        The needed checks; a run may go on if all hold.
    """
    return tuple(check for check in _examine(model, token_batch(model, batch)) if check.needed)


def _examine(model: Model, batch: TokenBatch, *, thorough: bool = False) -> Iterator[Check]:
    fields = batch.fields
    yield probes.depth(model)
    yield check_chain(model, fields)
    try:
        probe = Probe.of(model, batch)
    except (DeltalensError, RuntimeError) as error:
        yield Check("stream shape", float("nan"), 0.0, holds=False, detail=first_line(error))
        return
    yield probes.stream_shape(model, probe)
    yield probes.finite_logits(probe)
    if any(states.is_meta for states in (*probe.inputs, *probe.outputs)):
        return
    for name, measure in _measures(model, probe, fields):
        yield _guarded(name, measure, needed=True)
    for name, measure in _advice(model, probe) if thorough else ():
        yield _guarded(name, measure, needed=False)
    yield _guarded("restoration", lambda: probes.restoration(model, probe), needed=True)


def _measures(model: Model, probe: Probe, fields: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Check]]]:
    yield "identity patch", lambda: check_identity_patch(model, fields)
    yield "patch locality", lambda: probes.locality(model, probe)
    yield "stream tail", lambda: probes.stream_tail(model, probe)
    yield "padding", lambda: probes.padding(model, probe)
    yield "pad id is a token", lambda: probes.padding_by_mask(model, probe)
    yield "batch size", lambda: probes.batch_size(model, probe)


def _advice(model: Model, probe: Probe) -> Iterator[tuple[str, Callable[[], Check]]]:
    yield "determinism", lambda: advice.determinism(model, probe)
    yield "stream start", lambda: advice.stream_start(model, probe)
    yield "cache", lambda: advice.cache_parity(model, probe)
    yield "fast interventions", lambda: advice.fast_interventions(model, probe)
    yield "block dtypes", lambda: advice.block_dtypes(probe)
    yield "logit precision", lambda: advice.logit_precision(probe)
    yield "sinks", lambda: advice.sinks(probe)
    yield "duplicates", lambda: advice.duplicates(probe)
    yield "tokenizer", lambda: advice.tokenizer_round_trip(model)


def _guarded(name: str, measure: Callable[[], Check], *, needed: bool) -> Check:
    # A diagnosis must end also for a model that breaks half-way; what broke is the finding.
    try:
        return measure()
    except Exception as error:  # noqa: BLE001 - see above
        detail = f"the model breaks: {first_line(error)}"
        return Check(name, float("nan"), 0.0, holds=False, detail=detail, needed=needed)


def _summary(model: Model) -> str:
    identity = model.identity
    kinds = ", ".join(f"{model.block_kinds.count(kind)} {kind}" for kind in dict.fromkeys(model.block_kinds))
    found = "found by its forward pass" if model.architecture.discovered else f"row {model.architecture.model_type}"
    return (
        f"{identity.architecture} ({found}), {model.n_layers} blocks ({kinds}), width {model.width}, "
        f"{identity.parameters:,} parameters, {identity.dtype}, {identity.attention or 'own'} kernel"
    )


def _figure(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "0" if value == 0 else f"{value:.3g}"

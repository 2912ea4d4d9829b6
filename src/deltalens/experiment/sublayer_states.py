"""What mixer and MLP of one layer add at every included token, where the sum test holds."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from deltalens.errors import ModelError
from deltalens.experiment.corpus import Windows
from deltalens.experiment.fitting import LayerStates
from deltalens.experiment.states import StateShards
from deltalens.experiment.workbench import Workbench
from deltalens.models.block_call import BlockRunner
from deltalens.models.interventions.backbone import undisturbed
from deltalens.models.sublayers import Contributions, contributions, sum_error, sum_tolerance


@dataclass(frozen=True)
class Parts:
    """What mixer and MLP add at n tokens."""

    mixer: Float[Tensor, "n d"]
    mlp: Float[Tensor, "n d"]


@dataclass(frozen=True)
class SublayerStates:
    """The parts of one layer's updates, evaluation and pool; None where they can't be told apart, and why.

    ``sum_error`` is ``‖Y - X - M - F‖ / ‖Y - X‖`` over the evaluation tokens, NaN where there are no parts at all.
    """

    own: Parts | None
    pool: Parts | None
    sum_error: float
    note: str | None

    def alone(self, states: LayerStates, part: str) -> LayerStates:
        """The transition of a layer that adds one part only: ``y = x + mixer`` or ``x + mlp``."""
        assert self.own is not None
        pool_y = None if self.pool is None or states.pool_x is None else states.pool_x + getattr(self.pool, part)
        return replace(states, y=states.x + getattr(self.own, part), pool_y=pool_y)


def sublayer_states(bench: Workbench, states: LayerStates) -> SublayerStates:
    """Run one layer's blocks again on its captured inputs, and keep what each sub-layer adds."""
    captured, model, layer = bench.captured, bench.plan.model, states.layer
    try:
        with undisturbed(model.hf):
            runner = BlockRunner(model, layer)
            corpus = bench.plan.corpus
            own = _parts(bench, runner, layer, corpus.evaluation, captured.evaluation, captured.exclusions.included)
            error = sum_error(states.x, states.y, own.mixer, own.mlp)
            if not error <= sum_tolerance(states.x, states.y, model.dtype):
                return SublayerStates(None, None, error, _failed(layer, error))
            pool = None
            if corpus.pool is not None and captured.pool is not None and captured.pool_exclusions is not None:
                pool = _parts(bench, runner, layer, corpus.pool, captured.pool, captured.pool_exclusions.included)
    except ModelError as failure:
        return SublayerStates(None, None, float("nan"), f"layer {layer}: {failure}")
    return SublayerStates(own, pool, error, None)


def _failed(layer: int, error: float) -> str:
    return (
        f"layer {layer}: input + mixer + mlp misses the output by {error:.2g} of the update, so its sub-layers aren't "
        f"told apart"
    )


def _parts(
    bench: Workbench,
    runner: BlockRunner,
    layer: int,
    windows: Windows,
    shards: StateShards,
    included: Bool[Tensor, "windows length"],
) -> Parts:
    inputs, device = shards.layer(layer)[0], bench.plan.model.device
    dtype = torch.float64 if bench.plan.spec.precision == "float64" else torch.float32
    found: dict[str, list[Tensor]] = {"mixer": [], "mlp": []}
    for part in _batches(len(windows), bench.plan.spec.batch_size):
        added = contributions(bench.plan.model, runner, layer, windows.input_ids[part], inputs[part].to(device))
        for name, rows in found.items():
            rows.append(_chosen(added, name, included[part]).to(device, dtype))
    return Parts(torch.cat(found["mixer"]), torch.cat(found["mlp"]))


def _batches(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _chosen(added: Contributions, name: str, included: Tensor) -> Tensor:
    part = getattr(added, name)
    states = torch.zeros_like(added.output) if part is None else part
    return states[included.to(states.device)]

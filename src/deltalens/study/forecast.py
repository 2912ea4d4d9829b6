"""What a study is about to do: for each run the model's source and size, and how many units it has."""

from collections.abc import Sequence
from dataclasses import dataclass

from deltalens.experiment.spec import select_layers
from deltalens.models import glance
from deltalens.study.members import Member


@dataclass(frozen=True)
class Forecast:
    """One run of a study before it starts.

    Attributes:
        name: of the run.
        model: what is loaded.
        revision: of it.
        source: where the weights come from.
        here: whether they are on this machine already.
        megabytes: of the weights, None where it isn't known.
        layers: how many are measured, None where it isn't known.
        units: layers × maps × protocols × points of a sweep, likewise.
    """

    name: str
    model: str
    revision: str | None
    source: str
    here: bool
    megabytes: float | None
    layers: int | None
    units: int | None


def forecast(members: Sequence[Member]) -> list[Forecast]:
    """Look at every run of a study without loading a model or asking the network.

    Raises:
        InputError: layers that a model of known depth doesn't have.
    """
    return [_forecast(member) for member in members]


def _forecast(member: Member) -> Forecast:
    spec = member.spec
    seen = glance(spec.model, spec.revision)
    blocks = seen.blocks or member.blocks
    layers = None if blocks is None else len(select_layers(spec.layers, blocks))
    return Forecast(
        name=member.name,
        model=spec.model,
        revision=spec.revision,
        source=seen.source,
        here=seen.here,
        megabytes=seen.megabytes or member.megabytes,
        layers=layers,
        units=None if layers is None else layers * len(spec.maps) * len(spec.protocol) * len(spec.points()),
    )

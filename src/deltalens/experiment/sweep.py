"""The fields of a run that may name several values, and the points that their values span."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from deltalens.core.checks import LARGEST_RIDGE

Metric = Literal["euclidean", "cosine"]


@dataclass(frozen=True)
class SweepPoint:
    """One value of every field that a run may sweep.

    The fields stand in the order in which a sweep goes through them: what neighbours are searched for changes last.
    """

    pool_tokens: int | None
    metric: Metric
    neighbors: int
    ridge: float


SWEPT_FIELDS = tuple(SweepPoint.__dataclass_fields__)

#: Those that decide among which neighbours are searched for, and how.
SEARCH_FIELDS = ("pool_tokens", "metric")


def one_or_several(value: Any, judge: Callable[[Any], Any]) -> Any:
    """One value as it is, several as a tuple; text is split at commas and a list of one is that one.

    Args:
        value: what was given.
        judge: what makes one value of it, or refuses.

    Raises:
        ValueError: there is no value, a value comes twice, or one can't be used.
    """
    if isinstance(value, str) and "," in value:
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        return judge(value)
    items = tuple(judge(each) for each in value)
    if None in items:
        raise ValueError("one of several values is left out; name each")
    if not items:
        raise ValueError("no value is named; give one or more")
    repeated = [each for number, each in enumerate(items) if each in items[:number]]
    if repeated:
        raise ValueError(f"{repeated[0]!r} is named twice; name each once")
    return items if len(items) > 1 else items[0]


def _each(item: Any) -> BeforeValidator:
    judge = TypeAdapter(item).validate_python
    return BeforeValidator(lambda value: one_or_several(value, judge))


_Count = Annotated[int, Field(ge=1)]
_Ridge = Annotated[float, Field(gt=0, le=LARGEST_RIDGE, allow_inf_nan=False)]

Neighbors = Annotated[int | tuple[int, ...], _each(_Count)]
Metrics = Annotated[Metric | tuple[Metric, ...], _each(Metric)]
Ridges = Annotated[float | tuple[float, ...], _each(_Ridge)]
PoolTokens = Annotated[int | tuple[int, ...] | None, _each(_Count | None)]


def refuse_idle_sweep(swept: Sequence[str], fit: str, protocols: Sequence[str]) -> None:
    """Refuse to sweep what no fit of the run depends on.

    Raises:
        ValueError: with what to do instead.
    """
    idle = [name for name in ("neighbors", "metric") if fit == "global" and name in swept]
    if idle:
        raise ValueError(f"fit 'global' has no neighbourhoods, so {idle[0]} can't be swept; give one value")
    if "pool_tokens" in swept and "held_out" not in protocols:
        raise ValueError("only held_out has a pool of its own; sweep pool_tokens with it, or give one value")


def values_of(value: Any) -> tuple[Any, ...]:
    """The values that a field names, one or several."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def swept_fields(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that name several values, in a spec as a manifest holds it."""
    return tuple(name for name in SWEPT_FIELDS if len(values_of(spec.get(name))) > 1)


def first_point(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The first value of every swept field: the point that stands for the run where only one can."""
    return {name: values_of(spec[name])[0] for name in swept_fields(spec)}

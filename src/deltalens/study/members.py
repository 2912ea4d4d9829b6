"""What a study consists of: named runs, multiplied by seeds or by revisions where that is asked for."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from deltalens.errors import InputError
from deltalens.experiment.spec import RunSpec

#: Names inside a study's folder that no run can have.
RESERVED = frozenset({"claims", "figures"})
Item = TypeVar("Item", int, str)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Member:
    """One run of a study.

    Attributes:
        name: of its folder below the study's.
        group: what it shares with the runs that differ from it by seed or revision alone.
        spec: what is run.
        blocks: of the model, where the study knows it before loading it.
        megabytes: of the model's weights, likewise.
    """

    name: str
    group: str
    spec: RunSpec
    blocks: int | None = None
    megabytes: float | None = None


def folder_name(text: str) -> str:
    """A name for a folder from a model's name, path or revision.

    Example:
        >>> folder_name("EleutherAI/pythia-70m")
        'pythia-70m'
    """
    last = text.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.")[:80] or "run"


def check_names(members: Sequence[Member]) -> None:
    """Refuse names that can't be folders of their own."""
    repeated = [name for name, count in Counter(m.name.lower() for m in members).items() if count > 1]
    if repeated:
        raise InputError(f"two runs of the study are named '{repeated[0]}'; give each a name of its own")
    for member in members:
        if member.name in RESERVED or _NAME.fullmatch(member.name) is None:
            raise InputError(
                f"a run of the study is named '{member.name}'; use letters, digits, '.', '_' and '-', "
                f"and none of {', '.join(sorted(RESERVED))}"
            )


def numbered(names: Sequence[str]) -> list[str]:
    """The names, those that come again with a number."""
    seen: Counter[str] = Counter()
    out = []
    for name in names:
        seen[name] += 1
        out.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return out


def over_seeds(members: Sequence[Member], seeds: Sequence[int]) -> list[Member]:
    """Every member once per seed; a single seed keeps the names."""
    chosen = distinct_items(seeds, "seeds")
    return [
        replace(
            member,
            name=member.name if len(chosen) == 1 else f"{member.name}-seed-{seed}",
            spec=RunSpec.parse(**member.spec.model_dump() | {"seed": seed}),
        )
        for member in members
        for seed in chosen
    ]


def over_revisions(spec: RunSpec, revisions: Sequence[str]) -> list[Member]:
    """One model once per revision, in the order given."""
    chosen = distinct_items(revisions, "revisions")
    names = numbered([folder_name(revision) for revision in chosen])
    group = folder_name(spec.model)
    return [
        Member(name, group, RunSpec.parse(**spec.model_dump() | {"revision": revision}))
        for name, revision in zip(names, chosen, strict=True)
    ]


def distinct_items(items: Sequence[Item], what: str) -> list[Item]:
    """The items as a list; an empty one, or one that names something twice, is refused."""
    kept = list(items)
    if not kept:
        raise InputError(f"{what} is empty; name at least one")
    repeated = [item for item, count in Counter(kept).items() if count > 1]
    if repeated:
        raise InputError(f"{what} names {repeated[0]!r} twice; name each once")
    return kept

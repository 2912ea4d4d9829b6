"""The verb `later`: what one replaced state does to the tokens after it."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from deltalens.api import given_for
from deltalens.errors import InputError
from deltalens.experiment.documents import Documents, TextSource
from deltalens.experiment.later import LaterTables, measure_later
from deltalens.experiment.progress import Progress, Silent
from deltalens.experiment.spec import RunSpec
from deltalens.experiment.study_fields import LATER, POSITIONS
from deltalens.experiment.workbench import open_workbench
from deltalens.models import Model
from deltalens.study.table import check_writable, write_tables


@dataclass(frozen=True)
class Later:
    """What single replaced states do to later tokens; the tables are those of `LaterTables`.

    Example:
        >>> found = later("tiny-gpt2", layers=[2], positions=16, tokens=512, pool_tokens=512, window=64)
        >>> found.distances["distance_to"].tolist()
        [1, 3, 7, 15, 31, 63]
    """

    model: str
    tables: LaterTables

    @property
    def layers(self) -> pd.DataFrame:
        """One row per layer × map × fit × protocol."""
        return self.tables.layers

    @property
    def distances(self) -> pd.DataFrame:
        """Mean KL by distance, one row per key and range of distances."""
        return self.tables.distances

    @property
    def positions(self) -> pd.DataFrame:
        """One row per key and sampled position."""
        return self.tables.positions

    def write(self, folder: str | Path) -> list[Path]:
        """Write the tables; return their paths."""
        names = {"later": self.layers, "later_distances": self.distances, "later_positions": self.positions}
        return write_tables(names, Path(folder))


def later(
    model: str | Path | Model | None = None,
    text: TextSource | None = None,
    *,
    positions: int = POSITIONS,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **fields: object,
) -> Later:
    """Replace one token's state by ``T(x)`` and measure the KL of every later prediction of its window.

    Args:
        model: a loaded `Model`, or what `load` takes; a small built-in model by default.
        text: as in `run`.
        positions: how many tokens are replaced, one at a time; a seeded sample, spread evenly over the windows.
        out: a folder for the tables.
        progress: what shows the progress; silent by default.
        **fields: fields of `RunSpec`; ``maps`` is ``low_rank:8`` here by default, and the protocol ``held_out``.

    Returns:
        The tables, with the KL of a random vector of the residual's size beside each figure.

    Raises:
        InputError: a field can't be used as it is.
        CorpusError: the text is too small for what was asked.
        ModelError: the model can't be loaded, or fails a check that the numbers rest on.
        StoreError: the folder can't be written.

    Source:
        This package: a token's own prediction shows a part only of what its state does.

    Example:
        >>> import deltalens as dl
        >>> found = dl.later("tiny-gpt2", layers=[1], positions=8, tokens=256, pool_tokens=512, window=32)
        >>> bool((found.layers["kl_later"] > 0).all())
        True
    """
    given = given_for(model, text, LATER | fields)
    return later_spec(
        given.spec, given.model, given.documents, positions=positions,
        out=None if out is None else Path(out), progress=progress or Silent(),
    )  # fmt: skip


def later_spec(
    spec: RunSpec,
    model: Model | None,
    documents: Documents | None,
    *,
    positions: int,
    out: Path | None,
    progress: Progress,
) -> Later:
    """`later` of a spec; a model or documents that are at hand are used instead of what the spec names."""
    if positions < 1:
        raise InputError(f"positions is {positions}; give at least 1")
    check_writable(out)
    # Its own random control is all that this study needs of a run's, and both scopes have their floor measured.
    plain = spec.model_copy(update={"controls": False, "scope": ("single", "all")})
    with open_workbench(plain, progress, model=model, documents=documents) as bench:
        found = Later(bench.plan.model.identity.name, measure_later(bench, progress, positions=positions))
    if out is not None:
        found.write(out)
    return found

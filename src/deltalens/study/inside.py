"""The verb `inside`: what the residual of each layer is made of."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from deltalens.api import given_for
from deltalens.errors import InputError
from deltalens.experiment.documents import Documents, TextSource
from deltalens.experiment.inside import InsideTables, look_inside
from deltalens.experiment.progress import Progress, Silent
from deltalens.experiment.spec import RunSpec
from deltalens.experiment.study_fields import INSIDE, JACOBIAN_TOKENS
from deltalens.experiment.workbench import open_workbench
from deltalens.models import Model
from deltalens.report.inside import inside_figure, write_inside_figure
from deltalens.study.table import check_writable, write_tables


@dataclass(frozen=True)
class Inside:
    """What a look inside the residual found; the tables are those of `InsideTables`.

    Example:
        >>> found = inside("tiny-gpt2", layers=[2], tokens=256, pool_tokens=512, window=64, jacobian_tokens=2)
        >>> row = found.layers.iloc[0]
        >>> bool(row["sum_error"] < 1e-4), bool(abs(row["explained_mixer"] + row["explained_mlp"] - 1) < 1e-3)
        (True, True)
    """

    model: str
    tables: InsideTables

    @property
    def layers(self) -> pd.DataFrame:
        """One row per layer × map × fit × protocol."""
        return self.tables.layers

    @property
    def tokens(self) -> pd.DataFrame:
        """One row per included token and key."""
        return self.tables.tokens

    @property
    def spectra(self) -> pd.DataFrame:
        """The share of each leading direction, one row per key and rank."""
        return self.tables.spectra

    @property
    def local_maps(self) -> pd.DataFrame:
        """The layer's own local map beside the fitted one, one row per layer × protocol × sampled token."""
        return self.tables.local_maps

    @property
    def notes(self) -> tuple[str, ...]:
        """What couldn't be measured, and why."""
        return self.tables.notes

    def write(self, folder: str | Path) -> list[Path]:
        """Write the tables and the figure; return their paths."""
        target = Path(folder)
        names = {"inside": self.layers, "inside_tokens": self.tokens, "spectra": self.spectra}
        written = write_tables(names | {"local_maps": self.local_maps}, target)
        return written + write_inside_figure(inside_figure(self.model, self.tables), target)


def inside(
    model: str | Path | Model | None = None,
    text: TextSource | None = None,
    *,
    jacobian_tokens: int = JACOBIAN_TOKENS,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **fields: object,
) -> Inside:
    """Look inside each layer's residual ``r = y - T(x)``: spectrum, sub-layers, shared directions, local maps.

    Args:
        model: a loaded `Model`, or what `load` takes; a small built-in model by default.
        text: as in `run`.
        jacobian_tokens: tokens at which the layer's own local map is compared with the fitted one; 0 for none.
        out: a folder for the tables and the figure.
        progress: what shows the progress; silent by default.
        **fields: fields of `RunSpec`; ``maps`` are ``affine`` and ``low_rank:8`` here by default, and the protocol is
            ``held_out``.

    Returns:
        The tables.

    Raises:
        InputError: a field can't be used as it is.
        CorpusError: the text is too small for what was asked.
        ModelError: the model can't be loaded, or fails a check that the numbers rest on.
        StoreError: the folder can't be written.

    Source:
        The questions that arXiv 2604.02459 leaves open about the residual; definitions in docs/inside.md.

    Example:
        >>> import deltalens as dl
        >>> found = dl.inside("tiny-gpt2", layers=[1], tokens=256, pool_tokens=512, window=64, jacobian_tokens=0)
        >>> found.layers["map"].tolist()
        ['affine', 'low_rank:8']
    """
    given = given_for(model, text, INSIDE | fields)
    return inside_spec(
        given.spec, given.model, given.documents, jacobian_tokens=jacobian_tokens,
        out=None if out is None else Path(out), progress=progress or Silent(),
    )  # fmt: skip


def inside_spec(
    spec: RunSpec,
    model: Model | None,
    documents: Documents | None,
    *,
    jacobian_tokens: int,
    out: Path | None,
    progress: Progress,
) -> Inside:
    """`inside` of a spec; a model or documents that are at hand are used instead of what the spec names."""
    if jacobian_tokens < 0:
        raise InputError(f"jacobian_tokens is {jacobian_tokens}; give 0 for none, or how many tokens to look at")
    check_writable(out)
    # The controls of a run are no part of this study, which has levels of its own.
    plain = spec.model_copy(update={"controls": False})
    with open_workbench(plain, progress, model=model, documents=documents) as bench:
        tables = look_inside(bench, progress, jacobian_tokens=jacobian_tokens)
        found = Inside(bench.plan.model.identity.name, tables)
    if out is not None:
        found.write(out)
    return found

"""The verbs that make and open runs, and the `Run` that they return."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deltalens.errors import InputError, StoreError
from deltalens.experiment.documents import Documents, TextSource, read_source
from deltalens.experiment.executors import check_executor
from deltalens.experiment.pipeline import execute
from deltalens.experiment.plan import load_for, make_plan, read_documents
from deltalens.experiment.progress import Progress, Silent
from deltalens.experiment.resume import check_resumable
from deltalens.experiment.spec import RunSpec
from deltalens.experiment.store import StoredRun
from deltalens.models import Model
from deltalens.models.identity import weight_hash
from deltalens.report import (
    Claim,
    at_point,
    claims_for,
    notebook_html,
    sweep_table,
    write_figures,
    write_report,
    write_sweep_figures,
)
from deltalens.report.plots import angle_plot, profile_plot, scatter_plot

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

#: Where runs go that were given no folder.
RUNS = Path("runs")


class Run(StoredRun):
    """A finished run: its tables, the paper's claims on it, its report.

    Every table is checked against the size and hash that the run recorded before it is read; one that differs raises
    a `StoreError`.

    Attributes:
        folder: Where it lies.

    Source:
        The folder's layout is that of docs/run-folder.md, the tables' columns those of docs/method.md.

    Example:
        >>> import deltalens as dl, tempfile
        >>> small = {"layers": [2], "maps": ["mean"], "window": 32, "tokens": 128, "pool_tokens": 256, "neighbors": 16}
        >>> run = dl.run("tiny-gpt2", **small, out=tempfile.mkdtemp() + "/run")
        >>> run.summary()[["layer", "map", "protocol"]].values.tolist()
        [[2, 'mean', 'held_out'], [2, 'mean', 'in_sample']]
        >>> len(run.claims())
        9
    """

    def claims(self, **point: object) -> list[Claim]:
        """The paper's nine claims with the evidence of this run and the rule of each verdict.

        A sweep is judged at one point: ``point`` names values of the swept fields, by default the first of each.

        Raises:
            InputError: the run has no such point.
        """
        return claims_for([at_point(self, point)])

    def report(self, path: str | Path | None = None, **point: object) -> Path:
        """Write the one-file report, by default ``report.html`` in the run folder; return its path.

        It shows a sweep at one point, as `claims` does, and the sweep in a section of its own.

        Raises:
            InputError: the run has no such point.
            StoreError: the file can't be written.
        """
        return write_report(self, Path(path) if path is not None else self.folder / "report.html", point)

    def profile_plot(self, measure: str = "cos_full_tokenwise") -> "Figure":
        """A summary measure against depth, as a plotly figure; protocols side by side, with intervals and nulls.

        Raises:
            InputError: the summary has no such measure.
        """
        return profile_plot(self, measure)

    def scatter_plot(self, layer: int, map: str) -> "Figure":
        """Error against single-position KL in nats at one layer, with the random control, as a plotly figure.

        Raises:
            InputError: that layer and map have no single-position KL.
        """
        return scatter_plot(self, layer, map)

    def angle_plot(self, map: str) -> "Figure":
        """The residual's angles with the tokenwise update, 0 to 90 degrees, over depth, as a plotly figure.

        Raises:
            InputError: the run has no such map.
        """
        return angle_plot(self, map)

    def figures(self, folder: str | Path, **point: object) -> list[Path]:
        """Write static figures for papers, as PDF, SVG and PNG; return their paths.

        Those of a sweep show it as a whole, the others one point of it, as `claims` does.

        Raises:
            InputError: the run has no such point.
            StoreError: the folder can't be written.
        """
        return write_figures(at_point(self, point), folder) + write_sweep_figures(self, folder)

    def sweep(self) -> "pd.DataFrame":
        """Every unit against its effective degrees of freedom, as one long table with error regimes and knees.

        Source:
            docs/sweeps.md defines regimes, frontier and knee.

        Example:
            >>> import deltalens as dl, tempfile
            >>> small = {"layers": [2], "maps": ["linear"], "window": 32, "tokens": 128, "pool_tokens": 256}
            >>> run = dl.run("tiny-gpt2", **small, scope="", neighbors=[4, 8, 16], out=tempfile.mkdtemp() + "/run")
            >>> run.sweep().query("protocol == 'held_out'")["neighbors"].tolist()
            [4, 8, 16]
        """
        return sweep_table(self)

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"


def run(
    model: str | Path | Model | None = None,
    text: TextSource | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **fields: object,
) -> Run:
    """Split, measure and report every layer update of a model: ``y = T(x) + r`` for each token and layer.

    Args:
        model: a loaded `Model`, or what `load` takes; a small built-in model by default.
        text: a string is content, a `Path` a file or folder, a sequence one document each; held-out text by default.
            With the field ``prompt``, whose tokens are then decomposed, it gives the pool.
        out: the run folder; by default a new one below ``runs``.
        resume: continue the run that ``out`` holds.
        progress: what shows the progress; silent by default.
        **fields: fields of `RunSpec`.

    Returns:
        The finished run, whose folder also holds ``report.html``.

    Raises:
        InputError: a field can't be used as it is.
        CorpusError: the text is too small for what was asked.
        ModelError: the model can't be loaded, or fails a check that its numbers rest on.
        StoreError: the folder can't be written or holds another run.

    Source:
        arXiv 2604.02459, "Procedure"; held-out fits and controls are this package's own.

    Example:
        >>> import deltalens as dl, tempfile
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> run = dl.run("tiny-gpt2", layers=[2], maps=["diagonal"], tokens=256, pool_tokens=512, out=folder)
        >>> sorted(run.summary()["protocol"])
        ['held_out', 'in_sample']
    """
    given = given_for(model, text, fields)
    return run_spec(
        given.spec,
        given.model,
        given.documents,
        out=None if out is None else as_folder(out),
        resume=resume,
        progress=progress or Silent(),
    )


@dataclass(frozen=True)
class Given:
    """What a caller gave: the spec, and the model and documents that are at hand instead of what it names."""

    spec: RunSpec
    model: Model | None
    documents: Documents | None


def given_for(model: str | Path | Model | None, text: TextSource | None, fields: dict[str, object]) -> Given:
    """The spec of the given arguments; arguments as in `run`."""
    text = text if text is None or isinstance(text, (str, Path)) else _listed(text)
    spec, documents = _spec_and_documents(model, text, fields)
    return Given(spec, _as_it_is(model) if isinstance(model, Model) else None, documents)


def run_spec(
    spec: RunSpec,
    model: Model | None,
    documents: Documents | None,
    *,
    out: Path | None,
    resume: bool,
    progress: Progress,
) -> Run:
    """Execute a spec; a model or documents that are at hand are used instead of what the spec names."""
    if resume and out is None:
        raise InputError("resume needs the folder of the run to continue; give out (--out)")
    check_executor(spec, model_in_memory=model is not None)
    documents = documents or read_documents(spec)
    if out is not None:
        check_folder(out, resume, "run.json")
    loaded = model or load_for(spec)
    folder = out if out is not None else fresh_folder(loaded.identity.name)
    plan = make_plan(spec, loaded, documents, folder)
    if resume:
        check_resumable(plan)
    progress.note(
        f"{len(plan.keys)} units; needs about {plan.disk_bytes / 1e9:.3f} GB of disk in {folder}, "
        f"{plan.free_bytes / 1e9:.2f} GB are free"
    )
    execute(plan, progress)
    finished = Run(folder)
    finished.report()
    return finished


def open(folder: str | Path) -> Run:
    """Open a finished run's folder.

    Args:
        folder: The folder that `run` or ``deltalens run`` wrote.

    Returns:
        The run; nothing but its manifest is read yet.

    Raises:
        StoreError: the folder holds no finished run, or is damaged.

    Source:
        The layout of docs/run-folder.md.

    Example:
        >>> import deltalens as dl
        >>> dl.open("no/such/folder")
        Traceback (most recent call last):
            ...
        deltalens.errors.StoreError: no/such/folder is no folder; give the folder of a run
    """
    return Run(folder)


def fresh_folder(model: str) -> Path:
    """A folder below ``runs`` that doesn't exist yet, named after the model."""
    base = Path(model).name or "run"
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return next(RUNS / name for name in names if not (RUNS / name).exists())


def _spec_and_documents(
    model: str | Path | Model | None, text: TextSource | None, fields: dict[str, object]
) -> tuple[RunSpec, Documents | None]:
    """The spec that the arguments of a verb make, and the documents where they are content rather than paths."""
    named = _named(model, fields)
    paths = _paths(text)
    if paths:
        return RunSpec.parse(**named, text=paths, **fields), None
    spec = RunSpec.parse(**named, **fields)
    return spec, None if text is None else read_source(text)


def _listed(text: object) -> list[str | Path]:
    if isinstance(text, Mapping) or not isinstance(text, Iterable):
        raise InputError(f"text is a {type(text).__name__}; give a string, a Path, or a sequence of them")
    return list(text)


def _named(model: object, fields: dict[str, object]) -> dict[str, object]:
    """The fields of a spec that the model argument decides."""
    if model is None:
        return {}
    if isinstance(model, (str, Path)):
        return {"model": str(model)}
    if not isinstance(model, Model):
        raise InputError(f"model is a {type(model).__name__}; give a name, a path or what deltalens.load returns")
    decided = sorted({"dtype", "device", "revision", "trust_remote_code"} & set(fields))
    if decided:
        raise InputError(f"{decided[0]} can't be changed on a model that is loaded; give it to deltalens.load")
    plain = model.identity.dtype if model.identity.dtype in ("bfloat16", "float16") else None
    return {"model": model.identity.name, "revision": model.identity.revision, "dtype": plain}


def _as_it_is(model: Model) -> Model:
    """The model with the hash of its weights as they are now; they may have been edited since it was loaded."""
    return replace(model, identity=replace(model.identity, weight_hash=weight_hash(model.hf)))


def _paths(text: TextSource | None) -> tuple[str, ...]:
    """The paths of a text that consists of paths alone; such a text is part of the spec."""
    items: Sequence[object] = [text] if isinstance(text, (str, Path)) else list(text or ())
    return tuple(str(item) for item in items) if items and all(isinstance(item, Path) for item in items) else ()


def as_folder(out: object) -> Path:
    """The path of a folder that was given; anything else is refused."""
    if not isinstance(out, (str, Path)) or not str(out).strip():
        raise InputError(f"out is {out!r}; give the path of a folder")
    return Path(out)


def check_folder(out: Path, resume: bool, manifest: str) -> None:
    """Refuse a folder that can't be written or holds something, unless what its ``manifest`` says is resumed."""
    try:
        if out.exists() and not out.is_dir():
            raise StoreError(f"{out} is a file; give a folder as out (--out)")
        holds_run = (out / manifest).exists()
    except (OSError, ValueError) as error:
        raise StoreError(f"{out} can't be used as a folder: {getattr(error, 'strerror', None) or error}") from None
    if holds_run and not resume:
        raise StoreError(f"{out} already holds a run; continue it with resume (--resume) or give another folder")
    if not holds_run and not resume and out.exists() and any(out.iterdir()):
        raise StoreError(f"{out} isn't empty; give an empty or a new folder")

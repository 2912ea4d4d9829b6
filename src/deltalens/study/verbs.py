"""The verbs that make a study: `reproduce`, `repeat`, `checkpoints`."""

from collections.abc import Sequence
from pathlib import Path

from deltalens.api import as_folder, fresh_folder, given_for
from deltalens.errors import InputError
from deltalens.experiment.documents import TextSource
from deltalens.experiment.progress import Progress, Silent
from deltalens.models import Model
from deltalens.study.definition import PAPER, SMALL, read_definition
from deltalens.study.members import Member, folder_name, over_revisions, over_seeds
from deltalens.study.pages import write_pages
from deltalens.study.series import Series, run_series
from deltalens.study.study import Study


def reproduce(
    *,
    small: bool = False,
    study: str | Path | None = None,
    models: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Study:
    """Run the paper's study: every model's every layer, one table per claim, one comparison.

    A model that can't be had, or fails, is listed with the reason; the others are run.

    Args:
        small: the study on the built-in models and SmolLM2 instead of the paper's models.
        study: a YAML file with a study of your own.
        models: only these models, by name; any that the study doesn't have are added with its shared fields.
        seeds: every run once per seed.
        out: the study's folder; by default a new one below ``runs``.
        resume: go on with the study that ``out`` holds.
        progress: what shows the progress; silent by default.

    Returns:
        The finished study.

    Raises:
        InputError: the study can't be used as it is.
        StoreError: the folder can't be written or holds another study.

    Source:
        arXiv 2604.02459; the tables rest on this package's own protocols and controls.

    Example:
        >>> import deltalens as dl
        >>> dl.reproduce(small=True, models=["tiny-gpt2"], out="runs/study").failures  # doctest: +SKIP
        ()
    """
    return run_study(study_series(small=small, study=study, models=models, seeds=seeds), out, resume, progress)


def repeat(
    model: str | Path | Model | None = None,
    text: TextSource | None = None,
    *,
    seeds: Sequence[int],
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **fields: object,
) -> Study:
    """Run a model once per seed, with the spread of every verdict and of the figures behind it.

    A seed decides which documents are evaluated and which are the pool, partners, random vectors, permutations,
    bootstrap resamples and the start of small networks.

    Args:
        model: as in `run`.
        text: as in `run`.
        seeds: at least one, each once.
        out: the study's folder; by default a new one below ``runs``.
        resume: go on with the study that ``out`` holds.
        progress: what shows the progress; silent by default.
        **fields: fields of `RunSpec`, but for ``seed``.

    Returns:
        The finished study; its `Study.spread` has a row per layer, map and figure.

    Raises:
        InputError: a field can't be used as it is.
        StoreError: the folder can't be written or holds another study.

    Source:
        This package's own.

    Example:
        >>> import deltalens as dl
        >>> dl.repeat("tiny-gpt2", seeds=[0, 1, 2], out="runs/seeds").spread()  # doctest: +SKIP
    """
    return run_study(repeat_series(model, text, seeds, fields), out, resume, progress)


def checkpoints(
    model: str | Path | Model,
    text: TextSource | None = None,
    *,
    revisions: Sequence[str],
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **fields: object,
) -> Study:
    """Run a model once per training revision, with figures of depth against training.

    Args:
        model: a name on the Hub.
        text: as in `run`.
        revisions: branches, tags or commits in the order of training, each once.
        out: the study's folder; by default a new one below ``runs``.
        resume: go on with the study that ``out`` holds.
        progress: what shows the progress; silent by default.
        **fields: fields of `RunSpec`, but for ``revision``.

    Returns:
        The finished study. Its warnings name revisions with equal weights: a source that ignores the revision.

    Raises:
        InputError: a field can't be used as it is.
        StoreError: the folder can't be written or holds another study.

    Source:
        This package's own.

    Example:
        >>> import deltalens as dl
        >>> dl.checkpoints("EleutherAI/pythia-70m", revisions=["step0", "step1000"])  # doctest: +SKIP
    """
    return run_study(checkpoint_series(model, text, revisions, fields), out, resume, progress)


def study_series(
    *,
    small: bool = False,
    study: str | Path | None = None,
    models: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
) -> Series:
    """The runs of `reproduce`, before any is made; arguments as there."""
    if small and study is not None:
        raise InputError("both small and study were given; give one of them")
    definition = read_definition(Path(study) if study is not None else SMALL if small else PAPER)
    if models is not None:
        definition = definition.only(models)
    members = definition.members()
    return Series("reproduce", definition.title, tuple(members if seeds is None else over_seeds(members, seeds)))


def repeat_series(
    model: str | Path | Model | None, text: TextSource | None, seeds: Sequence[int], fields: dict[str, object]
) -> Series:
    """The runs of `repeat`, before any is made; arguments as there."""
    if "seed" in fields:
        raise InputError("both seed and seeds were given; give seeds alone")
    given = given_for(model, text, fields)
    name = folder_name(given.spec.model)
    members = over_seeds([Member(name, name, given.spec)], seeds)
    return Series("repeat", f"{name} over {len(members)} seeds", tuple(members), given.model, given.documents)


def checkpoint_series(
    model: str | Path | Model | None, text: TextSource | None, revisions: Sequence[str], fields: dict[str, object]
) -> Series:
    """The runs of `checkpoints`, before any is made; arguments as there."""
    if "revision" in fields:
        raise InputError("both revision and revisions were given; give revisions alone")
    if isinstance(model, Model):
        raise InputError("model is loaded, so it has one revision; give its name on the Hub")
    given = given_for(model, text, fields)
    members = over_revisions(given.spec, revisions)
    title = f"{folder_name(given.spec.model)} over {len(members)} revisions"
    return Series("checkpoints", title, tuple(members), None, given.documents)


def run_study(series: Series, out: str | Path | None, resume: bool, progress: Progress | None) -> Study:
    """Make a series' runs and what is written from them."""
    if resume and out is None:
        raise InputError("resume needs the folder of the study to continue; give out (--out)")
    folder = fresh_folder(_default_name(series)) if out is None else as_folder(out)
    run_series(series, folder, resume=resume, progress=progress or Silent(), after=write_pages)
    return Study(folder)


def _default_name(series: Series) -> str:
    groups = {member.group for member in series.members}
    suffix = {"reproduce": "study", "repeat": "seeds", "checkpoints": "checkpoints"}[series.kind]
    return suffix if series.kind == "reproduce" else f"{groups.pop()}-{suffix}"

"""The verbs for those who prune: rank layers, and fit maps that take the place of some."""

from pathlib import Path

from deltalens.api import as_folder, check_folder, given_for
from deltalens.experiment.documents import TextSource
from deltalens.experiment.progress import Progress, Silent
from deltalens.experiment.ranking import LayerRanking, measure_ranking
from deltalens.experiment.replacement_file import load_replacement
from deltalens.experiment.replacing import Replacements, write_replacements
from deltalens.experiment.study_fields import (
    DEFAULT_GLOBAL_MAP,
    DEFAULT_LOCAL_MAP,
    ranking_fields,
    replacement_fields,
)
from deltalens.models import Model

__all__ = ["LayerRanking", "Replacements", "fit_replacements", "load_replacement", "rank_layers"]


def rank_layers(
    model: str | Path | Model | None = None,
    text: TextSource | None = None,
    *,
    global_map: str = DEFAULT_GLOBAL_MAP,
    local_map: str = DEFAULT_LOCAL_MAP,
    progress: Progress | None = None,
    **fields: object,
) -> LayerRanking:
    """Rank layers by the loss that is added when all evaluated outputs ``y`` become x, a global T(x) or a local T(x).

    Args:
        model: as in `run`.
        text: as in `run`.
        global_map: the map that one fit of stands in for a layer at all tokens.
        local_map: the map that is fitted for each token on its neighbours.
        progress: what shows the progress; silent by default.
        **fields: fields of `RunSpec`; those that a ranking decides are refused.

    Returns:
        The ranking: increases of the mean next-token loss in nats with intervals over documents or windows, Block
        Influence, linearity, removal orders, and the agreement of these.

    Raises:
        InputError: a field or a map can't be used as it is.
        CorpusError: the text is too small for what was asked.
        ModelError: the model can't be loaded or measured.

    Source:
        Block Influence after arXiv 2403.03853, linearity after arXiv 2405.12250.

    Example:
        >>> import deltalens as dl
        >>> found = dl.rank_layers("tiny-gpt2", layers=[1, 2, 4], tokens=256, pool_tokens=512, neighbors=32)
        >>> sorted(found.removal_order("skip"))
        [1, 2, 4]
    """
    given = given_for(model, text, ranking_fields(fields, local_map))
    shown = progress or Silent()
    return measure_ranking(given.spec, global_map, shown, model=given.model, documents=given.documents)


def fit_replacements(
    model: str | Path | Model | None = None,
    text: TextSource | None = None,
    *,
    out: str | Path,
    progress: Progress | None = None,
    **fields: object,
) -> Replacements:
    """Fit one map per layer on the whole pool, ``h_{l+1} = T(h_l)``, and write each as a file that can be loaded.

    Args:
        model: as in `run`.
        text: as in `run`.
        out: the folder for the files; empty or new.
        progress: what shows the progress; silent by default.
        **fields: fields of `RunSpec`, such as ``maps`` and ``layers``; those that have no meaning here are refused.

    Returns:
        The files, with the loss of the model as it is, without the layer, and with each file in its place.

    Raises:
        InputError: a field or a map can't be used as it is.
        CorpusError: the text is too small for what was asked.
        ModelError: the model can't be loaded or measured.
        StoreError: the folder isn't empty, or can't be written.

    Source:
        Section 3 of arXiv 2604.02459, with one neighbourhood for all tokens.

    Example:
        >>> import deltalens as dl, tempfile
        >>> folder = tempfile.mkdtemp() + "/maps"
        >>> found = dl.fit_replacements("tiny-gpt2", layers=[3], maps="affine", tokens=256, pool_tokens=512, out=folder)
        >>> found.load(3, "affine").formula
        'T(x) = x + shift + matrix (x - center)'
    """
    folder = as_folder(out)
    given = given_for(model, text, replacement_fields(fields))
    check_folder(folder, False, "run.json")
    return write_replacements(given.spec, folder, progress or Silent(), model=given.model, documents=given.documents)

"""deltalens: how a language model's hidden states change from layer to layer.

Every layer update ``Δ = h_{l+1} - h_l`` is split into a tokenwise part ``T(h_l) - h_l`` and a residual
``r = h_{l+1} - T(h_l)``; both are measured in geometry and in what they do to the output.

Example:
    >>> import deltalens as dl
    >>> model = dl.load("tiny-gpt2")
    >>> model.n_layers
    6
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltalens.api import Run, open, run
    from deltalens.core.decompose import decompose
    from deltalens.core.decomposition import Decomposition
    from deltalens.errors import CorpusError, DeltalensError, ExecutorError, InputError, ModelError, StoreError
    from deltalens.experiment.spec import RunSpec
    from deltalens.models import Model, Replacement, capture, doctor, intervene, load, replaced_blocks
    from deltalens.study.inside import Inside, inside
    from deltalens.study.later import Later, later
    from deltalens.study.pruning import LayerRanking, Replacements, fit_replacements, load_replacement, rank_layers
    from deltalens.study.study import Study
    from deltalens.study.verbs import checkpoints, repeat, reproduce

__version__ = "0.1.0"

__all__ = [
    "CorpusError",
    "Decomposition",
    "DeltalensError",
    "ExecutorError",
    "InputError",
    "Inside",
    "Later",
    "LayerRanking",
    "Model",
    "ModelError",
    "Replacement",
    "Replacements",
    "Run",
    "RunSpec",
    "StoreError",
    "Study",
    "__version__",
    "capture",
    "checkpoints",
    "decompose",
    "doctor",
    "fit_replacements",
    "inside",
    "intervene",
    "later",
    "load",
    "load_replacement",
    "open",
    "rank_layers",
    "repeat",
    "replaced_blocks",
    "reproduce",
    "run",
]

# Names are looked up on first use, so that importing the package loads neither transformers nor matplotlib.
_HOMES = {
    "deltalens.api": ("Run", "open", "run"),
    "deltalens.core.decompose": ("decompose",),
    "deltalens.core.decomposition": ("Decomposition",),
    "deltalens.errors": ("CorpusError", "DeltalensError", "ExecutorError", "InputError", "ModelError", "StoreError"),
    "deltalens.experiment.spec": ("RunSpec",),
    "deltalens.study.inside": ("Inside", "inside"),
    "deltalens.study.later": ("Later", "later"),
    "deltalens.study.study": ("Study",),
    "deltalens.study.verbs": ("checkpoints", "repeat", "reproduce"),
    "deltalens.models": ("Model", "Replacement", "capture", "doctor", "intervene", "load", "replaced_blocks"),
    "deltalens.study.pruning": ("LayerRanking", "Replacements", "fit_replacements", "load_replacement", "rank_layers"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'deltalens' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)

"""Before long work: load the model, cut the corpus, name the units, and refuse what can't succeed."""

import shutil
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from deltalens.core.approximate import require_faiss
from deltalens.core.maps import parse_map
from deltalens.errors import CorpusError, InputError, StoreError
from deltalens.experiment.commit import bytes_held
from deltalens.experiment.corpus import Corpus, build_corpus
from deltalens.experiment.documents import Documents, built_in_documents, read_dataset, read_paths
from deltalens.experiment.prompt import build_prompt_corpus, check_prompt
from deltalens.experiment.spec import RunSpec, select_layers
from deltalens.experiment.store import RunFolder, UnitKey
from deltalens.experiment.sweep import SweepPoint
from deltalens.models import Model, load

LONGEST_DEFAULT_WINDOW = 256

#: The fewest evaluation windows that have intervals, and the pool that a neighbourhood is dense in.
DEFAULT_WINDOWS = 8
DEFAULT_POOL_MULTIPLE = 4

#: Packages whose version a number may depend on.
MEASURING_PACKAGES = ("deltalens", "torch", "transformers")

#: Disk that a token's row of a unit takes, neighbours included, in the unit's folder and again in the merged tables:
#: measured 235 and 230 bytes, and room for optional columns.
_ROW_BYTES = 640

_REPORT_BYTES = 1_000_000


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start: everything loaded and checked, nothing measured, nothing written."""

    spec: RunSpec
    model: Model
    corpus: Corpus
    layers: tuple[int, ...]
    window: int
    folder: RunFolder
    fingerprint: str
    text_in_python: bool = False

    @property
    def keys(self) -> list[UnitKey]:
        """The units, layer by layer."""
        spec = self.spec
        return [
            UnitKey(layer, map, spec.fit, protocol, tuple((name, getattr(point, name)) for name in spec.swept))
            for layer in self.layers
            for protocol in spec.protocol
            for point in spec.points()
            for map in spec.maps
        ]

    def carries_neighbors(self, key: UnitKey) -> bool:
        """Whether a unit's folder also holds the neighbours: one unit's does of each search for them."""
        others = {"neighbors": max(self.spec.values("neighbors")), "ridge": self.spec.point.ridge}
        return key.map == self.spec.maps[0] and all(others.get(name, value) == value for name, value in key.point)

    def point_of(self, key: UnitKey) -> SweepPoint:
        """The point of a sweep that a unit is at."""
        return replace(self.spec.point, **dict(key.point))

    @property
    def state_bytes(self) -> int:
        """Disk that the captured states need."""
        streams = len({*self.layers, *(layer + 1 for layer in self.layers)})
        windows = len(self.corpus.evaluation) + (len(self.corpus.pool) if self.corpus.pool else 0)
        return windows * self.window * self.model.width * self.model.dtype.itemsize * streams

    @property
    def disk_bytes(self) -> int:
        """Disk that the finished folder needs while the states are still in it."""
        rows = len(self.keys) * len(self.corpus.evaluation) * self.window
        return self.state_bytes + rows * _ROW_BYTES + _REPORT_BYTES

    @property
    def free_bytes(self) -> int:
        """Disk that the folder has: what is free where it lies, and what an earlier try already wrote into it."""
        place = self.folder.folder.absolute()
        existing = next(path for path in (place, *place.parents) if path.exists())
        return shutil.disk_usage(existing).free + bytes_held(self.folder.folder)


def read_documents(spec: RunSpec) -> Documents:
    """The documents that a spec names: its files, its dataset, or the built-in text."""
    if spec.text:
        return read_paths([Path(path) for path in spec.text])
    if spec.dataset:
        return read_dataset(spec.dataset)
    return built_in_documents()


def load_for(spec: RunSpec) -> Model:
    """The model that a spec names."""
    return load(
        spec.model,
        dtype=spec.dtype,
        device=spec.device,
        revision=spec.revision,
        trust_remote_code=spec.trust_remote_code,
    )


def make_plan(spec: RunSpec, model: Model, documents: Documents, folder: Path) -> Plan:
    """Join spec, model and text into a plan, or say in one line why the run can't succeed."""
    layers = select_layers(spec.layers, model.n_layers)
    _check_ranks(spec, model)
    if spec.search == "faiss":
        require_faiss()
    if model.tokenizer is None:
        raise InputError(
            f"model '{spec.model}' has no tokenizer, so text can't be cut into tokens; add its tokenizer files"
        )
    window = choose_window(spec.window, model)
    corpus = _corpus(spec, model, documents, window)
    _check_vocabulary(corpus, model)
    _check_pools(spec, corpus)
    fingerprint = run_fingerprint(spec, model, corpus)
    plan = Plan(spec, model, corpus, layers, window, RunFolder(folder), fingerprint, documents.in_python)
    _check_disk(plan)
    return plan


def _corpus(spec: RunSpec, model: Model, documents: Documents, window: int) -> Corpus:
    tokens = spec.tokens or DEFAULT_WINDOWS * window
    pools = [size or DEFAULT_POOL_MULTIPLE * tokens for size in spec.values("pool_tokens")]
    asked = max(pools) if "held_out" in spec.protocol else None
    neighbors = spec.rows_per_fit
    if spec.prompt is not None:
        corpus = build_prompt_corpus(
            spec.prompt, documents, model.tokenizer, window=window, pool_tokens=asked, seed=spec.seed,
            neighbors=neighbors,
        )  # fmt: skip
        check_prompt(spec, corpus.evaluation)
        return corpus
    _check_sizes(spec, window, tokens, min(pools))
    return build_corpus(
        documents, model.tokenizer, window=window, tokens=tokens, pool_tokens=asked, seed=spec.seed,
        neighbors=neighbors,
    )  # fmt: skip


def run_fingerprint(spec: RunSpec, model: Model, corpus: Corpus) -> str:
    """What a run's results are filed under: spec, weights, text and measuring versions, as one hash."""
    return spec.fingerprint(model=model.identity.weight_hash, corpus=corpus.hash, version=str(measuring_versions()))


def measuring_versions() -> dict[str, str]:
    """Versions that belong to a run's fingerprint."""
    return {package: version(package) for package in MEASURING_PACKAGES}


def choose_window(asked: int | None, model: Model) -> int:
    """The window asked for, or the longest default one that model and tokenizer take."""
    limits = [model.longest_window, getattr(model.tokenizer, "model_max_length", None)]
    known = [limit for limit in limits if limit and limit < 10**9]
    longest = min(known) if known else None
    if asked is None:
        return min(LONGEST_DEFAULT_WINDOW, longest or LONGEST_DEFAULT_WINDOW)
    if longest is not None and asked > longest:
        raise InputError(
            f"window is {asked}, but this model takes {longest} tokens; choose a window of at most {longest}"
        )
    return asked


def _check_ranks(spec: RunSpec, model: Model) -> None:
    for text in spec.maps:
        rank = getattr(parse_map(text), "rank", None)
        if rank is not None and rank > model.width:
            raise InputError(
                f"map '{text}' asks for rank {rank}, but states have {model.width} components; lower the rank"
            )


def _check_sizes(spec: RunSpec, window: int, tokens: int, pool_tokens: int) -> None:
    if spec.skip_first >= window:
        raise InputError(f"skip_first is {spec.skip_first}, but windows have {window} tokens; lower skip_first")
    kept = 1 - spec.skip_first / window
    pools = {
        "held_out": ("pool_tokens", pool_tokens),
        "in_sample": ("tokens", tokens),
        "leave_one_out": ("tokens", tokens - 1),
    }
    for protocol in spec.protocol:
        field, size = pools[protocol]
        if size * kept < spec.rows_per_fit:
            setting = "neighbors" if spec.fit == "local" else "rows for the largest rank"
            raise CorpusError(
                f"{field} leaves about {int(size * kept)} tokens as the pool of {protocol}, but {spec.rows_per_fit} "
                f"{setting} were asked for; raise {field} or lower {setting.split()[-1]}"
            )


def _check_pools(spec: RunSpec, corpus: Corpus) -> None:
    """Refuse sizes of a swept pool that come to the same windows, or to too few tokens for a neighbourhood."""
    if "pool_tokens" not in spec.swept or corpus.pool is None:
        return
    taken: dict[int, int] = {}
    for size in spec.values("pool_tokens"):
        windows = int(corpus.pool.nested(size).sum())
        if windows in taken:
            raise InputError(
                f"pool_tokens {taken[windows]} and {size} come to the same {windows} windows; name one of them"
            )
        taken[windows] = size


def _check_vocabulary(corpus: Corpus, model: Model) -> None:
    parts = [corpus.evaluation] + ([corpus.pool] if corpus.pool is not None else [])
    largest = max(int(part.input_ids.max()) for part in parts)
    if largest >= model.vocabulary:
        raise CorpusError(
            f"the tokenizer made token id {largest}, but the model has {model.vocabulary} embeddings; "
            f"use the tokenizer that belongs to the model"
        )


def _check_disk(plan: Plan) -> None:
    needed, free = plan.disk_bytes, plan.free_bytes
    if needed > free:
        raise StoreError(
            f"the run needs about {needed / 1e9:.2f} GB in {plan.folder.folder}, {free / 1e9:.2f} GB are free; "
            f"free some, choose another --out, or lower --tokens, --pool-tokens or --layers"
        )

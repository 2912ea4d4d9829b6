"""What a run is: one frozen class that is the Python API, the command line's flags and the YAML file."""

import hashlib
import json
from collections.abc import Mapping
from itertools import product
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deltalens.core.maps import parse_map
from deltalens.errors import DeltalensError, InputError
from deltalens.experiment.sweep import (
    SWEPT_FIELDS,
    Metrics,
    Neighbors,
    PoolTokens,
    Ridges,
    SweepPoint,
    refuse_idle_sweep,
    values_of,
)

Protocol = Literal["held_out", "leave_one_out", "in_sample"]
Scope = Literal["single", "all"]

DEFAULT_MODEL = "tiny-gpt2"
DEFAULT_MAPS = ("diagonal", "low_rank:8", "orthogonal", "mlp:32")

#: Fields that say what workers an executor gets; the local one has none.
WORKER_FIELDS = ("ray_address", "workers", "gpus_per_worker", "cpus_per_worker")

#: Fields that change how a run is executed but none of its numbers; they are no part of the fingerprint.
EXECUTION_FIELDS = frozenset({"keep_states", "device", "executor", *WORKER_FIELDS})


class RunSpec(BaseModel):
    """Everything that decides the numbers of a run; frozen, validated, with a canonical JSON and a fingerprint.

    Unknown fields are refused. Lists may be given as comma-separated text, as on the command line. ``neighbors``,
    ``ridge``, ``pool_tokens`` and ``metric`` take one value or several, which make a sweep.

    Example:
        >>> spec = RunSpec.parse(model="tiny-neox", maps="diagonal,low_rank:4", neighbors=32)
        >>> spec.maps
        ('diagonal', 'low_rank:4')
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(DEFAULT_MODEL, min_length=1, description="Hub name, folder, GGUF file or built-in model.")
    revision: str | None = Field(None, description="Revision of a Hub model.")
    trust_remote_code: bool = Field(False, description="Allow code that comes with the model to run.")
    text: tuple[str, ...] = Field(
        (), description="Text file, .jsonl file (field 'text') or folder; repeat for more. Default: the built-in text."
    )
    dataset: str | None = Field(None, description="Hub dataset, NAME or NAME:CONFIG:SPLIT (extra 'datasets').")
    prompt: str | None = Field(
        None, description="Decompose this text's tokens; text or dataset give the pool. Default protocol: held_out."
    )
    maps: tuple[str, ...] = Field(DEFAULT_MAPS, min_length=1, description="Tokenwise maps, comma-separated.")
    neighbors: Neighbors = Field(64, description="Nearest neighbours of a local fit; several: a sweep.")
    search: Literal["exact", "faiss"] = Field(
        "exact", description="How neighbours are searched: exactly, or approximately by faiss (extra 'faiss')."
    )
    metric: Metrics = Field("euclidean", description="Distance between inputs; several: a sweep.")
    distinct: bool = Field(True, description="Merge bitwise-equal pool inputs before neighbours are chosen.")
    layers: str | None = Field(None, description="Transitions to measure, half-open, as START:STOP:STEP or a list.")
    protocol: tuple[Protocol, ...] = Field(
        ("held_out", "in_sample"), min_length=1, description="Where maps are fitted and judged; the first has controls."
    )
    exclude_window: bool = Field(False, description="leave_one_out drops the anchor's whole window.")
    scope: tuple[Scope, ...] = Field(("single", "all"), description="Replace one position, or all at once.")
    fit: Literal["local", "global"] = Field("local", description="One map per token, or one for the whole pool.")
    ridge: Ridges = Field(1e-2, description="Relative ridge of the fits; several: a sweep.")
    window: int | None = Field(
        None, ge=4, description="Tokens per window. Default: 256, or less where the model can't take as many."
    )
    tokens: int | None = Field(
        None, ge=1, description="Evaluation tokens, rounded up to whole windows. Default: eight windows."
    )
    pool_tokens: PoolTokens = Field(
        None,
        description="Pool tokens of held_out, in whole windows; several: a sweep. Default: four times the tokens.",
    )
    subspace: int = Field(8, ge=1, description="Columns of the dominant tokenwise subspace.")
    precision: Literal["float32", "float64"] = Field("float32", description="Precision of fits and measures.")
    max_norm_multiple: float = Field(10.0, gt=1, description="Tokens above this multiple of the median norm are sinks.")
    skip_first: int = Field(1, ge=0, description="Positions left out at the start of each window.")
    batch_size: int = Field(8, ge=1, description="Windows per forward pass.")
    device: str | None = Field(None, description="Device, or 'auto' for several. Default: the GPU if there is one.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(None, description="Precision of the model.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of every random choice.")
    controls: bool = Field(True, description="Matched random and shuffled patches, swaps, nulls and chance levels.")
    null_tokens: int = Field(256, ge=1, description="Evaluation tokens, sampled, that the nulls are judged on.")
    covariance: bool = Field(False, description="Also the control with the covariance of the residuals.")
    dose: bool = Field(False, description="Also the KL along y - a r for a in 1/4, 1/2, 2.")
    divergence: tuple[Literal["reverse_kl", "jensen_shannon"], ...] = Field(
        (), description="Divergences to measure beside KL."
    )
    error: Literal["relative_error", "relative_update_error", "residual_norm"] = Field(
        "relative_error", description="The error that is correlated with the KL."
    )
    sample: int = Field(256, ge=1, description="Positions patched one by one where no exact fast way holds.")
    resamples: int = Field(1000, ge=100, description="Bootstrap resamples behind each interval.")
    keep_states: bool = Field(False, description="Keep the captured states in the run folder.")
    executor: Literal["local", "ray"] = Field("local", description="Who measures: this process, or Ray's workers.")
    ray_address: str | None = Field(
        None, description="Ray cluster to join, HOST:PORT or 'auto'. Default: RAY_ADDRESS, else a Ray of the run's own."
    )
    workers: int | None = Field(None, ge=1, description="Ray workers. Default: as many as the cluster holds.")
    gpus_per_worker: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="GPUs per Ray worker. Default: 1 where the run itself has one."
    )
    cpus_per_worker: int = Field(1, ge=1, description="CPUs and threads per Ray worker.")

    @model_validator(mode="before")
    @classmethod
    def _prompt_is_held_out(cls, fields: Any) -> Any:
        # A prompt is too short to be its own pool, unless that is asked for.
        if isinstance(fields, Mapping) and fields.get("prompt") is not None and "protocol" not in fields:
            return {**fields, "protocol": ("held_out",)}
        return fields

    @field_validator("prompt")
    @classmethod
    def _legible(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("the text is empty; give at least a few words")
        if value is not None and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError("it holds half a character (a lone surrogate); mend its encoding")
        return value

    @field_validator("text", "maps", "protocol", "scope", "divergence", mode="before")
    @classmethod
    def _split_list(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(value) if isinstance(value, list) else value

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_text(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, (list, tuple, range)) and all(isinstance(layer, Integral) for layer in value):
            return ",".join(str(int(layer)) for layer in value)
        return value

    @field_validator("maps")
    @classmethod
    def _canonical_maps(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _without_repeats(tuple(parse_map(text).name for text in value), "maps")

    @field_validator("protocol", "scope", "divergence")
    @classmethod
    def _distinct_items(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _without_repeats(value, "the list")

    @model_validator(mode="after")
    def _consistent(self) -> "RunSpec":
        if self.fit == "global" and "leave_one_out" in self.protocol:
            raise ValueError("fit 'global' has no leave_one_out: one map serves all anchors; use held_out or in_sample")
        for field in WORKER_FIELDS:
            if self.executor == "local" and getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(
                    f"{field} is for workers, but executor is 'local'; give executor 'ray' or drop {field}"
                )
        if self.text and self.dataset:
            raise ValueError("both text and dataset were given; give one of them")
        if self.prompt is not None and self.tokens is not None:
            raise ValueError("both prompt and tokens were given; the evaluation tokens are the prompt's: drop tokens")
        fewest = min(self.values("neighbors"))
        for text in self.maps:
            rank = getattr(parse_map(text), "rank", None)
            if self.fit == "local" and rank is not None and rank > fewest:
                raise ValueError(
                    f"map '{text}' asks for rank {rank} from {fewest} neighbors; lower the rank or raise neighbors"
                )
        refuse_idle_sweep(self.swept, self.fit, self.protocol)
        return self

    @property
    def rows_per_fit(self) -> int:
        """The fewest pool rows that every fit can be made from."""
        if self.fit == "local":
            return int(max(self.values("neighbors")))
        return max(parse_map(text).fewest_rows for text in self.maps)

    def values(self, field: str) -> tuple[Any, ...]:
        """The values that a field names, one or several."""
        return values_of(getattr(self, field))

    @property
    def swept(self) -> tuple[str, ...]:
        """The fields that name several values."""
        return tuple(name for name in SWEPT_FIELDS if len(self.values(name)) > 1)

    def points(self) -> tuple[SweepPoint, ...]:
        """Every combination of the swept fields' values; one point where nothing is swept.

        Example:
            >>> [point.neighbors for point in RunSpec.parse(neighbors="16,32").points()]
            [16, 32]
        """
        return tuple(SweepPoint(*values) for values in product(*map(self.values, SWEPT_FIELDS)))

    @property
    def point(self) -> SweepPoint:
        """The first point, which stands for the run where only one can."""
        return self.points()[0]

    def at(self, point: SweepPoint) -> "RunSpec":
        """The spec of one point alone."""
        return self.model_copy(update=vars(point))

    @classmethod
    def parse(cls, **fields: object) -> "RunSpec":
        """Build a spec, with every refusal as a one-line `InputError`."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise InputError(_one_line(error)) from None

    @classmethod
    def from_yaml(cls, path: Path, **overrides: object) -> "RunSpec":
        """Read a spec from a YAML file; ``overrides`` win over the file."""
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"the config file {path} can't be read: {reason}; give a YAML file") from None
        if loaded is None:
            loaded = {}
        if not isinstance(loaded, Mapping):
            raise InputError(f"the config file {path} holds a {type(loaded).__name__}; it must map fields to values")
        return cls.parse(**{str(key): value for key, value in loaded.items()} | overrides)

    def to_yaml(self) -> str:
        """The spec as YAML that `from_yaml` reads back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def canonical_json(self) -> str:
        """The fields that decide the numbers, as JSON with sorted keys."""
        return json.dumps(self.numeric_fields(), sort_keys=True, separators=(",", ":"))

    def numeric_fields(self) -> dict[str, Any]:
        """The fields that decide the numbers."""
        return self.model_dump(mode="json", exclude=set(EXECUTION_FIELDS))

    def fingerprint(self, *, model: str, corpus: str, version: str) -> str:
        """SHA-256 over the spec, the weight hash, the corpus hash and the version that measures."""
        parts = "\n".join([self.canonical_json(), model, corpus, version])
        return hashlib.sha256(parts.encode()).hexdigest()


def select_layers(layers: str | None, n_layers: int) -> tuple[int, ...]:
    """Transitions named by ``START:STOP:STEP`` or a comma-separated list; 0-based, half-open.

    Example:
        >>> select_layers("0:6:2", 6)
        (0, 2, 4)
    """
    if layers is None:
        return tuple(range(n_layers))
    chosen: list[int] = []
    for part in layers.split(","):
        chosen.extend(_layer_part(part.strip(), layers, n_layers))
    if not chosen:
        raise InputError(f"layers '{layers}' names no layer; this model has layers 0 to {n_layers - 1}")
    return tuple(sorted(set(chosen)))


def _layer_part(part: str, whole: str, n_layers: int) -> list[int]:
    try:
        numbers = [int(piece) if piece.strip() else None for piece in part.split(":")]
    except ValueError:
        raise InputError(f"layers '{whole}' isn't a list of numbers or START:STOP:STEP; write 0:{n_layers}:2") from None
    bad = [n for n in numbers[:2] if n is not None and not 0 <= n <= n_layers]
    if bad or len(numbers) > 3:
        raise InputError(f"layers '{whole}' is out of range; this model has layers 0 to {n_layers - 1}")
    if len(numbers) == 1:
        if numbers[0] is None or numbers[0] >= n_layers:
            raise InputError(f"layer '{part}' is out of range; this model has layers 0 to {n_layers - 1}")
        return [numbers[0]]
    if len(numbers) == 3 and (numbers[2] is None or numbers[2] < 1):
        raise InputError(f"layers '{whole}' has a step below 1; use a step of 1 or more")
    return list(range(n_layers))[slice(*numbers)]


def _without_repeats(items: tuple[str, ...], what: str) -> tuple[str, ...]:
    repeated = sorted({item for item in items if items.count(item) > 1})
    if repeated:
        raise ValueError(f"{what} names {repeated[0]!r} twice; name each once")
    return items


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "the run"
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValidationError):  # of one value among several
        first = cause.errors()[0]
        cause = None
    if isinstance(cause, DeltalensError):
        return str(cause)
    if first["type"] == "extra_forbidden":
        known = ", ".join(RunSpec.model_fields)
        return f"'{field}' is no field of a run; the fields are {known}"
    message = str(cause) if cause is not None else f"{first['msg'][0].lower()}{first['msg'][1:]}"
    arrived = "" if first["type"] == "missing" or cause is not None else f", got {first['input']!r}"
    prefix = "" if cause is not None and field == "the run" else f"{field}: "
    return f"{prefix}{message}{arrived}"

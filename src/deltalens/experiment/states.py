"""Captured states on disk: one shard per batch of windows, so that memory doesn't grow with layers or windows."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from deltalens.errors import StoreError
from deltalens.experiment.commit import MARKER, commit_folder, damage, read_json
from deltalens.experiment.corpus import Windows
from deltalens.models import Model, watch_stream

_FILE = "states.safetensors"
_NORMS = "norms"


@dataclass(frozen=True)
class StateShards:
    """The residual stream of one set of windows, at the chosen transitions, in shards below ``folder``."""

    folder: Path
    name: str
    fingerprint: str

    def capture(
        self,
        model: Model,
        windows: Windows,
        *,
        layers: tuple[int, ...],
        batch_size: int,
        advance: Callable[[int], None],
    ) -> int:
        """Capture what isn't committed yet; return the batch size that fitted in memory."""
        streams = sorted({*layers, *(layer + 1 for layer in layers)})
        start, current = 0, set()
        while start < len(windows):
            batch = windows.rows(start, start + batch_size)
            shard = self._shard(start)
            if not self._committed(shard, len(batch)):
                try:
                    tensors = _captured(model, batch, streams)
                except (torch.OutOfMemoryError, MemoryError):
                    if batch_size == 1:
                        raise
                    batch_size = batch_size // 2
                    continue
                marker = {"fingerprint": self.fingerprint, "windows": len(batch)}
                commit_folder(shard, marker, lambda path, t=tensors: save_file(t, path / _FILE))  # type: ignore[misc]
            current.add(shard)
            advance(len(batch))
            start += len(batch)
        for leftover in set(self._shards()) - current:  # of an earlier try with another batch size
            shutil.rmtree(leftover)
        return batch_size

    def norms(self) -> Float[Tensor, "windows length states"]:
        """The norm of every state of the stream, whatever layers are measured; float32."""
        return torch.cat([self._read(shard, _NORMS) for shard in self._shards()])

    def layer(self, layer: int) -> tuple[Float[Tensor, "windows length d"], Float[Tensor, "windows length d"]]:
        """The input and the output of one transition, in the dtype of the model."""
        shards = self._shards()
        inputs, outputs = ([self._read(shard, _key(at)) for shard in shards] for at in (layer, layer + 1))
        return torch.cat(inputs), torch.cat(outputs)

    def pairs(
        self, layer: int, tokens: Bool[Tensor, "windows length"], device: torch.device, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
        """The input and the output of one transition at the chosen tokens, read shard by shard."""
        sides: list[list[Tensor]] = [[], []]
        for shard, windows in self._parts(tokens.shape[0]):
            chosen = tokens[windows]
            if chosen.any():
                for side, at in zip(sides, (layer, layer + 1), strict=True):
                    side.append(self._read(shard, _key(at))[chosen].to(device, dtype))
        x, y = (torch.cat(side) for side in sides)
        return x, y

    def outputs(self, layer: int, windows: slice) -> Float[Tensor, "windows length d"]:
        """The output of one transition in some windows, in the dtype of the model."""
        parts = []
        for shard, held in self._parts(windows.stop):
            start, stop = max(held.start, windows.start), min(held.stop, windows.stop)
            if start < stop:
                parts.append(self._read(shard, _key(layer + 1))[start - held.start : stop - held.start])
        return torch.cat(parts)

    def _parts(self, windows: int) -> Iterator[tuple[Path, slice]]:
        """Shards with the windows that they hold."""
        shards = self._shards()
        starts = [int(shard.name.rpartition("-")[2]) for shard in shards]
        for shard, start, stop in zip(shards, starts, [*starts[1:], windows], strict=True):
            yield shard, slice(start, stop)

    def verify(self, windows: int) -> None:
        """Refuse shards that are damaged, or don't hold this many windows of this run."""
        held = 0
        for shard in self._shards():
            found = damage(shard)
            if found is not None:
                raise StoreError(f"captured states are damaged: {found}; run again with --resume")
            marker = read_json(shard / MARKER)
            held += marker["windows"] if marker.get("fingerprint") == self.fingerprint else 0
        if held != windows:
            raise StoreError(
                f"{self.folder} holds the captured states of {held} of {windows} windows of {self.name}; "
                f"every process that measures must see the run folder"
            )

    def _shards(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"{self.name}-*") if path.is_dir())

    def _shard(self, start: int) -> Path:
        return self.folder / f"{self.name}-{start:08d}"

    def _committed(self, shard: Path, windows: int) -> bool:
        if not (shard / MARKER).exists() or damage(shard) is not None:
            return False
        marker = read_json(shard / MARKER)
        return marker.get("fingerprint") == self.fingerprint and marker.get("windows") == windows

    @staticmethod
    def _read(shard: Path, key: str) -> Tensor:
        with safe_open(shard / _FILE, framework="pt") as reader:
            tensor: Tensor = reader.get_tensor(key)
            return tensor


def _captured(model: Model, batch: Windows, streams: list[int]) -> dict[str, Tensor]:
    encoding: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    norms: list[Tensor] = []
    kept: dict[str, Tensor] = {}

    def see(at: int, states: Tensor) -> None:
        norms.append(states.float().norm(dim=-1).cpu())
        if at in streams:
            kept[_key(at)] = states.to("cpu", copy=True).contiguous()

    watch_stream(model, encoding, see)
    return {_NORMS: torch.stack(norms, dim=-1), **kept}


def _key(stream: int) -> str:
    return f"stream.{stream:03d}"

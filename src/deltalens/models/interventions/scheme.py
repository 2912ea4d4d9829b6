"""What every scheme offers, and the one run of the original that they all start from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from deltalens.models.blocks import override_output, watch_blocks
from deltalens.models.bypass import OutputKind, bypassed, emitting, learn_output_kinds
from deltalens.models.interventions.backbone import Backbone
from deltalens.models.interventions.masks import BlockPattern, record_patterns


@dataclass(frozen=True)
class BaseRun:
    """The unpatched windows: what schemes reuse for every layer, map and control.

    Attributes:
        backbone: Stack, head and calling convention.
        blocks: The blocks in order.
        input_ids: `(B, S)` token ids.
        final: `(B, S, D)` what the head works on.
        template: Type of the stack's output.
        cache: The cache that the run filled, or None.
        kinds: What each block returns.
        patterns: What attention pattern each block was given.
        outputs: `(B, S, d)` hidden states that each block returned.
    """

    backbone: Backbone
    blocks: tuple[nn.Module, ...]
    input_ids: Int[Tensor, "windows tokens"]
    final: Float[Tensor, "windows tokens final"]
    template: type | None
    cache: Any
    kinds: tuple[OutputKind, ...]
    patterns: tuple[BlockPattern, ...]
    outputs: tuple[Float[Tensor, "windows tokens width"], ...]

    @property
    def length(self) -> int:
        """Tokens in a window."""
        return int(self.input_ids.shape[1])

    def cast(self, layer: int, states: Tensor) -> Tensor:
        """Return states on the device and in the dtype of block `layer`'s own output."""
        own = self.outputs[layer]
        return states.to(device=own.device, dtype=own.dtype)

    def per_patch(self, final: Float[Tensor, "rows s f"], count: int) -> Float[Tensor, "p b s f"]:
        """Return rows of `count` patches, patch-major, with patches as an axis of their own."""
        return final.reshape(count, -1, *final.shape[1:])

    @contextmanager
    def started_after(self, layer: int, states: Tensor) -> Iterator[None]:
        """Skip blocks `0..layer` inside the `with` and let block `layer` return `states`."""
        with ExitStack() as undo:
            undo.enter_context(bypassed(self.blocks[:layer], self.kinds[:layer]))
            undo.enter_context(emitting(self.blocks[layer], states, self.kinds[layer]))
            yield


def run_base(
    backbone: Backbone,
    blocks: tuple[nn.Module, ...],
    input_ids: Int[Tensor, "windows tokens"],
    *,
    cache: object = None,
    use_cache: bool = False,
) -> BaseRun:
    """Run the original once and record what the schemes need."""
    outputs: dict[int, Tensor] = {}
    with (
        learn_output_kinds(blocks) as kinds,
        record_patterns(blocks) as patterns,
        watch_blocks(blocks, on_output=outputs.__setitem__),
    ):
        output = backbone.run(input_ids, cache=cache, use_cache=use_cache)
    for index, states in outputs.items():
        patterns[index].dtype, patterns[index].device = states.dtype, states.device
    order = range(len(blocks))
    return BaseRun(
        backbone=backbone,
        blocks=blocks,
        input_ids=input_ids,
        final=backbone.final_states(output),
        template=type(output) if backbone.split else None,
        cache=cache if cache is not None else backbone.cache_of(output),
        kinds=tuple(kinds[index] for index in order),
        patterns=tuple(patterns[index] for index in order),
        outputs=tuple(outputs[index] for index in order),
    )


@runtime_checkable
class Scheme(Protocol):
    """One way to get the final states of windows in which each token's own state alone is replaced."""

    @property
    def base(self) -> BaseRun:
        """The original run."""
        ...

    def patched(
        self, layer: int, states: Float[Tensor, "patches windows tokens width"], asked: Bool[Tensor, "windows tokens"]
    ) -> Float[Tensor, "patches windows tokens final"]:
        """Return the final states at each token when block `layer`'s output there alone is replaced.

        Args:
            layer: The block whose output is replaced.
            states: `(P, B, S, d)` replacements, P alternatives for the same windows.
            asked: `(B, S)` positions that are wanted; others may hold anything.
        """
        ...


def patched_together(
    base: BaseRun, layer: int, states: Float[Tensor, "p b s d"], *, skip_prefix: bool
) -> Float[Tensor, "p b s f"]:
    """Return the final states when all tokens' states are replaced at once (scope `all`).

    Args:
        base: The original run.
        layer: The block whose output is replaced.
        states: `(P, B, S, d)` replacements.
        skip_prefix: Whether blocks up to the patched one are skipped, which later blocks may not notice.

    Returns:
        `(P, B, S, D)` final states.
    """
    count, rows = states.shape[0], base.cast(layer, states.flatten(0, 1))
    patch = base.started_after(layer, rows) if skip_prefix else override_output(base.blocks[layer], rows)
    with patch:
        output = base.backbone.run(repeated(base.input_ids, count))
    return base.per_patch(base.backbone.final_states(output), count)


def repeated(ids: Tensor, count: int) -> Tensor:
    """Return rows repeated `count` times, patch-major."""
    return ids.repeat(count, *([1] * (ids.dim() - 1))) if count > 1 else ids

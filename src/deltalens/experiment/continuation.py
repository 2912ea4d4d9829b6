"""Windows in which one token's state is replaced, run to their end: KL at that token and at all that follow it."""

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltalens.core.divergence import kl_divergence
from deltalens.experiment.patches import Patch
from deltalens.experiment.progress import Advance
from deltalens.experiment.workbench import Workbench
from deltalens.models import InterventionSession

#: Schemes under which blocks before the patched one may be skipped: no block keeps a state of its own.
_SKIPPING = ("cached_keys", "doubled_length")

#: KL at every position of a token's window, NaN before the token, by patch.
Divergences = dict[str, Float[Tensor, " length"]]


class Continuations:
    """Patches sampled tokens one at a time, the plain way, as many windows together as a batch holds.

    Args:
        bench: model, windows and what was proven of them.
        chosen: (window, position) of each sampled token.
    """

    def __init__(self, bench: Workbench, chosen: Int[Tensor, "tokens 2"]) -> None:
        self._bench, self._chosen = bench, chosen
        self._windows = bench.plan.corpus.evaluation
        proven = bench.gate.proof.scheme
        self._scheme = proven if proven in _SKIPPING else "rerun"

    def divergences(
        self, layer: int, outputs: Float[Tensor, "w s d"], patches: Mapping[str, Patch], advance: Advance
    ) -> list[Divergences]:
        """The KL that each patch of a sampled token's output at one layer causes, token by token.

        Args:
            layer: the block whose output is patched.
            outputs: its outputs, unpatched.
            patches: what stands in, by name.
            advance: told how many tokens are done.
        """
        found: list[Divergences] = [{} for _ in self._chosen]
        size = self._bench.plan.spec.batch_size
        for start in range(0, len(self._windows), size):
            part = slice(start, min(start + size, len(self._windows)))
            rounds = list(self._rounds(part))
            if not rounds:
                continue
            rows = self._windows.rows(part.start, part.stop)
            session = InterventionSession(
                self._bench.plan.model, rows.input_ids, rows.attention_mask, scheme=self._scheme
            )
            with session:
                for members in rounds:
                    kl = self._continued(session, layer, members, part, outputs, patches)
                    for member in members.tolist():
                        window = int(self._chosen[member, 0]) - part.start
                        found[member] = {name: values[window] for name, values in kl.items()}
                    advance(len(members))
        return found

    def _rounds(self, part: slice) -> Iterator[Int[Tensor, " members"]]:
        """Numbers of sampled tokens in some windows, at most one per window at a time."""
        windows = self._chosen[:, 0]
        members = torch.nonzero((windows >= part.start) & (windows < part.stop))[:, 0]
        turn = torch.tensor([int((windows[members[:i]] == windows[member]).sum()) for i, member in enumerate(members)])
        for at in range(int(turn.max()) + 1 if len(turn) else 0):
            yield members[turn == at]

    def _continued(
        self,
        session: InterventionSession,
        layer: int,
        members: Tensor,
        part: slice,
        outputs: Tensor,
        patches: Mapping[str, Patch],
    ) -> dict[str, Float[Tensor, "windows length"]]:
        windows, places = self._chosen[members].unbind(1)
        own = windows - part.start
        asked = self._from(own, places, part)
        states = []
        for patch in patches.values():
            replaced = outputs[part].clone()
            replaced[own, places] = patch.states[windows, places]
            states.append(replaced)
        kl = {name: torch.full(asked.shape, torch.nan) for name in patches}
        names = list(patches)
        # All asked positions are given, but every state besides the patched one is the original's own.
        for chunk in session.stream(layer, states, "all", asked):
            values = kl_divergence(chunk.original, chunk.patched).float().cpu()
            kl[names[chunk.patch]][chunk.windows.cpu(), chunk.positions.cpu()] = values
        for name, patch in patches.items():
            kl[name][own[patch.undefined[windows, places]]] = torch.nan
        return kl

    def _from(self, windows: Tensor, places: Tensor, part: slice) -> Bool[Tensor, "windows length"]:
        """The patched position of each window and all that follow it."""
        first = torch.full((part.stop - part.start,), self._windows.input_ids.shape[1])
        first[windows] = places
        return torch.arange(self._windows.input_ids.shape[1]) >= first[:, None]

"""A block's own local map at one token, ``∂y_i/∂x_i`` in the token's true context, by automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deltalens.errors import ModelError
from deltalens.models.block_call import BlockRunner
from deltalens.models.checks import first_line

#: Directions that run together, each a copy of the token's window up to the token.
ROWS = 16


@dataclass(frozen=True)
class _Graph:
    """One differentiable call: `rows` copies of the token's window, and what both products are read from.

    `pulled` is ``Jᵀ cotangent``, which is linear in `cotangent`, so its derivative by that is J.
    """

    x: Tensor
    y: Tensor
    cotangent: Tensor
    pulled: Tensor


class TokenJacobian:
    """Products with ``J = ∂y_i/∂x_i`` and its transpose, every other position held at its true state; never d × d.

    Products are exact, in float32 at least. Use it inside `undisturbed`.

    Args:
        runner: Of the block.
        input_ids: `(S,)` token ids of the token's window.
        inputs: `(S, d)` inputs of the block.
        position: i.
    """

    def __init__(
        self,
        runner: BlockRunner,
        input_ids: Int[Tensor, " tokens"],
        inputs: Float[Tensor, "tokens width"],
        position: int,
    ) -> None:
        # The model is causal, so later tokens don't matter; never one token alone, which may pass for generation.
        end = max(position + 1, min(2, len(input_ids)))
        self._runner, self._ids, self._inputs, self._position = runner, input_ids[:end], inputs[:end], position
        self._graphs: dict[int, _Graph] = {}

    def output(self) -> Float[Tensor, " width"]:
        """The block's output at the token, of the same call that is differentiated."""
        return self._graph(1).y[0].detach()

    def forward(self, directions: Float[Tensor, "q width"]) -> Float[Tensor, "q width"]:
        """``J v`` for each row v.

        Raises:
            ModelError: The block has a step without a second derivative.
        """
        return self._in_chunks(directions, lambda graph, v: _gradient(graph.pulled, graph.cotangent, v))

    def transposed(self, directions: Float[Tensor, "q width"]) -> Float[Tensor, "q width"]:
        """``Jᵀ u`` for each row u.

        Raises:
            ModelError: The block has a step without a derivative.
        """
        return self._in_chunks(directions, lambda graph, u: _gradient(graph.y, graph.x, u))

    def _in_chunks(self, directions: Tensor, product: Callable[[_Graph, Tensor], Tensor]) -> Tensor:
        found = []
        for start in range(0, len(directions), ROWS):
            rows = directions[start : start + ROWS]
            graph = self._graph(len(rows))
            with _differentiable():
                found.append(product(graph, rows.to(graph.x)))
        return torch.cat(found).to(directions)

    def _graph(self, rows: int) -> _Graph:
        if rows not in self._graphs:
            ids, inputs, i = self._ids.expand(rows, -1), self._inputs.expand(rows, -1, -1), self._position
            call = self._runner.run(ids, inputs).in_float32()
            whole = inputs.to(call.output)
            with _differentiable():
                x = whole[:, i].clone().requires_grad_()
                y = call(torch.cat([whole[:, :i], x.unsqueeze(1), whole[:, i + 1 :]], dim=1))[:, i]
                cotangent = torch.zeros_like(y, requires_grad=True)
                self._graphs[rows] = _Graph(x, y, cotangent, _gradient(y, x, cotangent, create_graph=True))
        return self._graphs[rows]


def _gradient(of: Tensor, by: Tensor, weights: Tensor, *, create_graph: bool = False) -> Tensor:
    return torch.autograd.grad(of, by, weights, retain_graph=True, create_graph=create_graph)[0]


@contextmanager
def _differentiable() -> Iterator[None]:
    """Gradients, and attention by the kernel that has second ones; a block without is refused in one line."""
    try:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(f"the block can't be differentiated: {first_line(error)}") from error

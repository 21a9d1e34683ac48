"""Grouped products on the CPU: one GEMM for each expert that has routed rows.

    GatherProduct   y[row] = activation(x[token of row] @ w[expert].T + b[expert])
    SumProduct      z[token] = sum over its routed rows: p[row] * (x[row] @ w[expert].T + b[expert])

They are called for slabs of tokens, as rows arrive or before rows leave (``GroupedProduct``). Slabs
follow from the schedule alone, and experts and choices are summed in their order, so results are
bitwise equal from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flux.backends.epilogue import ACTIVATE, apart
from flux.core.spec import OpSpec
from flux.moe.routing import Routing


@dataclass
class Experts:
    """The operands of one call beside x, checked.

    Attributes:
        weights: of each of this rank's experts, [N, K], also if the user keeps [K, N].
        biases: [experts, N], or None.
        routing: the routed rows.
    """

    weights: Sequence[torch.Tensor]
    biases: torch.Tensor | None
    routing: Routing

    def multiply(
        self, x: torch.Tensor, expert: int, out: torch.Tensor, columns: slice | None = None
    ) -> torch.Tensor:
        """Multiply rows [rows, K] into ``out`` [rows, columns], and return it."""
        if x.dtype is torch.bfloat16:
            x = apart(x)
        weight = self.weights[expert] if columns is None else self.weights[expert][columns]
        if self.biases is None:
            return torch.mm(x, weight.t(), out=out)
        bias = self.biases[expert] if columns is None else self.biases[expert][columns]
        return torch.addmm(bias, x, weight.t(), out=out)


class GatherProduct:
    """``GroupedProduct`` of tokens that are gathered: rows of the result are routed rows."""

    def __init__(self, spec: OpSpec, experts: Experts) -> None:
        self._spec = spec
        self._experts = experts
        self.rows = experts.routing.rows

    def __call__(
        self, x: torch.Tensor, first: int, last: int, out: torch.Tensor, columns: slice | None
    ) -> None:
        """Multiply tokens [first, last), which are ``x``: see ``GroupedProduct``."""
        spec, routing = self._spec, self._experts.routing
        for expert, begin, end in routing.groups(first, last):
            rows = x.index_select(0, routing.tokens[begin:end] - first)
            if spec.activation == "none":
                self._experts.multiply(rows, expert, out[begin:end])
                continue
            wide = rows.new_empty(end - begin, self._experts.weights[expert].shape[0])
            activated = self._experts.multiply(rows, expert, wide)
            if spec.gated:
                gate, up = activated.chunk(2, dim=1)
                torch.mul(ACTIVATE[spec.activation](gate), up, out=out[begin:end])
            else:
                out[begin:end] = ACTIVATE[spec.activation](activated)


class SumProduct:
    """``GroupedProduct`` whose routed rows are summed, weighted, into their tokens.

    Args:
        spec: of the op.
        experts: operands.
        probs: [M, topk], the weights of a token's experts; None: 1.
    """

    def __init__(self, spec: OpSpec, experts: Experts, probs: torch.Tensor | None) -> None:
        self._experts = experts
        self._probs = probs
        self._wide = torch.float64 if spec.dtype == torch.float64 else torch.float32
        self.rows = experts.routing.rows

    def __call__(
        self, x: torch.Tensor, first: int, last: int, out: torch.Tensor, columns: slice | None
    ) -> None:
        """Sum the routed rows of tokens [first, last) into ``out``: see ``GroupedProduct``."""
        routing = self._experts.routing
        groups = routing.groups(first, last)
        count = sum(end - begin for _, begin, end in groups)
        products = x.new_empty(count + 1, out.shape[1])
        products[count] = 0  # for choices that this rank has no rows of
        places = torch.full((self.rows + 1,), count, device="cpu")  # by routed row; -1 is the last
        at = 0
        for expert, begin, end in groups:
            length = end - begin
            target = products[at : at + length]
            self._experts.multiply(x[begin:end], expert, target, columns)
            torch.arange(at, at + length, out=places[begin:end])
            at += length
        rows = places[routing.positions[first:last]]
        total = out.new_zeros(out.shape, dtype=self._wide)
        for choice in range(routing.topk):
            part = products.index_select(0, rows[:, choice]).to(self._wide)
            if self._probs is not None:
                part *= self._probs[first:last, choice, None]
            total += part
        out.copy_(total)

"""Grouped products without a kernel of flux: one GEMM for each expert that has routed rows.

    GatherProduct   y[row] = activation(x[token of row] @ w[expert].T + b[expert])
    SumProduct      z[token] = sum over its routed rows: p[row] * (x[row] @ w[expert].T + b[expert])

They are called for slabs of tokens, as rows arrive or before rows leave (``GroupedProduct``). Slabs
follow from the schedule alone, and experts and choices are summed in their order, so results are
bitwise equal from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from flux.backends.dispatch import sums_of_bags
from flux.backends.epilogue import ACTIVATE, apart, product_in_float32
from flux.core.spec import OpSpec
from flux.core.tensors import address_of, stacked
from flux.moe.routing import Routing

EVERY = -1
"""In place of an expert's number: all experts, by one grouped GEMM of torch."""
AT_ONCE = ("cuda",)
"""Devices whose grouped GEMM takes less time than a GEMM for each expert. 128 of these took ten
times as long on an H200."""
LOADED = 16  # bytes that torch's grouped GEMM loads at once
SCRATCH_BYTES = 16 << 20
"""Of products that wait for their sum, on CPUs. glibc maps more than 32 MiB anew for each call: the
kernel clears 33 MB in 13 ms, as long as a third of their GEMM took."""
BLOCK_COLUMNS = 256
"""Columns that a product of CPUs has at least: with 128, packing x again takes 5 to 9% more."""
grouped_mm = getattr(functional, "grouped_mm", None)  # since torch 2.10


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return rows as bytes, if they are float8, which not every torch selects on GPUs."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


@dataclass
class Experts:
    """The operands of one call beside x, checked.

    Attributes:
        weights: of each of this rank's experts, [N, K], also if the user keeps [K, N].
        biases: [experts, N], or None.
        routing: the routed rows.
        scales: of float8 weights, float32 [experts] or [experts, N]; None: there are none.
    """

    weights: Sequence[torch.Tensor]
    biases: torch.Tensor | None
    routing: Routing
    scales: torch.Tensor | None = None
    _wide: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    """float8 weights as float32, by expert: converted once."""
    _all: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)
    """For EVERY expert: the weights [experts, N, K], and the end of each expert's rows."""

    def together(
        self, x: torch.Tensor, groups: list[tuple[int, int, int]], columns: slice | None = None
    ) -> list[tuple[int, int, int]]:
        """Return the groups, or all as one of EVERY expert, where torch multiplies them at once."""
        if grouped_mm is None or x.device.type not in AT_ONCE or x.dtype != torch.bfloat16:
            return groups
        rows = sum(end - begin for _, begin, end in groups)
        if len(groups) < 2 or rows != self.routing.rows or columns is not None:
            return groups
        weight = stacked(self.weights)
        if weight is None or any(address_of(t) % LOADED for t in (x, weight)):
            return groups
        n, k = weight.shape[1:]
        step = LOADED // x.itemsize
        dense, *strides = sorted(weight.stride())
        if dense != 1 or any(size % step for size in (n, k, *strides)):
            return groups
        ends, before = [0] * len(self.weights), 0
        for expert, _, end in groups:
            ends[expert] = end
        for expert, end in enumerate(ends):
            ends[expert] = before = max(before, end)
        self._all = weight, torch.tensor(ends, dtype=torch.int32).to(x.device)
        return [(EVERY, 0, rows)]

    def _multiply_all(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert self._all is not None and grouped_mm is not None
        weight, ends = self._all
        products = grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
        if self.biases is None:
            return out.copy_(products)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        rows = torch.repeat_interleave(self.biases, counts, dim=0, output_size=len(x))
        return torch.add(products, rows, out=out)

    def multiply(
        self,
        x: torch.Tensor,
        expert: int,
        out: torch.Tensor,
        columns: slice | None = None,
        scale_x: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply rows [rows, K] into ``out`` [rows, columns], and return it.

        ``scale_x``: of the rows, [rows] or [1]; with scales only.
        """
        if expert == EVERY:
            return self._multiply_all(x, out)
        if scale_x is not None:
            return self._multiply_scaled(x, expert, out, columns, scale_x)
        if x.dtype is torch.bfloat16:
            x = apart(x)
        weight = self.weights[expert] if columns is None else self.weights[expert][columns]
        if self.biases is None:
            return torch.mm(x, weight.t(), out=out)
        bias = self.biases[expert] if columns is None else self.biases[expert][columns]
        return torch.addmm(bias, x, weight.t(), out=out)

    def _multiply_scaled(
        self,
        x: torch.Tensor,
        expert: int,
        out: torch.Tensor,
        columns: slice | None,
        scale_x: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply float8 rows as ``flux.backends.epilogue`` does."""
        assert self.scales is not None
        if expert not in self._wide:
            self._wide[expert] = self.weights[expert].float()
        part = slice(None) if columns is None else columns
        product = product_in_float32(x, self._wide[expert][part].t())
        product *= scale_x.view(-1, 1)
        scale = self.scales[expert]
        product *= scale[part] if scale.dim() else scale
        if self.biases is not None:
            product += self.biases[expert, part]
        return out.copy_(product)


class _Product:
    """What products have in common: their operands, as ``GroupedProduct`` names them."""

    routed: torch.Tensor | None = None
    scale_x: torch.Tensor | None = None

    def __init__(self, experts: Experts, probs: torch.Tensor | None) -> None:
        self._experts = experts
        self.rows = experts.routing.rows
        self.weights = experts.weights
        self.biases = experts.biases
        self.probs = probs
        self.scale_weights = experts.scales
        self.routing = experts.routing


class GatherProduct(_Product):
    """``GroupedProduct`` of tokens that are gathered: rows of the result are routed rows.

    Args:
        spec: of the op.
        experts: operands.
        routed: takes the tokens as they are multiplied, [R, K]; None: they are not kept.
        rows: of the result, if there is room for more than R.
    """

    def __init__(
        self,
        spec: OpSpec,
        experts: Experts,
        routed: torch.Tensor | None = None,
        rows: int | None = None,
    ) -> None:
        super().__init__(experts, None)
        self.rows = self.rows if rows is None else rows
        self._spec = spec
        self.routed = routed
        self._room: torch.Tensor | None = None  # for the tokens of one expert

    def _place(self, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return memory for the tokens of the routed rows [begin, end)."""
        if self.routed is not None:
            return self.routed[begin:end]
        if self._room is None or len(self._room) < end - begin:
            self._room = x.new_empty(end - begin, x.shape[1])
        return self._room[: end - begin]

    def __call__(
        self,
        x: torch.Tensor,
        first: int,
        last: int,
        out: torch.Tensor,
        columns: slice | None,
        scale_x: torch.Tensor | None = None,
        needed: torch.Tensor | None = None,
    ) -> None:
        """Multiply tokens [first, last), which are ``x``: see ``GroupedProduct``."""
        spec, routing = self._spec, self._experts.routing
        all_tokens = routing.tokens
        if needed is not None:
            all_tokens = torch.searchsorted(needed, all_tokens)
        for expert, begin, end in self._experts.together(x, routing.groups(first, last)):
            tokens = (all_tokens[begin:end] - first).to(x.device)
            rows = self._place(x, begin, end)
            torch.index_select(_bytes(x), 0, tokens, out=_bytes(rows))
            scale = scale_x
            if scale_x is not None and spec.scaling == "row":
                scale = scale_x[tokens]
            if spec.activation == "none":
                self._experts.multiply(rows, expert, out[begin:end], scale_x=scale)
                continue
            shape = end - begin, self._experts.weights[expert].shape[0]
            wide = rows.new_empty(shape, dtype=x.dtype if scale is None else torch.float32)
            activated = self._experts.multiply(rows, expert, wide, scale_x=scale)
            if spec.gated:
                gate, up = activated.chunk(2, dim=1)
                torch.mul(ACTIVATE[spec.activation](gate), up, out=out[begin:end])
            else:
                out[begin:end] = ACTIVATE[spec.activation](activated)


class SumProduct(_Product):
    """``GroupedProduct`` whose routed rows are summed, weighted, into their tokens.

    Args:
        spec: of the op.
        experts: operands.
        probs: [M, topk], the weights of a token's experts; None: 1.
        scale_x: of the routed rows, [R] or [1]; with scaling only.
    """

    def __init__(
        self,
        spec: OpSpec,
        experts: Experts,
        probs: torch.Tensor | None,
        scale_x: torch.Tensor | None = None,
    ) -> None:
        super().__init__(experts, probs)
        self.scale_x, self._by_row = scale_x, spec.scaling == "row"
        self._wide = torch.float64 if spec.dtype == torch.float64 else torch.float32
        self._room: torch.Tensor | None = None  # for products by routed row, of some columns
        self._bags: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None

    def _bags_of_tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the routed rows by token, where each token's begin, and their weights.

        Local, at the first call: kernels of GPUs sum by maps of their own.
        """
        if self._bags is None:
            here, rows, begins = self.routing.bags
            weights = None
            if self.probs is not None:
                weights = self.probs[here.to(self.probs.device)].to(self._wide)
            self._bags = rows, begins, weights
        return self._bags

    def __call__(
        self,
        x: torch.Tensor,
        first: int,
        last: int,
        out: torch.Tensor,
        columns: slice | None,
        scale_x: torch.Tensor | None = None,
        needed: torch.Tensor | None = None,
    ) -> None:
        """Sum the routed rows of tokens [first, last) into ``out``: see ``GroupedProduct``."""
        begin, width = 0 if columns is None else columns.start, out.shape[1]
        step = self._step(x, width)
        if step == width:
            self._sum(x, (first, last), out, columns, needed)
            return
        for at in range(0, width, step):
            block = slice(at, min(at + step, width))
            of_block = slice(begin + block.start, begin + block.stop)
            self._sum(x, (first, last), out[:, block], of_block, needed)

    def _step(self, x: torch.Tensor, width: int) -> int:
        """Return how many columns are multiplied, then summed, at once."""
        if x.device.type != "cpu":
            return width
        fitting = SCRATCH_BYTES // (max(self.rows, 1) * self._kind(x).itemsize)
        return min(max(fitting - fitting % BLOCK_COLUMNS, BLOCK_COLUMNS), width)

    def _kind(self, x: torch.Tensor) -> torch.dtype:
        """Return the dtype of products by routed row."""
        return x.dtype if self.scale_x is None else self._wide

    def _sum(
        self,
        x: torch.Tensor,
        of_tokens: tuple[int, int],
        out: torch.Tensor,
        columns: slice | None,
        needed: torch.Tensor | None,
    ) -> None:
        first, last = of_tokens
        shape = (self.rows, out.shape[1])
        if self._room is None or len(self._room) < self.rows * shape[1]:
            self._room = x.new_empty(self.rows * shape[1], dtype=self._kind(x))
        products = self._room[: self.rows * shape[1]].view(shape)
        groups = self.routing.groups(first, last)
        for expert, begin, end in self._experts.together(x, groups, columns):
            scale = self.scale_x
            if scale is not None and self._by_row:
                scale = scale[begin:end]
            self._experts.multiply(x[begin:end], expert, products[begin:end], columns, scale)
        rows, begins, of_rows = self._bags_of_tokens()
        begins = begins[first : last + 1]
        bags = slice(int(begins[0]), int(begins[-1]))
        weights = None if of_rows is None else of_rows[bags]
        offsets = (begins[:-1] if needed is None else begins[needed]) - bags.start
        indices = rows[bags].to(x.device)
        out.copy_(sums_of_bags(products, indices, offsets.to(x.device), weights))

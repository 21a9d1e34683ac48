"""Blocks of rows that ranks exchange: what a GEMM writes into them, and what another reads.

A block has one row for each token of its rank, batch by batch, and a column for each element of the
heads of its rank: of all packed tensors (queries, keys, values), one after the other.

    ProjectedBlocks   block for q = x @ w[heads of q].T + b      GemmAllToAll
                      its rows are those of this rank, and q puts them into its heads' sequence
    HeadBlocks        block for q = heads of this rank, rows of q      AllToAllGemm
                      y = sum over ranks r, in the schedule's order: block of r @ w[:, heads of r].T

HeadBlocks adds up slabs of K in float32 and float64 as they arrive. 16-bit sums would be rounded at
each slab: there the slabs of a tile of rows are put side by side, and multiplied at once when the
last one is there. So are FEW_ROWS inside a host: slabs arrive before they could be multiplied, and
a product for each would read and write the result again (benchmarks/results/hosts/
ulysses_small.json). Either way equal inputs give equal bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from flux.backends.epilogue import apart
from flux.core.sparse_call import Sequences
from flux.core.spec import OpSpec

FEW_ROWS = 256
"""Own rows up to which AllToAllGemm multiplies all heads at once inside a host. The measurement had
512: of so many, with K = 1024, slabs were faster."""


def heads_of(tensor: torch.Tensor, heads_first: bool) -> torch.Tensor:
    """Return [batch, sequence, heads, head_dim] of either layout."""
    return tensor.transpose(1, 2) if heads_first else tensor


class ProjectedBlocks:
    """``Blocks`` of GemmAllToAll. See the module.

    Args:
        spec: of the op.
        x: [rows, K], of this rank.
        weight: [N, K].
        bias: [N], or None.
        tokens: of all ranks.
        world: number of ranks.
        rank: this rank.
        fill: called with each result before it is written.
    """

    def __init__(
        self,
        spec: OpSpec,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: Sequences,
        world: int,
        rank: int,
        fill: Callable[[torch.Tensor], object],
    ) -> None:
        self.rows, self.tokens = tokens.rows, tokens
        self.tensors: Sequence[torch.Tensor] = (x,)
        self.weight: torch.Tensor | None = weight
        self.bias, self.gather = bias, False
        self._weight = weight
        self._spec, self._world, self._rank, self._fill = spec, world, rank, fill
        self._outs: list[torch.Tensor] = []

    def begin(self) -> None:
        """Allocate the results: see ``Blocks``."""
        (x,), spec, tokens = self.tensors, self._spec, self.tokens
        self._x = apart(x) if x.dtype is torch.bfloat16 else x
        for begin, end in spec.columns_of(self._world, self._rank):
            heads = (end - begin) // spec.head_dim
            extents = (heads, tokens.total) if spec.heads_first else (tokens.total, heads)
            self._outs.append(x.new_empty(tokens.batch, *extents, spec.head_dim))
            self._fill(self._outs[-1])

    def send(self, peer: int, first: int, last: int, block: torch.Tensor) -> None:
        """Multiply rows by the peer's heads: see ``Blocks``."""
        at, rows = 0, self._x[first:last]
        for begin, end in self._spec.columns_of(self._world, peer):
            weight = self._weight[begin:end].t()
            out = block[:, at : at + end - begin]
            if self.bias is None:
                torch.mm(rows, weight, out=out)
            else:
                torch.addmm(self.bias[begin:end], rows, weight, out=out)
            at += end - begin

    def receive(self, peer: int, first: int, last: int, block: torch.Tensor) -> None:
        """Put rows of a peer into the sequence: see ``Blocks``."""
        for batch, part, rows in self.tokens.pieces(peer, first, last):
            at = 0
            for out in self._outs:
                heads = heads_of(out, self._spec.heads_first)[batch, part]
                width = heads.shape[1] * heads.shape[2]
                heads.copy_(block[rows, at : at + width].view(heads.shape))
                at += width

    def results(self) -> list[torch.Tensor]:
        """Return the heads of each packed tensor."""
        return self._outs


class HeadBlocks:
    """``Blocks`` of AllToAllGemm. See the module.

    Args:
        spec: of the op.
        heads: of each packed tensor, this rank's, of all tokens.
        weight: [N, K]; None: the heads are only gathered.
        bias: [N], or None.
        tokens: of all ranks.
        world: number of ranks.
        rank: this rank.
        gather: return the gathered heads, [rows, K], too.
        fill: called with each result before it is written.
        inside: all ranks are on one host.
    """

    def __init__(
        self,
        spec: OpSpec,
        heads: Sequence[torch.Tensor],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        tokens: Sequences,
        world: int,
        rank: int,
        gather: bool,
        fill: Callable[[torch.Tensor], object],
        inside: bool,
    ) -> None:
        self.rows, self.tokens = tokens.rows, tokens
        by_token = [heads_of(tensor, spec.heads_first) for tensor in heads]
        self.tensors: Sequence[torch.Tensor] = by_token
        self.weight, self.bias, self.gather = weight, bias, gather
        self._spec, self._world, self._rank, self._fill = spec, world, rank, fill
        self._whole, self._tiles = 0, Counter[tuple[int, int]]()
        self._out: torch.Tensor | None = None
        self._gathered: torch.Tensor | None = None
        self._by_slab = spec.dtype in (torch.float32, torch.float64)
        if inside and self.rows[rank] <= FEW_ROWS:
            self._by_slab = False

    def begin(self) -> None:
        """Allocate the results: see ``Blocks``."""
        heads, spec, own = self.tensors, self._spec, self.rows[self._rank]
        if self.weight is not None:
            self._out = heads[0].new_empty(own, sum(spec.n))
            self._fill(self._out)
        if self.gather or not self._by_slab:
            self._gathered = heads[0].new_empty(own, spec.k)
            self._fill(self._gathered)
            base = 0
            for count in spec.heads:
                if count < self._world:  # ranks share heads, whose gradients are added up
                    self._gathered[:, base : base + count * spec.head_dim] = 0
                base += count * spec.head_dim

    def send(self, peer: int, first: int, last: int, block: torch.Tensor) -> None:
        """Copy the peer's rows of this rank's heads: see ``Blocks``."""
        for batch, part, rows in self.tokens.pieces(peer, first, last):
            at = 0
            for tensor in self.tensors:
                heads = tensor[batch, part]
                width = heads.shape[1] * heads.shape[2]
                block[rows, at : at + width].view(heads.shape).copy_(heads)
                at += width

    def receive(self, peer: int, first: int, last: int, block: torch.Tensor) -> None:
        """Multiply rows of a slab of K, or put them beside the others: see ``Blocks``."""
        at, whole = 0, (first, last) == (0, self.rows[self._rank])
        for number, (begin, end) in enumerate(self._spec.columns_of(self._world, peer)):
            part = block[:, at : at + end - begin]
            at += end - begin
            if self._gathered is not None:
                target = self._gathered[first:last, begin:end]
                shared = self._spec.heads[number] < self._world
                target.add_(part) if shared else target.copy_(part)
            if self.weight is not None and self._by_slab:
                begins = peer == self._rank and number == 0
                self._add(part, self.weight[:, begin:end], first, last, begins)
        self._whole += whole
        if not whole:
            self._tiles[first, last] += 1
        if self.weight is None or self._by_slab:
            return
        if self._whole + self._tiles[first, last] == self._world:
            assert self._gathered is not None
            rows = self._gathered[first:last]
            rows = apart(rows) if rows.dtype is torch.bfloat16 else rows
            self._add(rows, self.weight, first, last, begins=True)

    def _add(
        self, x: torch.Tensor, weight: torch.Tensor, first: int, last: int, begins: bool
    ) -> None:
        """Add x @ weight.T to rows of the result, which it ``begins`` to write."""
        assert self._out is not None
        out, by = self._out[first:last], weight.t()
        if not begins:
            torch.addmm(out, x, by, out=out)
        elif self.bias is None:
            torch.mm(x, by, out=out)
        else:
            torch.addmm(self.bias, x, by, out=out)

    def results(self) -> list[torch.Tensor]:
        """Return y [batch, own length, N], and the gathered heads if they were asked for."""
        outs = []
        if self._out is not None:
            length = self.tokens.lengths[self._rank]
            outs = [self._out.view(self.tokens.batch, length, self._out.shape[1])]
        if self.gather:
            assert self._gathered is not None
            outs.append(self._gathered)
        return outs

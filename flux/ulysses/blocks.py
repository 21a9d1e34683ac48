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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from flux.backends.epilogue import apart
from flux.core.spec import OpSpec

FEW_ROWS = 256
"""Own rows up to which AllToAllGemm multiplies all heads at once inside a host. The measurement had
512: of so many, with K = 1024, slabs were faster."""


@dataclass(frozen=True)
class Sequences:
    """The tokens of a call.

    Attributes:
        batch: sequences.
        lengths: of the part of each sequence that each rank has.
    """

    batch: int
    lengths: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(self.batch * length for length in self.lengths)

    @property
    def total(self) -> int:
        """Length of a whole sequence."""
        return sum(self.lengths)

    def pieces(self, rank: int, first: int, last: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield (batch, part of its whole sequence, rows from ``first`` on) of a rank's rows."""
        length, base, at = self.lengths[rank], sum(self.lengths[:rank]), first
        while at < last:
            batch, token = divmod(at, length)
            count = min(last - at, length - token)
            part = slice(base + token, base + token + count)
            yield batch, part, slice(at - first, at - first + count)
            at += count


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
        self.rows = tokens.rows
        self._spec, self._tokens, self._world = spec, tokens, world
        self._x = apart(x) if x.dtype is torch.bfloat16 else x
        self._weight, self._bias = weight, bias
        self._outs = []
        for begin, end in spec.columns_of(world, rank):
            heads = (end - begin) // spec.head_dim
            extents = (heads, tokens.total) if spec.heads_first else (tokens.total, heads)
            self._outs.append(x.new_empty(tokens.batch, *extents, spec.head_dim))
            fill(self._outs[-1])

    def send(self, peer: int, first: int, last: int, block: torch.Tensor) -> None:
        """Multiply rows by the peer's heads: see ``Blocks``."""
        at, rows = 0, self._x[first:last]
        for begin, end in self._spec.columns_of(self._world, peer):
            weight = self._weight[begin:end].t()
            out = block[:, at : at + end - begin]
            if self._bias is None:
                torch.mm(rows, weight, out=out)
            else:
                torch.addmm(self._bias[begin:end], rows, weight, out=out)
            at += end - begin

    def receive(self, peer: int, first: int, last: int, block: torch.Tensor) -> None:
        """Put rows of a peer into the sequence: see ``Blocks``."""
        for batch, part, rows in self._tokens.pieces(peer, first, last):
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
        weight: [K, N]; None: the heads are only gathered.
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
        self.rows = tokens.rows
        self._spec, self._tokens, self._world, self._rank = spec, tokens, world, rank
        self._heads = [heads_of(tensor, spec.heads_first) for tensor in heads]
        self._weight, self._bias = weight, bias
        self._whole, self._tiles = 0, Counter[tuple[int, int]]()
        own, self._gather = self.rows[rank], gather
        self._out = self._gathered = None
        if weight is not None:
            self._out = heads[0].new_empty(own, sum(spec.n))
            fill(self._out)
        self._by_slab = spec.dtype in (torch.float32, torch.float64)
        if inside and own <= FEW_ROWS:
            self._by_slab = False
        if gather or not self._by_slab:
            self._gathered = heads[0].new_empty(own, spec.k)
            fill(self._gathered)
            base = 0
            for count in spec.heads:
                if count < world:  # several ranks have the head, and their gradients are added up
                    self._gathered[:, base : base + count * spec.head_dim] = 0
                base += count * spec.head_dim

    def send(self, peer: int, first: int, last: int, block: torch.Tensor) -> None:
        """Copy the peer's rows of this rank's heads: see ``Blocks``."""
        for batch, part, rows in self._tokens.pieces(peer, first, last):
            at = 0
            for tensor in self._heads:
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
            if self._weight is not None and self._by_slab:
                begins = peer == self._rank and number == 0
                self._add(part, self._weight[begin:end], first, last, begins)
        self._whole += whole
        if not whole:
            self._tiles[first, last] += 1
        if self._weight is None or self._by_slab:
            return
        if self._whole + self._tiles[first, last] == self._world:
            assert self._gathered is not None
            rows = self._gathered[first:last]
            rows = apart(rows) if rows.dtype is torch.bfloat16 else rows
            self._add(rows, self._weight, first, last, begins=True)

    def _add(
        self, x: torch.Tensor, weight: torch.Tensor, first: int, last: int, begins: bool
    ) -> None:
        """Add a product to rows of the result, which it ``begins`` to write."""
        assert self._out is not None
        out = self._out[first:last]
        if not begins:
            torch.addmm(out, x, weight, out=out)
        elif self._bias is None:
            torch.mm(x, weight, out=out)
        else:
            torch.addmm(self._bias, x, weight, out=out)

    def results(self) -> list[torch.Tensor]:
        """Return y [batch, own length, N], and the gathered heads if they were asked for."""
        outs = []
        if self._out is not None:
            length = self._tokens.lengths[self._rank]
            outs = [self._out.view(self._tokens.batch, length, self._out.shape[1])]
        if self._gather:
            assert self._gathered is not None
            outs.append(self._gathered)
        return outs

"""All-to-alls of heads on GPUs: operands, and what stands before and behind the native call.

csrc/cuda_host/cuda_op_exchange.cpp has the pictures. Blocks lie in symmetric memory, one behind the
other by rank, with a row for each token and the columns of the heads that a rank has. Before
AllToAllGemm's call heads are put there, and behind GemmAllToAll's they are taken from there: each
way is one pass over memory.

Heads that ranks share (fewer keys and values than ranks) are gathered once from each of them. They
are added up when all are there, and then multiplied: nothing is overlapped in such a call, which
only a backward makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from flux import _C
from flux.backends.cuda.op_calls import Empty, OpCalls, OpParts
from flux.backends.cuda.operands import row_step
from flux.core.call import Call
from flux.core.layout import Layout
from flux.core.schedule import TileSchedule
from flux.core.sparse_call import Blocks, Sequences
from flux.core.spec import OpSpec
from flux.core.tensors import address_of


def shares_heads(spec: OpSpec, world: int) -> bool:
    """Return whether ranks share heads."""
    return any(heads < world for heads in spec.heads)


def gathered_columns(spec: OpSpec, world: int) -> list[list[tuple[int, int]]]:
    """Return where a row has the columns of each rank, by packed tensor: native ``set_columns``.

    Gathered rows with heads that ranks share have each rank's columns behind those of the last.
    """
    by_rank = [spec.columns_of(world, rank) for rank in range(world)]
    if spec.op.kernel != "ag_gemm" or not shares_heads(spec, world):
        return by_rank
    wide: list[list[tuple[int, int]]] = []
    at = 0
    for columns in by_rank:
        wide.append([])
        for begin, end in columns:
            wide[-1].append((at, at + end - begin))
            at += end - begin
    return wide


class ExchangeCalls(OpCalls):
    """Puts calls of one op of sequence parallelism on streams.

    Args:
        parts: as ``OpCalls`` takes them.
        layout: of symmetric memory.
        data: this rank's symmetric memory.
        world: number of ranks.
        rank: this rank.
    """

    def __init__(
        self,
        parts: OpParts,
        layout: Layout,
        data: torch.Tensor,
        world: int,
        rank: int,
    ) -> None:
        super().__init__(parts)
        spec = self._spec
        self._world = world
        self._rank = rank
        self._width = spec.travelling(world)[0]
        memory = data.view(torch.uint8)[: layout.data_bytes].view(spec.dtype)
        self._blocks = memory[layout.rest_offset // spec.itemsize :]
        self._gathered = memory
        columns = gathered_columns(spec, world)
        self._columns = columns[rank]  # of gathered rows
        self._native.set_columns(columns)

    def close(self) -> None:
        """Let symmetric memory go."""
        self._blocks = self._gathered = torch.empty(0, device="cpu")

    def run(
        self, schedule: TileSchedule, stream: int, call: Call, empty: Empty
    ) -> list[torch.Tensor]:
        """Put a call on a stream: see ``Backend.run``; ``empty`` allocates tensors."""
        assert call.blocks is not None
        if self._spec.op.kernel == "ag_gemm":
            return self._gather(schedule, stream, call.blocks, empty)
        return self._project(schedule, stream, call.blocks, empty)

    # -- GemmAllToAll ------------------------------------------------------------------------------

    def _project(
        self, schedule: TileSchedule, stream: int, blocks: Blocks, empty: Empty
    ) -> list[torch.Tensor]:
        spec, tokens = self._spec, blocks.tokens
        x, weight = self._fit.tensor(blocks.tensors[0]), self._weight(blocks)
        outs, biases = [], []
        for begin, end in spec.columns_of(self._world, self._rank):
            out = empty(tokens.batch * tokens.total, end - begin)
            heads = (end - begin) // spec.head_dim
            middle = (heads, tokens.total) if spec.heads_first else (tokens.total, heads)
            outs.append(out.view(tokens.batch, *middle, spec.head_dim))
            bias = None if blocks.bias is None else blocks.bias[begin:end]
            biases.append(None if bias is None else bias.reshape(heads, spec.head_dim))
            if bias is not None:
                self._device.keep(bias)
        (columns,) = spec.n
        step = row_step(weight.shape, weight.stride())
        operand = (self._address(weight), step, columns, 0, columns, 0, 0)
        self._workspaces.make_room(self._native, schedule, stream, [operand], spec.k)
        rows = (self._address(x), row_step(x.shape, x.stride()), spec.k, 0)
        self._native.project(schedule.native, stream, rows, operand)
        self._device.enqueue(partial(self._place, outs, biases, tokens))
        return outs

    @torch.no_grad()
    def _place(
        self,
        outs: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        tokens: Sequences,
    ) -> None:
        """Take the heads of all tokens from the blocks of all ranks."""
        for out, bias, (first, last) in zip(outs, biases, self._pieces(), strict=True):
            by_token = out.transpose(1, 2) if self._spec.heads_first else out
            for there, part in self._by_rank(by_token, self._gathered, tokens, first, last):
                if bias is None:
                    there.copy_(part)
                else:
                    torch.add(part, bias, out=there)

    def _by_rank(
        self, heads: torch.Tensor, blocks: torch.Tensor, tokens: Sequences, first: int, last: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield heads of the whole sequences, and the same in blocks: of all ranks, or of each.

        Args:
            heads: [batch, sequence, heads, head_dim].
            blocks: of all ranks, one behind the other.
            tokens: of the call.
            first: column of the blocks with which the heads begin.
            last: the column behind them.
        """
        of_heads = heads.shape[2:]
        rows = blocks[: sum(tokens.rows) * self._width].view(-1, self._width)[:, first:last]
        if len(set(tokens.lengths)) == 1:
            parts = heads.unflatten(1, (self._world, tokens.lengths[0]))
            yield (
                parts,
                rows.view(self._world, tokens.batch, tokens.lengths[0], *of_heads).transpose(0, 1),
            )
            return
        token = row = 0
        for length, count in zip(tokens.lengths, tokens.rows, strict=True):
            if count > 0:
                block = rows[row : row + count].view(tokens.batch, length, *of_heads)
                yield heads[:, token : token + length], block
            token, row = token + length, row + count

    # -- AllToAllGemm ------------------------------------------------------------------------------

    def _gather(
        self, schedule: TileSchedule, stream: int, blocks: Blocks, empty: Empty
    ) -> list[torch.Tensor]:
        spec, tokens = self._spec, blocks.tokens
        own, (columns,) = tokens.rows[self._rank], spec.n
        shared = shares_heads(spec, self._world)
        out = None if blocks.weight is None else empty(own, columns)
        kept = None
        if blocks.gather or shared:
            kept = empty(own, spec.k, spec.dtype)
        self._device.keep(*blocks.tensors)
        operand: _C.Operand = (0, 0, 0, 0, 0, 0, 0)
        if out is not None and not shared:
            weight, bias = self._weight(blocks), blocks.bias
            bias = None if bias is None else self._fit.tensor(bias)
            step = row_step(weight.shape, weight.stride())
            at_bias = 0 if bias is None else self._address(bias)
            places = (address_of(out), columns, at_bias, 0)
            operand = (self._address(weight), step, columns, *places)
        self._workspaces.make_room(self._native, schedule, stream, [operand], spec.k)
        self._native.begin_heads(schedule.native, stream)
        self._device.enqueue(partial(self._stage, blocks.tensors, tokens))
        self._native.gather_heads(schedule.native, stream, operand)
        if kept is not None:
            self._device.enqueue(partial(self._keep, kept, shared))
        if out is not None and shared:
            assert kept is not None
            self._device.enqueue(partial(self._multiply, kept, blocks, out))
        outs = [] if out is None else [out.view(tokens.batch, tokens.lengths[self._rank], columns)]
        return [*outs, kept] if blocks.gather and kept is not None else outs

    @torch.no_grad()
    def _stage(self, tensors: Sequence[torch.Tensor], tokens: Sequences) -> None:
        """Put the own heads where each rank reads those of its tokens; own ones in their place."""
        own, first_token = tokens.rows[self._rank], sum(tokens.lengths[: self._rank])
        gathered = self._gathered_rows(own)
        length = tokens.lengths[self._rank]
        for heads, (first, last), (begin, end) in zip(
            tensors, self._pieces(), self._columns, strict=True
        ):
            for source, block in self._by_rank(heads, self._blocks, tokens, first, last):
                block.copy_(source)
            mine = heads[:, first_token : first_token + length]
            gathered[:, begin:end].view(mine.shape).copy_(mine)

    @torch.no_grad()
    def _keep(self, kept: torch.Tensor, shared: bool) -> None:
        """Copy the gathered heads; add up those that ranks share, in float32."""
        rows = self._gathered_rows(kept.shape[0])
        if not shared:
            kept.copy_(rows)
            return
        parts, base = rows.view(-1, self._world, self._width), 0
        for heads, (first, last) in zip(self._spec.heads, self._pieces(), strict=True):
            columns = heads * self._spec.head_dim
            part = parts[:, :, first:last]
            if heads < self._world:
                each = part.unflatten(1, (heads, self._world // heads))
                part = each.sum(2, dtype=torch.float32)
            kept[:, base : base + columns].view(part.shape).copy_(part)
            base += columns

    @torch.no_grad()
    def _multiply(self, kept: torch.Tensor, blocks: Blocks, out: torch.Tensor) -> None:
        assert blocks.weight is not None
        if blocks.bias is None:
            torch.mm(kept, blocks.weight.t(), out=out)
        else:
            torch.addmm(blocks.bias, kept, blocks.weight.t(), out=out)

    # -- pieces ------------------------------------------------------------------------------------

    def _gathered_rows(self, own: int) -> torch.Tensor:
        wide = self._world * self._width
        return self._gathered[: own * wide].view(own, wide)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the columns of a block that each packed tensor has."""
        at = 0
        for begin, end in self._spec.columns_of(self._world, self._rank):
            yield at, at + end - begin
            at += end - begin

    def _weight(self, blocks: Blocks) -> torch.Tensor:
        """Return the weight as the kernel loads it: as the user keeps it."""
        assert blocks.weight is not None
        weight = blocks.weight.t() if self._spec.transpose_weight else blocks.weight
        return self._fit.tensor(weight)

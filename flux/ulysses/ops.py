"""GemmAllToAll and AllToAllGemm: sequence parallelism by heads (DeepSpeed-Ulysses), overlapped.

    ranks share the sequence   x [batch, own part of it, hidden]
    GemmAllToAll               each rank projects its tokens; heads go to their ranks
    attention                  q, k, v [batch, own heads, whole sequence, head_dim]
    AllToAllGemm               tokens go back to their ranks; all heads @ weight
    ranks share the sequence   y [batch, own part of it, hidden]

Every rank has whole weights. Blocks travel between ranks (flux/ulysses/blocks.py) in the order of
csrc/schedule/exchange.h.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from flux import _C
from flux.backends.epilogue import spoil
from flux.core.backend import OverlapHooks
from flux.core.call import Call, CallChecker
from flux.core.env import POISON
from flux.core.knobs import AllToAllOp, Knobs, Topology
from flux.core.problem import ceil_div
from flux.core.schedule import TileSchedule
from flux.core.sparse_call import Sequences
from flux.ops.autocast import as_autocast
from flux.ops.base import MAX_SCHEDULES, TensorParallelOp
from flux.select.all_to_all import block_schedule
from flux.ulysses.blocks import HeadBlocks, ProjectedBlocks


class ProjectionOperands:
    """What a call passes beside x: it takes the place of a dense op's weights.

    Attributes:
        weight: as the user keeps it; None: heads are gathered, and not multiplied.
        bias: or None.
        lengths: of the part of the sequence that each rank has; empty: equal parts.
        gather: return the gathered heads too.
    """

    def __init__(
        self,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        lengths: Sequence[int],
        gather: bool = False,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.lengths = lengths
        self.gather = gather


class BlocksChecker(CallChecker):
    """Checks the calls of an op of sequence parallelism on one rank."""

    inside = False
    """Whether all ranks are on one host."""

    def check(
        self,
        x: Any,
        weights: Any,
        biases: Sequence[torch.Tensor | None],
        m: int | None,
        scales: Sequence[torch.Tensor] = (),
    ) -> Call:
        """Check a call: see ``CallChecker.check``; ``weights`` are ``ProjectionOperands``."""
        operands: ProjectionOperands = weights
        spec = self.spec
        weight = None if operands.weight is None else self._weight(operands.weight)
        bias = None if operands.bias is None else self._bias(operands.bias, sum(spec.n))
        where = self.world, self.rank
        fill = spoil if POISON.get() else _leave
        blocks: HeadBlocks | ProjectedBlocks
        if spec.op is AllToAllOp.gemm_all_to_all:
            x, tokens = self._tokens_of(x, operands.lengths)
            assert weight is not None
            blocks = ProjectedBlocks(spec, x, weight, bias, tokens, *where, fill)
        else:
            heads, tokens = self._heads_of(x, operands.lengths)
            x = heads[0]
            gather, inside = operands.gather, self.inside
            blocks = HeadBlocks(spec, heads, weight, bias, tokens, *where, gather, fill, inside)
        said = repr((tokens.batch, tokens.lengths))
        digest = zlib.crc32(said.encode()) & 0x7FFFFFFF
        m = self.world * max(tokens.rows)
        return Call(m, x, (), self.columns, (None,), blocks=blocks, digest=digest)

    def _weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight as [N, K]."""
        spec = self.spec
        weight = self._tensor("weight", weight, spec.dtype)
        if weight.shape != self.shapes[0]:
            raise ValueError(
                f"{spec.label}: weight must be {list(self.shapes[0])}"
                f"{' (transpose_weight)' if spec.transpose_weight else ''}, "
                f"got {list(weight.shape)}"
            )
        return weight.t() if spec.transpose_weight else weight

    def _tokens_of(self, x: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, Sequences]:
        """Return x as [rows, K], and the tokens of all ranks."""
        spec = self.spec
        x = self._tensor("x", x, spec.dtype)
        if x.dim() != 3 or x.shape[2] != self.k:
            raise ValueError(
                f"{spec.label}: x must be [batch, own part of the sequence, {self.k}], "
                f"got {list(x.shape)}"
            )
        tokens = self._sequences(x.shape[0], lengths or [x.shape[1]] * self.world)
        if x.shape[1] != tokens.lengths[self.rank]:
            raise ValueError(
                f"{spec.label}: rank {self.rank} has {tokens.lengths[self.rank]} tokens of each "
                f"sequence by seq_lens, and x has {x.shape[1]}"
            )
        rows = x.reshape(-1, self.k)
        return rows if rows.stride(1) == 1 or rows.numel() == 0 else rows.contiguous(), tokens

    def _heads_of(
        self, tensors: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> tuple[list[torch.Tensor], Sequences]:
        """Return the heads of each packed tensor, and the tokens of all ranks."""
        spec, label = self.spec, self.spec.label
        if len(tensors) != len(spec.heads):
            raise ValueError(f"{label}: x must be {len(spec.heads)} tensors, got {len(tensors)}")
        heads = [self._tensor("x", tensor, spec.dtype) for tensor in tensors]
        first = heads[0]
        total = first.shape[2 if spec.heads_first else 1] if first.dim() == 4 else -1
        for tensor, (begin, end) in zip(heads, spec.columns_of(self.world, 0), strict=True):
            count = (end - begin) // spec.head_dim
            middle = [count, total] if spec.heads_first else [total, count]
            if total < 0 or list(tensor.shape) != [first.shape[0], *middle, spec.head_dim]:
                names = f"{count}, sequence" if spec.heads_first else f"sequence, {count}"
                raise ValueError(
                    f"{label}: x must be [batch, {names}, {spec.head_dim}], "
                    f"got {list(tensor.shape)}"
                )
        if not lengths and total % self.world:
            raise ValueError(
                f"{label}: a sequence of {total} is no multiple of the world of {self.world}: "
                "pass seq_lens"
            )
        tokens = self._sequences(first.shape[0], lengths or [total // self.world] * self.world)
        if tokens.total != total:
            raise ValueError(f"{label}: seq_lens add up to {tokens.total}, and x has {total}")
        return heads, tokens

    def _sequences(self, batch: int, lengths: Sequence[int]) -> Sequences:
        label, most = self.spec.label, ceil_div(self.spec.max_m, self.world)
        valid = all(type(length) is int and length >= 0 for length in lengths)
        if len(lengths) != self.world or not valid:
            raise ValueError(
                f"{label}: seq_lens must have a length for each of {self.world} ranks, "
                f"got {list(lengths)}"
            )
        tokens = Sequences(batch, tuple(lengths))
        if not 1 <= max(tokens.rows) <= most:
            raise ValueError(
                f"{label}: the largest part of a rank must have 1 to ceil(max_m / world) = {most} "
                f"tokens, got {batch} x {max(lengths)}"
            )
        return tokens


def _leave(tensor: torch.Tensor) -> object:
    return tensor


class UlyssesOp(TensorParallelOp):
    """What the two ops have in common.

    Args:
        group: process group, its name, or None for the default group.
        max_m: most tokens of any call: batch times sequence, or, where parts of the sequence
            differ, the world times the tokens of the largest part.
        heads: number of heads, of all ranks, a multiple of the world: rank r has the r-th part. A
            sequence of numbers: several tensors are packed one after the other (queries, keys,
            values). Those behind the first may have fewer heads: a divisor of the world. Ranks then
            share them.
        head_dim: elements of a head.
        dtype: of x and the weight: float64, float32, bfloat16 or float16; on GPUs the last two.
            Under autocast to it, others are cast as those of torch.nn.functional.linear.
        transpose_weight: the weight is [K, N] instead of [N, K].
        heads_first: heads are [batch, own heads, sequence, head_dim], which
            scaled_dot_product_attention takes, else [batch, sequence, own heads, head_dim].
        backend, transport, timeout_s, topology: as for AGGemm.
        tuning: as for AGGemm; of ``flux.Knobs`` path (fused or unfused) and comm_tile_rows count.

    Raises:
        ValueError, TypeError, OSError, PeerFailedError, PeerTimeoutError: as for AGGemm.
    """

    kind: AllToAllOp
    _checks = BlocksChecker

    def __init__(
        self,
        group: dist.ProcessGroup | str | None = None,
        *,
        max_m: int,
        n: int,
        k: int,
        heads: int | Sequence[int],
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        transpose_weight: bool = False,
        heads_first: bool = True,
        backend: str | None = None,
        transport: str | None = None,
        tuning: str | Knobs = "cache",
        timeout_s: float = 600.0,
        topology: Topology | None = None,
    ) -> None:
        self._by_rows: dict[tuple[int, ...], TileSchedule] = {}
        super().__init__(
            group,
            max_m=max_m,
            n=n,
            k=k,
            dtype=dtype,
            transpose_weight=transpose_weight,
            reduce="sum",
            backend=backend,
            transport=transport,
            tuning=tuning,
            timeout_s=timeout_s,
            topology=topology,
            heads=tuple(heads) if isinstance(heads, (list, tuple)) else (heads,),
            head_dim=head_dim,
            heads_first=heads_first,
        )
        cast(BlocksChecker, self._checker).inside = self.topology.nodes == 1

    def _make_schedule(self, m: int, knobs: Knobs) -> TileSchedule:
        rows = [_C.core.row_count(m, self.world, rank) for rank in range(self.world)]
        return self._block_schedule(tuple(rows), knobs)

    def _schedule_of(self, call: Call) -> TileSchedule:
        assert call.blocks is not None
        rows = call.blocks.rows
        schedule = self._by_rows.get(rows)
        if schedule is None:
            if len(self._by_rows) >= MAX_SCHEDULES:
                self._by_rows.clear()
            schedule = self._block_schedule(rows, self._choice.knobs(call.m))
            if self._backend is not None:
                self._backend.require_room(schedule)
            self._by_rows[rows] = schedule
        return schedule

    def _with_knobs(self, call: Call, knobs: Knobs) -> TileSchedule:
        assert call.blocks is not None
        return self._block_schedule(call.blocks.rows, knobs)

    def _block_schedule(self, rows: tuple[int, ...], knobs: Knobs) -> TileSchedule:
        width, dtype = self.spec.travelling(self.world)
        sizes = (width, self.spec.k)
        if self.kind is AllToAllOp.all_to_all_gemm:
            sizes = (sum(self.spec.n), width)
        row_bytes = width * dtype.itemsize
        cluster = None if self._backend is None else self._backend.cluster
        where = (self.rank, self.topology, knobs, cluster)
        return block_schedule(self.kind, rows, sizes, row_bytes, *where)

    def own_length(self, lengths: Sequence[Any], total: Any) -> Any:
        """Return this rank's part of a sequence: of ``lengths``, or of equal parts of ``total``."""
        return lengths[self.rank] if len(lengths) else total // self.world

    def _start(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        operands: ProjectionOperands,
        hooks: OverlapHooks | None = None,
    ) -> list[torch.Tensor]:
        """Make a call with plain tensors, without autograd."""
        given = cast(Any, (x, operands))
        return self._guarded(self._call, *given, (None,), None, (), False, hooks)

    def _lengths(self, seq_lens: Sequence[int] | None) -> list[int]:
        if seq_lens is None:
            return []
        listed = isinstance(seq_lens, (list, tuple)) and seq_lens
        if not listed or not all(isinstance(n, (int, torch.SymInt)) for n in seq_lens):
            self._turn_away(TypeError, f"seq_lens must be a list of lengths, got {seq_lens!r}")
        return list(seq_lens)


class GemmAllToAll(UlyssesOp):
    """``heads = all_to_all(x @ weight.T + bias)``: tokens are projected, heads go to their rank.

    A rank computes the heads of another rank, and they leave while it computes those of the next
    one; its own come last.

    Arguments of the constructor: see ``UlyssesOp``. ``k``: the hidden size. ``n`` follows from
    ``heads`` and ``head_dim``.
    """

    kind = AllToAllOp.gemm_all_to_all

    def __init__(
        self,
        group: dist.ProcessGroup | str | None = None,
        *,
        max_m: int,
        k: int,
        heads: int | Sequence[int],
        head_dim: int,
        n: int | None = None,
        **options: Any,
    ) -> None:
        columns = _packed(heads, head_dim, n)
        super().__init__(
            group, max_m=max_m, n=columns, k=k, heads=heads, head_dim=head_dim, **options
        )

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        seq_lens: Sequence[int] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the op. Collective.

        Args:
            x: [batch, own part of the sequence, K].
            weight: [N, K], whole, of all heads.
            bias: [N], or None.
            seq_lens: length of the part of each rank, the same on all ranks, some may be 0; None:
                equal parts.

        Returns:
            The own heads of all tokens, [batch, own heads, sequence, head_dim], or with
            ``heads_first=False`` [batch, sequence, own heads, head_dim]; of several packed
            tensors a tuple.

        Raises:
            As for AGGemm. Ranks that pass other lengths or batches all get a ValueError.
        """
        x, (weight,), bias = as_autocast(self.spec.dtype, x, [weight], bias)
        lengths = self._lengths(seq_lens)
        biases = [] if bias is None else [bias]
        if self._plain(x, weight, *biases):
            outs = self._start(x, ProjectionOperands(weight, bias, lengths))
        else:
            self._check_tensors(x, weight, *biases)
            outs = self._dispatched(x, weight, biases, lengths, self.handle)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def overlapped(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        lengths: Sequence[int],
        hooks: OverlapHooks,
    ) -> list[torch.Tensor]:
        """Run the op on plain tensors without autograd; the hooks run when all rows have left."""
        return self._start(x, ProjectionOperands(weight, None, lengths), hooks)


class AllToAllGemm(UlyssesOp):
    """``y = all_to_all(x) @ weight.T + bias``: tokens go to their rank, which projects all heads.

    A rank multiplies its own heads, then those of the other ranks as they arrive: slabs of K.

    Arguments of the constructor: see ``UlyssesOp``. ``n``: columns of the result. ``k`` follows
    from ``heads`` and ``head_dim``.
    """

    kind = AllToAllOp.all_to_all_gemm

    def __init__(
        self,
        group: dist.ProcessGroup | str | None = None,
        *,
        max_m: int,
        n: int,
        heads: int | Sequence[int],
        head_dim: int,
        k: int | None = None,
        **options: Any,
    ) -> None:
        depth = _packed(heads, head_dim, k)
        super().__init__(
            group, max_m=max_m, n=n, k=depth, heads=heads, head_dim=head_dim, **options
        )

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        seq_lens: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run the op. Collective.

        Args:
            x: the own heads of all tokens, as GemmAllToAll returns them.
            weight: [N, K], whole, of all heads.
            bias: [N], or None.
            seq_lens: as for GemmAllToAll.

        Returns:
            [batch, own part of the sequence, N].

        Raises:
            As for GemmAllToAll.
        """
        x, (weight,), bias = as_autocast(self.spec.dtype, x, [weight], bias)
        lengths = self._lengths(seq_lens)
        biases = [] if bias is None else [bias]
        if self._plain(x, weight, *biases):
            return self._start([x], ProjectionOperands(weight, bias, lengths))[0]
        self._check_tensors(x, weight, *biases)
        # The gradient of the weight needs the gathered heads, which are kept in place of x.
        gather = torch.is_grad_enabled()
        out: torch.Tensor = self._dispatched([x], weight, biases, lengths, gather, self.handle)[0]
        return out

    def gathered(
        self,
        heads: Sequence[torch.Tensor],
        weight: torch.Tensor | None,
        lengths: Sequence[int],
        gather: bool,
    ) -> list[torch.Tensor]:
        """Run the op on plain tensors without autograd.

        Args:
            heads: of each packed tensor. Those that ranks share are added up over these.
            weight: None: there is no product.
            lengths: of the part of each rank; empty: equal parts.
            gather: return the gathered heads too, [own tokens, K].
        """
        return self._start(heads, ProjectionOperands(weight, None, lengths, gather))


def _packed(heads: Any, head_dim: Any, size: int | None) -> int:
    """Return the packed dimension; of arguments that OpSpec refuses, 1."""
    counts = heads if isinstance(heads, (list, tuple)) else [heads]
    if not all(type(value) is int for value in (*counts, head_dim)):
        return 1
    packed = sum(counts) * head_dim
    return packed if size is None else size

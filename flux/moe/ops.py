"""AGGroupedGemm, GroupedGemmRS and GroupedGemmAR: the two GEMMs of a mixture of experts.

    router              each token -> topk experts, the same on all ranks
    AGGroupedGemm       x [M/W tokens, K]  ->  gather, sort by expert, grouped GEMM  ->  [R, N/tp]
    activation          the user's
    GroupedGemmRS       [R, K/tp]  ->  grouped GEMM, weighted sum over topk, scatter  ->  [M/W, N]

W = ep * tp ranks. Rank r has the experts of part r // tp of ep (split as rows are), and of each the
part r % tp of tp of n or k. With ep = 1 every rank has a part of every expert. R: routed rows, the
pairs of a token and one of the rank's experts (flux/moe/routing.py).

Communication is that of AGGemm, GemmRS and GemmAR, with their schedules, signals and knobs: tokens
travel, and only the product of a slab of tokens is grouped (flux/moe/product.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from flux import _C
from flux.core.backend import OverlapHooks, RoutingBackend
from flux.core.call import rows_of_call
from flux.core.knobs import Knobs, Op, Topology
from flux.core.schedule import TileSchedule
from flux.core.sparse_call import DeviceChoices, MadeMaps
from flux.moe.checks import GroupedChecker, Operands
from flux.moe.routing import Routing, check_integers, routing_of
from flux.ops.autocast import as_autocast
from flux.ops.base import TensorParallelOp

Weights = torch.Tensor | Sequence[torch.Tensor]


class GroupedOp(TensorParallelOp):
    """What the ops of a mixture of experts have in common.

    Args:
        group: process group, its name, or None for the default group.
        max_m: largest number of global tokens M of any call.
        n: columns of an expert's result, of all ranks.
        k: depth of an expert's GEMM, of all ranks.
        experts: number of experts, of all ranks.
        topk: experts of a token.
        ep: parts that the experts are split into; it divides the world. 1: every rank has a part
            of each expert.
        dtype: of x and the weights: float64, float32, bfloat16, float16, or float8_e4m3fn, whose
            results, and biases, are bfloat16. GPUs: the last three; float8: sm_90a.
        transpose_weight: an expert's weight is [K, N] instead of [N, K].
        activation, gated: AGGroupedGemm only.
        scaling: of float8: ``"tensor"`` (a factor for x, one for each expert's weight) or ``"row"``
            (for each row of x and of a weight). No backward then.
        fast_accum: as for AGGemm.
        backend, transport, tuning, timeout_s, topology: as for AGGemm.

    Raises:
        ValueError, TypeError, OSError, PeerFailedError, PeerTimeoutError: as for AGGemm.
    """

    _checks = GroupedChecker
    dispatches = False
    """Whether tokens travel only to, or from, ranks with one of their experts."""

    def __init__(
        self,
        group: dist.ProcessGroup | str | None = None,
        *,
        max_m: int,
        n: int,
        k: int,
        experts: int,
        topk: int,
        ep: int = 1,
        dtype: torch.dtype = torch.float32,
        transpose_weight: bool = False,
        backend: str | None = None,
        transport: str | None = None,
        tuning: str | Knobs = "cache",
        timeout_s: float = 600.0,
        topology: Topology | None = None,
        activation: str = "none",
        gated: bool = False,
        scaling: str = "none",
        fast_accum: bool = False,
    ) -> None:
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
            activation=activation,
            scaling=scaling,
            fast_accum=fast_accum,
            experts=experts,
            topk=topk,
            ep=ep,
            gated=gated,
            dispatches=self.dispatches,
        )

    def routing(self, experts: torch.Tensor) -> Routing:
        """Return the routed rows of this rank for the experts of all tokens, [M, topk]. Local.

        Equal experts may have the same routing: do not write to its tensors.
        """
        checker = cast(GroupedChecker, self._checker)
        return routing_of(experts, checker.total, checker.first, checker.count, self.world)

    def rows_by_expert(self, experts: torch.Tensor) -> torch.Tensor:
        """Return how many routed rows each of this rank's experts has, int64 [E]. Local.

        Computed where ``experts`` [M, topk] are: the host does not wait for them.
        """
        first, last = self.local_experts.start, self.local_experts.stop
        experts = experts.reshape(-1).to(torch.int64)
        here = (experts >= first) & (experts < last)
        counts = torch.zeros(last - first + 1, dtype=torch.int64, device=experts.device)
        numbers = torch.where(here, experts - first, last - first)
        return counts.scatter_add_(0, numbers, torch.ones_like(numbers))[:-1]

    @property
    def local_experts(self) -> range:
        """This rank's experts."""
        checker = cast(GroupedChecker, self._checker)
        return range(checker.first, checker.first + checker.count)

    @property
    def local_part(self) -> slice:
        """This rank's part of each expert's n (AGGroupedGemm) or k."""
        parts, size = self.world // self.spec.ep, self.spec.k
        if self.kind.gathers:
            (size,) = self.spec.n
        part = self.rank % parts
        bounds = (_C.core.row_begin(size, parts, part), _C.core.row_end(size, parts, part))
        return slice(*bounds)

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the bias of a sum: the first of those that share an expert."""
        return cast(GroupedChecker, self._checker).adds_bias

    def _make_schedule(self, m: int, knobs: Knobs) -> TileSchedule:
        if self._is_cut_in_vain(m, knobs):
            knobs = replace(knobs, tile=(m, self.spec.scheduled_n(self.world)))
        return super()._make_schedule(m, knobs)

    def _is_cut_in_vain(self, m: int, knobs: Knobs) -> bool:
        """Return whether slabs of rows would cost more than they save, on CPUs of one host.

        Each slab packs the weights of all experts again, E * N * K/tp elements, and saves a copy of
        partials, M * N. With E * K/tp = 8 to 16 M, slabs took 1.02 to 1.08 of the unfused path's
        time, and whole products 0.91 to 0.97; with 1/2 M or less, slabs took 0.7 to 1.0 of these.
        """
        spec, on_gpus = self.spec, self._backend is not None and self._backend.cluster is not None
        open_ = knobs.path in (None, "fused") and knobs.tile is None and knobs.store != "direct"
        if not open_ or on_gpus or self.topology.nodes > 1 or not self.kind.reduces:
            return False
        _, experts = spec.local_experts(self.world, 0)  # on all ranks as on the first
        return m < experts * spec.local_k(self.world, 0)

    def _run(
        self,
        x: torch.Tensor,
        weights: Weights,
        bias: torch.Tensor | None,
        experts: torch.Tensor,
        probs: torch.Tensor | None,
        max_rows: int | None,
        gather: bool,
        *of_scales: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Make a call, through the dispatcher where it has to see it."""
        x, listed, bias = self._as_autocast(x, weights, bias)
        biases = [] if bias is None else [bias]
        of_choices = [] if probs is None else [probs]
        scales = [scale for scale in of_scales if scale is not None]
        tensors = [x, *listed, *biases, experts, *of_choices, *scales]
        if self._plain(*tensors):
            operands = Operands(listed, bias, experts, probs, max_rows=max_rows, scales=scales)
            return self.execute(x, operands, gather)
        self._check_tensors(*tensors)
        if self.dispatches:  # the backward would dispatch them again
            gather = torch.is_grad_enabled() and any(w.requires_grad for w in listed)
        rest = (gather,) if self.kind.gathers else (of_choices,)
        rest = (*rest, self.handle, max_rows, scales)
        outs = self._dispatched(x, list(listed), biases, experts, *rest)
        return outs if self.kind.gathers else [outs]

    def _as_autocast(
        self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor], torch.Tensor | None]:
        """Return the operands as ``as_autocast`` does, the weights as a sequence."""
        weights = [weights] if isinstance(weights, torch.Tensor) else weights
        if not isinstance(weights, (list, tuple)):
            text = f"weights must be a tensor or a sequence of them, got {type(weights).__name__}"
            self._turn_away(TypeError, text)
        return as_autocast(self.spec.dtype, x, weights, bias)

    def execute(
        self,
        x: torch.Tensor,
        operands: Operands,
        gather: bool = False,
        hooks: OverlapHooks | None = None,
    ) -> list[torch.Tensor]:
        """Make a call on plain tensors, without autograd.

        Args:
            x: as the caller passed it.
            operands: the other arguments.
            gather: return the gathered tokens too, [M, K]; of an op that dispatches, or if
                ``operands`` keep them, the routed ones, [R, K].
            hooks: the caller's work beside the call, if any.
        """
        operands.keeps |= gather and self.dispatches
        whole = gather and not operands.keeps
        others = cast(Any, operands)
        outs = self._guarded(self._call, x, others, (None,), None, (), whole, hooks)
        with_room = [] if operands.routed is None else [operands.routed]
        if operands.rows is not None:
            for tensor in [*outs[: self.kind.gathers], *with_room]:
                tensor[operands.rows :].zero_()
        return [*outs, *with_room]

    def _call(self, x: torch.Tensor, weights: Any, *rest: Any) -> list[torch.Tensor]:
        operands: Operands = weights
        operands.on_device = self._kernels_route(operands.experts)
        operands.make_maps = self._make_maps
        return super()._call(x, weights, *rest)

    def _make_maps(self, choices: DeviceChoices) -> MadeMaps:
        """Have a kernel make the maps of a call now."""
        checker, backend = cast(GroupedChecker, self._checker), cast(RoutingBackend, self._backend)
        self._begun = True  # what goes wrong from here on, but for arguments, ends the op
        schedule = self.schedule(choices.experts.shape[0])
        return backend.make_maps(schedule, choices, checker.rows_of_weight)

    def _kernels_route(self, experts: object) -> bool:
        """Return whether kernels of this call make their maps."""
        backend = self._backend
        if backend is None or not backend.asynchronous:
            return False
        if not isinstance(experts, torch.Tensor) or experts.dim() != 2:
            return False
        try:
            return self.schedule(experts.shape[0]).knobs.path != "unfused"
        except ValueError:
            return False  # the call itself raises it, which tells the peers


class AGGroupedGemm(GroupedOp):
    """``y[r] = activation(all_gather(x_shard)[token of r] @ weight[expert of r].T + bias)``.

    The AllGather of tokens is hidden behind the grouped GEMM, which works on the tokens that are
    there: the own ones first, then the others in the order in which they arrive (Comet and Flux
    papers: dependent tiles are computed as their rows come).

    Arguments of the constructor: see ``GroupedOp``. ``activation``: ``"none"``, ``"gelu"`` or
    ``"silu"``; with ``gated`` weights have 2 N/tp rows, and the activation of the first half of the
    product multiplies the second half (SwiGLU, GeGLU). No backward then.
    """

    kind = Op.ag_gemm

    @property
    def library_name(self) -> str:
        """Name in ``torch.ops.flux``."""
        return "ag_grouped_gemm"

    def __call__(
        self,
        x_shard: torch.Tensor,
        weights: Weights,
        experts: torch.Tensor,
        bias: torch.Tensor | None = None,
        return_gathered: bool = False,
        max_rows: int | None = None,
        scale_x: torch.Tensor | None = None,
        scale_weight: torch.Tensor | None = None,
    ) -> Any:
        """Run the op. Collective.

        Args:
            x_shard: own tokens, [own rows, K], or [ceil(M/W), K] padded at the end.
            weights: [E, N/tp, K] of this rank's E experts, or a sequence of E weights.
            experts: integers [M, topk]: the experts of all tokens, the same on all ranks; below 0:
                that choice is dropped.
            bias: [E, N/tp], or None.
            return_gathered: return the gathered tokens too.
            max_rows: routed rows that a rank has at most, the same on all ranks; M * topk always
                suffices. On GPUs the host then waits for nothing; else for the number R.
            scale_x: float32 [rows of x_shard] with scaling = row, [1] with tensor.
            scale_weight: float32 [E, N/tp] (gated: 2 N/tp), or [E].

        Returns:
            y [R, N/tp], sorted by expert, then by token (``routing`` has the maps); with
            ``return_gathered`` a pair (that, x_full [M, K]). With ``max_rows`` y has that many
            rows, and zeros behind R.

        Raises:
            As for AGGemm. All ranks get a ValueError if a rank has more than ``max_rows``, and on
            CPUs if ranks pass different ``experts``, which no rank of a GPU compares. GPUs raise a
            RuntimeError for too many rows later, as for what kernels wait for.
        """
        scales = (scale_x, scale_weight)
        outs = self._run(x_shard, weights, bias, experts, None, max_rows, return_gathered, *scales)
        return (outs[0], outs[1]) if return_gathered else outs[0]

    def gather_choices(
        self, experts: torch.Tensor, probs: torch.Tensor, m: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather what a router chose for the own tokens, as calls take it. Collective.

        Args:
            experts: integers [own rows, topk].
            probs: floating-point [own rows, topk]; its gradient is that of the own rows, which each
                rank gets whole from GroupedGemmRS.
            m: global tokens; None: own rows times the world.

        Returns:
            experts int64 [M, topk] and probs [M, topk], the same on all ranks.

        Raises:
            As for a call.
        """
        for tensor in (experts, probs):
            if not isinstance(tensor, torch.Tensor):
                self._turn_away(TypeError, f"expected a tensor, got {type(tensor).__name__}")
        rows = experts.shape[:1].numel() * self.world if m is None else m
        result: tuple[torch.Tensor, torch.Tensor]
        result = self._dispatched(experts, probs, rows, self.handle, name="gather_choices")
        return result

    def share_choices(
        self, experts: torch.Tensor, probs: torch.Tensor, m: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather what a router chose: see ``gather_choices``. Both travel in one collective."""
        try:
            check_integers(experts)
            parts = []
            for name, tensor in (("experts", experts), ("probs", probs)):
                tensor = self._checker._tensor(name, tensor, tensor.dtype)
                if tensor.dim() != 2 or tensor.shape[1] != self.spec.topk:
                    text = f"{name} must be [rows, topk = {self.spec.topk}], got"
                    raise ValueError(f"{self.spec.label}: {text} {list(tensor.shape)}")
                total, own = rows_of_call(self.spec, self.world, self.rank, tensor.shape[0], m)
                parts.append(_dense(tensor[:own]))
        except (TypeError, ValueError) as error:
            self._refuse(error)
            raise
        parts[0] = parts[0].to(torch.int64)
        self._begun = True
        if self._backend is None:
            return parts[0], parts[1]
        said = f"{total} {parts[1].dtype}".encode()
        self._backend.meet(None, zlib.crc32(said) & 0x7FFFFFFF)()
        packed = torch.cat([part.view(torch.uint8) for part in parts], dim=1)
        full = self._unfused.gather_rows(packed, total)
        columns = parts[0].shape[1] * parts[0].itemsize
        of_ranks = full[:, :columns], full[:, columns:]
        experts, probs = (
            _dense(mine).view(part.dtype) for mine, part in zip(of_ranks, parts, strict=True)
        )
        return experts, probs


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that may be viewed as another dtype.

    ``contiguous`` keeps any stride of an extent of one, or of a tensor without elements.
    """
    return tensor.clone(memory_format=torch.contiguous_format)


class GroupedGemmRS(GroupedOp):
    """``z[t] = reduce_scatter(sum over r of token t: probs * (x[r] @ weight[expert of r].T + b))``.

    The products of a token's experts are weighted and summed in float32 (float64 of float64), in
    the order of the choices. Tokens leave for their owner as soon as they are complete, and the own
    ones come last. The owner sums over the ranks, in rank order.

    Arguments of the constructor: see ``GroupedOp``.
    """

    kind = Op.gemm_rs

    @property
    def library_name(self) -> str:
        """Name in ``torch.ops.flux``."""
        return "grouped_gemm_ar" if self.kind.all_reduces else "grouped_gemm_rs"

    def __call__(
        self,
        x: torch.Tensor,
        weights: Weights,
        experts: torch.Tensor,
        probs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        max_rows: int | None = None,
        scale_x: torch.Tensor | None = None,
        scale_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the op. Collective.

        Args:
            x: [R, K/tp], one row for each token's expert on this rank, as AGGroupedGemm returns.
            weights: [E, N, K/tp] of this rank's E experts, or a sequence of E weights.
            experts: as for AGGroupedGemm.
            probs: [M, topk], any floating-point dtype: the weight of each choice; None: 1. The same
                on all ranks.
            bias: [E, N], or None; added once, by the first rank of those that share an expert.
            max_rows: as for AGGroupedGemm; x has that many rows, and those behind R are not read.
            scale_x: float32 [rows of x] with scaling = row, [1] with tensor.
            scale_weight: float32 [E, N], or [E].

        Returns:
            This rank's tokens, [own rows, N]; GroupedGemmAR: all of them, [M, N].

        Raises:
            As for AGGroupedGemm.
        """
        scales = (scale_x, scale_weight)
        return self._run(x, weights, bias, experts, probs, max_rows, False, *scales)[0]


class GroupedGemmAR(GroupedGemmRS):
    """GroupedGemmRS whose summed tokens are handed to every rank: [M, N], bitwise the same."""

    kind = Op.gemm_ar

"""AllGather fused into the GEMM that reads it (Flux paper, Algorithms 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from flux.core.backend import OverlapHooks, nothing
from flux.core.knobs import Knobs, Op, Topology
from flux.ops.base import TensorParallelOp
from flux.ops.transforms import call


class AGGemm(TensorParallelOp):
    """``y = all_gather(x_shard) @ weight.T + bias``, the gather hidden behind the GEMM.

    Tiles of every rank's shard travel while the GEMM already works on the rows that are there:
    first the own rows, which need no transfer, then the others in the order in which they arrive.

    Args:
        group: process group, its name, or None for the default group; or the rank of a world on one
            GPU (flux.transport.virtual, flux.transport.loopback).
        max_m: largest number of global rows M of any call.
        n: global columns; a sequence for several weights on one gathered input (QKV, gate + up).
        k: columns of x.
        dtype: of x and the weights: float64, float32, bfloat16, float16, or float8_e4m3fn, whose
            results, and biases, are bfloat16.
        transpose_weight: weights are [K, N/W] instead of [N/W, K].
        backend: ``"cpu"``, ``"cuda"``, or None: cuda where the group has a backend for CUDA.
        transport: None, or on the CPU ``"shm"`` (ranks of one host) or ``"send_recv"`` (no shared
            memory, even on one host; None uses it between hosts), on GPUs ``"symm_mem"``.
        tuning: ``"cache"`` (tuned winners where there are any, else what the cost model expects to
            be fastest), ``"off"`` (the heuristic), or ``flux.Knobs``.
        timeout_s: how long a call waits for a peer, in seconds; an exchange of this constructor,
            too, but 2 s at least.
        topology: the mesh of ranks that ring2d, hierarchical and numa follow; by default the hosts
            that the ranks are on.

        activation: ``"none"``, ``"gelu"`` (exact) or ``"silu"``, applied to y. No backward.
        scaling: of float8 operands, which calls then give scales for: ``"tensor"`` (one factor per
            tensor, that of x the same on all ranks) or ``"row"`` (one per row of x_shard, which
            travel with the rows, and one per column of y). No backward.
        fast_accum: float8 on GPUs: sums stay in the tensor cores' own precision, some 14 bits, as
            with ``torch._scaled_mm(use_fast_accum=True)``. By default, and on CPUs, they are
            float32.

    Raises:
        ValueError, TypeError: on all ranks alike, when any rank's arguments are refused or differ.
        OSError: on all ranks alike, when there is not enough shared memory.
        PeerFailedError: another rank failed while it built the op.
        PeerTimeoutError: a peer died, or was silent for ``timeout_s``. Ops need a new group then.

    N that W does not divide is split as rows are: rank r holds columns
    [r*ceil(N/W), min(N, (r+1)*ceil(N/W))).
    """

    kind = Op.ag_gemm

    def __init__(
        self,
        group: dist.ProcessGroup | str | None = None,
        *,
        max_m: int,
        n: int | Sequence[int],
        k: int,
        dtype: torch.dtype = torch.float32,
        transpose_weight: bool = False,
        backend: str | None = None,
        transport: str | None = None,
        tuning: str | Knobs = "cache",
        timeout_s: float = 600.0,
        topology: Topology | None = None,
        activation: str = "none",
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
        )

    def __call__(
        self,
        x_shard: torch.Tensor,
        weight: torch.Tensor | Sequence[torch.Tensor],
        bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        m: int | None = None,
        return_gathered: bool = False,
        scale_x: torch.Tensor | None = None,
        scale_weight: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> Any:
        """Run the op. Collective.

        Args:
            x_shard: own rows of x, [own rows, K], or [ceil(M/W), K] padded at the end.
            weight: [N/W, K], or a sequence of them when ``n`` is one.
            bias: [N/W] or None, or a sequence of them.
            m: global rows; None means rows of x_shard times the world.
            return_gathered: return the gathered x too.
            scale_x: float32; [rows of x_shard] with scaling = row, one value with tensor.
            scale_weight: float32, [N/W] or one value; a sequence of them for several weights.

        Returns:
            y [M, N/W], or a list of them; with ``return_gathered`` a pair (that, x_full [M, K]).
            With scaling, y = activation(scale_x * scale_weight * (x @ weight.T) + bias).

        Raises:
            ValueError, TypeError: refused input, on all ranks alike; the op stays usable.
            PeerTimeoutError: a peer died or stalled; the op is closed.
            RuntimeError: the op is closed, or belongs to another process.
        """
        if not return_gathered and scale_x is None and scale_weight is None:
            repeated = self._again(x_shard, weight, bias, m)
            if repeated is not None:
                return repeated
        several = _is_sequence(weight)
        weights: list[Any] = list(weight) if several else [weight]
        biases: list[Any] = list(bias) if _is_sequence(bias) else [bias]
        if bias is None:
            biases *= len(weights)
        present = [b for b in biases if b is not None]
        scale_weights: list[Any] = (
            list(scale_weight) if _is_sequence(scale_weight) else [scale_weight]
        )
        scales = [scale for scale in (scale_x, *scale_weights) if scale is not None]
        if m is not None and not isinstance(m, (int, torch.SymInt)):
            self._turn_away(TypeError, f"m must be an integer or None, got {m!r}")
        tensors = [x_shard, *weights, *present, *scales]
        if self._plain(*tensors):
            arguments = (x_shard, weights, biases, m, scales, return_gathered)
            outs = self._guarded(self._call, *arguments)
        else:
            self._check_tensors(*tensors)
            outs = self._dispatched(
                x_shard,
                weights,
                present,
                [b is not None for b in biases],
                m,
                return_gathered,
                self.handle,
                scales,
            )
        y = outs[: len(weights)] if several else outs[0]
        return (y, outs[len(weights)]) if return_gathered else y

    def overlapped(
        self,
        x_shard: torch.Tensor,
        weight: torch.Tensor,
        meanwhile: Callable[[], None] = nothing,
        arrived: Callable[[], None] = nothing,
        m: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the op without bias and autograd, overlapped with the caller's work.

        Under modes and with tensor subclasses the work runs after the op, which the dispatcher
        has to see.

        ``meanwhile`` is called once, when the own rows are multiplied and others are under way: a
        backward pass begins with its weight gradient there. ``arrived`` is called once, when the
        last rows have come and are to be multiplied: another transfer can begin. On GPUs both are
        called after the kernels are launched. Neither may call this op. ``m``: global rows; None
        means rows of x_shard times the world.

        Returns:
            y [M, N/W] and the gathered x [M, K].

        Raises:
            As for a call; what the caller's work raises closes the op, whose peers hear of it.
        """
        hooks = OverlapHooks(meanwhile, arrived)
        if self._plain(x_shard, weight):
            arguments = (x_shard, [weight], [None], m, (), True, hooks)
            y, x_full = self._guarded(self._call, *arguments)
        else:
            self._check_tensors(x_shard, weight)
            rest: tuple[Any, ...] = ([], [False], m, True, self.handle, [])  # no bias, gathered
            y, x_full = self._dispatched(x_shard, [weight], *rest)
            self._guarded(hooks.both, begun=True)
        return y, x_full

    def input_slot(self, m: int) -> torch.Tensor:
        """Return memory to write the next call's x_shard to, which kernels then read in place.

        On GPUs it is symmetric memory, where peers and kernels find own rows, so that the call does
        not copy them. What does not fit there, as in pull mode, is memory like any other. Local.

        Args:
            m: global rows of the next call, to which the memory belongs.

        Returns:
            [own rows, K], in the op's dtype; its contents are undefined.

        Raises:
            ValueError: m is not in [1, max_m].
        """
        if not 1 <= m <= self.spec.max_m:
            raise ValueError(f"{self.spec.label}: M must be in [1, {self.spec.max_m}], got {m}")
        slot = self._backend.input_slot(m) if self._backend else None
        if slot is not None:
            return slot
        shape = (self.own_rows(m), self.spec.local_k(self.world, self.rank))
        return torch.empty(shape, dtype=self.spec.dtype, device=self._checker.device)

    def start_gather(self, x_shard: torch.Tensor, m: int) -> Callable[[], torch.Tensor]:
        """Begin to gather rows without a product: [own rows, K], of ``m`` in all. Collective.

        Returns:
            What waits for them and returns them, [M, K]; raises PeerTimeoutError. Other calls of
            this op may come before that, and other gathers, in the same order on all ranks.
        """
        if self._plain(x_shard) and not x_shard.is_meta:
            return self._unfused.start_gather(x_shard, m, both_ways=self.waits_for_hosts)
        self._check_tensors(x_shard)
        x_full: torch.Tensor = call("gather_rows", x_shard, m, self.handle)
        return lambda: x_full


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return hasattr(value, "__iter__") and not isinstance(value, torch.Tensor)

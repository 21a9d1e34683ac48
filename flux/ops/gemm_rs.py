"""ReduceScatter fused into the GEMM that feeds it (Flux paper, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flux.knobs import Knobs, Op
from flux.ops._base import TensorParallelOp
from flux.ops.call import Call
from flux.schedule import TileSchedule
from flux.topology import Topology


class GemmRS(TensorParallelOp):
    """``y = reduce_scatter(x @ weight.T) + bias``, the scatter hidden behind the GEMM.

    Rows leave for their owner as soon as the GEMM has computed them, the own rows last. The owner
    sums the partials in rank order, in fp32 (fp64 for float64), whatever order they arrived in.

    Args:
        group: process group, its name, or None for the default group.
        max_m: largest number of global rows M of any call.
        n: columns of the result.
        k: global depth; rank r holds [r*ceil(K/W), min(K, (r+1)*ceil(K/W))) of it.
        dtype: float64, float32, bfloat16 or float16.
        transpose_weight: the weight is [K/W, N] instead of [N, K/W].
        reduce: ``"sum"`` or ``"avg"``.
        backend, transport, tuning, timeout_s, topology: as for AGGemm.

    Raises:
        ValueError, TypeError, OSError: as for AGGemm.
    """

    kind = Op.gemm_rs

    def __init__(
        self,
        group: dist.ProcessGroup | str | None = None,
        *,
        max_m: int,
        n: int,
        k: int,
        dtype: torch.dtype = torch.float32,
        transpose_weight: bool = False,
        reduce: str = "sum",
        backend: str | None = None,
        transport: str | None = None,
        tuning: str | Knobs = "cache",
        timeout_s: float = 60.0,
        topology: Topology | None = None,
    ) -> None:
        super().__init__(
            group,
            max_m=max_m,
            n=n,
            k=k,
            dtype=dtype,
            transpose_weight=transpose_weight,
            reduce=reduce,
            backend=backend,
            transport=transport,
            tuning=tuning,
            timeout_s=timeout_s,
            topology=topology,
        )

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the op. Collective.

        Args:
            x: [M, K/W].
            weight: [N, K/W].
            bias: [N] or None; added once, after the reduction.

        Returns:
            This rank's rows of the result, [own rows, N]; GemmAR: all of it, [M, N].

        Raises:
            As for AGGemm.
        """
        biases = [] if bias is None else [bias]
        self._check_types(x, weight, *biases)
        if self._plain(x, weight, *biases):
            return self._run(x, weight, biases)
        run = torch.ops.flux.gemm_rs if self.kind is Op.gemm_rs else torch.ops.flux.gemm_ar
        out: torch.Tensor = run(x, weight, biases, self.handle)
        return out

    def _run(
        self, x: torch.Tensor, weight: torch.Tensor, biases: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """What ``torch.ops.flux.gemm_rs`` and ``gemm_ar`` execute."""
        bias = biases[0] if biases else None
        return self._guarded(lambda: self._execute(*self._prepare(x, [weight], [bias], None)))

    def _execute(self, call: Call, schedule: TileSchedule) -> torch.Tensor:
        unfused = self._unfused.gemm_rs if self.kind is Op.gemm_rs else self._unfused.gemm_ar
        if self._backend is None:
            return unfused(call)
        if self.knobs.path == "unfused":
            self._backend.check_entries(schedule, call.m * 2 + (call.biases[0] is not None))
            return unfused(call)
        return self._backend.gemm_rs(schedule, call)

"""ReduceScatter fused into the GEMM that feeds it (Flux paper, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from flux.core.backend import OverlapHooks
from flux.core.knobs import Knobs, Op
from flux.core.topology import Topology
from flux.ops.base import TensorParallelOp


class GemmRS(TensorParallelOp):
    """``y = reduce_scatter(x @ weight.T) + bias``, the scatter hidden behind the GEMM.

    Rows leave for their owner as soon as the GEMM has computed them, the own rows last. The owner
    sums the partials in rank order, in fp32 (fp64 for float64), whatever order they arrived in.

    Args:
        group: process group, its name, or None for the default group.
        max_m: largest number of global rows M of any call.
        n: columns of the result.
        k: global depth; rank r holds [r*ceil(K/W), min(K, (r+1)*ceil(K/W))) of it.
        dtype: of x and the weight: float64, float32, bfloat16, float16, or float8_e4m3fn, whose
            partials, results and bias are bfloat16.
        transpose_weight: the weight is [K/W, N] instead of [N, K/W].
        reduce: ``"sum"`` or ``"avg"``.
        backend, transport, tuning, timeout_s, topology: as for AGGemm.
        scaling: of float8 operands, which calls then give scales for: ``"tensor"`` or ``"row"``
            (one per row of x, one per column of the result). Every rank scales its own partial, so
            scales may differ between ranks. No backward.

    Raises:
        ValueError, TypeError, OSError, PeerFailedError, PeerTimeoutError: as for AGGemm.
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
        scaling: str = "none",
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
            scaling=scaling,
        )

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale_x: torch.Tensor | None = None,
        scale_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the op. Collective.

        Args:
            x: [M, K/W].
            weight: [N, K/W].
            bias: [N] or None; added once, after the reduction.
            scale_x: float32; [M] with scaling = row, one value with tensor.
            scale_weight: float32, [N] or one value.

        Returns:
            This rank's rows of the result, [own rows, N]; GemmAR: all of it, [M, N].

        Raises:
            As for AGGemm.
        """
        if scale_x is None and scale_weight is None:
            repeated = self._again(x, weight, bias, None)
            if repeated is not None:
                return repeated
        biases = [] if bias is None else [bias]
        scales = [scale for scale in (scale_x, scale_weight) if scale is not None]
        self._check_tensors(x, weight, *biases, *scales)
        if self._plain(x, weight, *biases, *scales):
            return self._run(x, [weight], [bias], scales=scales)[0]
        out: torch.Tensor = self._dispatched(x, weight, biases, self.handle, scales)
        return out

    def overlapped(
        self, x: torch.Tensor, weight: torch.Tensor, meanwhile: Callable[[], None]
    ) -> torch.Tensor:
        """Run the op without bias and autograd, with the caller's work over its last transfers.

        ``meanwhile`` is called once, when this rank's GEMM is through and the last rows are still
        under way: a backward pass computes its weight gradient there. It must not call this op.

        Raises:
            As for a call; what ``meanwhile`` raises closes the op, whose peers hear of it.
        """
        self._check_tensors(x, weight)
        hooks = OverlapHooks(meanwhile)
        if self._plain(x, weight):
            return self._run(x, [weight], [None], hooks=hooks)[0]
        out: torch.Tensor = self._dispatched(x, weight, [], self.handle, [])
        self._guarded(hooks.both, begun=True)
        return out

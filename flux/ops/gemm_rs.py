"""ReduceScatter fused into the GEMM that feeds it (Flux paper, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist

from flux.core.backend import OverlapHooks
from flux.core.call import Gemm
from flux.core.knobs import Knobs, Op, Topology
from flux.ops.base import PLAIN_TYPES, TensorParallelOp


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
        fast_accum: as for AGGemm.

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
        timeout_s: float = 600.0,
        topology: Topology | None = None,
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
            reduce=reduce,
            backend=backend,
            transport=transport,
            tuning=tuning,
            timeout_s=timeout_s,
            topology=topology,
            scaling=scaling,
            fast_accum=fast_accum,
        )

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        scale_x: torch.Tensor | None = None,
        scale_weight: torch.Tensor | None = None,
        *,
        gemm: Gemm | None = None,
    ) -> torch.Tensor:
        """Run the op. Collective.

        Args:
            x: [M, K/W].
            weight: [N, K/W]; None with ``gemm``.
            bias: [N] or None; added once, after the reduction.
            scale_x: float32; [M] with scaling = row, one value with tensor.
            scale_weight: float32, [N] or one value.
            gemm: the caller's product in place of ``weight``, for weights that are packed or
                quantised: maps rows of x, [rows, K/W], to their partial result, [rows, N], in the
                op's dtype. It is called for slabs of rows, in any order and number. A row of the
                result may depend on nothing but that row of x. The memory that it returns is read
                before its next call. A product that the op does not know yet is tried with one row
                first, so keep it for as long as its weight. CPU only, without backward; inside
                torch.compile call the op from a custom op.

        Returns:
            This rank's rows of the result, [own rows, N]; GemmAR: all of it, [M, N].

        Raises:
            As for AGGemm. What ``gemm`` raises in its trial becomes a ValueError on all ranks; what
            it raises later closes the op, whose peers hear of it.
        """
        if gemm is not None:
            unused = [t for t in (weight, scale_x, scale_weight) if t is not None]
            return self._supplied(x, bias, gemm, unused)
        weight = cast(torch.Tensor, weight)  # None is turned away below, as other objects are
        if scale_x is None and scale_weight is None:
            repeated = self._again(x, weight, bias, None)
            if repeated is not None:
                return repeated
        biases = [] if bias is None else [bias]
        scales = [scale for scale in (scale_x, scale_weight) if scale is not None]
        if self._plain(x, weight, *biases, *scales):
            return self._guarded(self._call, x, [weight], [bias], None, scales)[0]
        self._check_tensors(x, weight, *biases, *scales)
        out: torch.Tensor = self._dispatched(x, weight, biases, self.handle, scales)
        return out

    def _supplied(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        gemm: Gemm,
        unused: list[torch.Tensor],
    ) -> torch.Tensor:
        """Run the op with the caller's product: see ``__call__``."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{self.spec.label}: torch.compile cannot trace gemm=: call the op in a custom op"
            )
        tensors = [x] if bias is None else [x, bias]
        self._check_tensors(*tensors)
        if not callable(gemm):
            self._turn_away(TypeError, f"gemm= must be callable, got {type(gemm).__name__}")
        if unused or self.spec.scaling != "none":
            self._turn_away(ValueError, "gemm= takes the place of the weight and of all scales")
        grad = torch.is_grad_enabled()
        for tensor in tensors:
            if type(tensor) not in PLAIN_TYPES or (grad and tensor.requires_grad):
                text = "gemm= has no backward: use plain tensors and torch.no_grad"
                self._turn_away(ValueError, text)
        if self._backend is not None and self._comparison is None:
            again = self._backend.again(x, gemm, bias, None)
            if again is not None:
                return self._guarded(again, begun=True)[0]
        return self._guarded(self._call, x, gemm, [bias])[0]

    def overlapped(
        self, x: torch.Tensor, weight: torch.Tensor, meanwhile: Callable[[], None]
    ) -> torch.Tensor:
        """Run the op without bias and autograd, with the caller's work over its last transfers.

        ``meanwhile`` is called once, when this rank's GEMM is through and the last rows are still
        under way: a backward pass computes its weight gradient there. It must not call this op.

        Raises:
            As for a call; what ``meanwhile`` raises closes the op, whose peers hear of it.
        """
        hooks = OverlapHooks(meanwhile)
        if self._plain(x, weight):
            return self._guarded(self._call, x, [weight], [None], None, (), False, hooks)[0]
        self._check_tensors(x, weight)
        out: torch.Tensor = self._dispatched(x, weight, [], self.handle, [])
        self._guarded(hooks.both, begun=True)
        return out

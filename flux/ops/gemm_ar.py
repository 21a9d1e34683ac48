"""AllReduce fused into the GEMM that feeds it: ReduceScatter, then AllGather of the result."""

from __future__ import annotations

from flux.core.knobs import Op
from flux.ops.gemm_rs import GemmRS


class GemmAR(GemmRS):
    """``y = all_reduce(x @ weight.T) + bias``: GemmRS whose reduced tiles are handed to every rank.

    A tile travels on as soon as its owner has reduced it, so every rank holds bitwise the same
    result. Arguments, shapes and errors are those of GemmRS, but a call returns [M, N] on every
    rank.
    """

    kind = Op.gemm_ar

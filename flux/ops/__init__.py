"""The fused ops: classes, and functional forms compatible with PyTorch's async-TP ops."""

from flux.ops import autograd as autograd
from flux.ops.ag_gemm import AGGemm
from flux.ops.collectives import Collectives
from flux.ops.functional import fused_all_gather_matmul, fused_matmul_reduce_scatter
from flux.ops.gemm_ar import GemmAR
from flux.ops.gemm_rs import GemmRS
from flux.ops.pool import clear_workspaces

__all__ = [
    "AGGemm",
    "Collectives",
    "GemmAR",
    "GemmRS",
    "clear_workspaces",
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
]

"""Ops of mixtures of experts: grouped GEMMs that hide the communication of tokens.

``AGGroupedGemm`` gathers token shards into the experts' first GEMM; ``GroupedGemmRS`` and
``GroupedGemmAR`` sum the experts' second GEMM over each token's experts and over the ranks.
``DispatchGroupedGemm`` and ``GroupedGemmCombine`` are for ranks with different experts: tokens
travel only where they have one.
"""

from flux.moe import autograd
from flux.moe.expert_parallel import DispatchGroupedGemm, GroupedGemmCombine
from flux.moe.ops import AGGroupedGemm, GroupedGemmAR, GroupedGemmRS
from flux.moe.replicated import expand_tokens
from flux.moe.routing import Routing

__all__ = [
    "AGGroupedGemm",
    "DispatchGroupedGemm",
    "GroupedGemmAR",
    "GroupedGemmCombine",
    "GroupedGemmRS",
    "Routing",
    "autograd",
    "expand_tokens",
]

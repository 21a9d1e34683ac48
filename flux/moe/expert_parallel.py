"""DispatchGroupedGemm and GroupedGemmCombine: tokens travel only where they have an expert.

    DispatchGroupedGemm   AGGroupedGemm without the tokens that no expert of a rank reads
    GroupedGemmCombine    GroupedGemmRS without the sums that no expert of a rank added to

A token with several experts on a rank travels there once, and with experts on several ranks of a
host once between the hosts. On the way back a rank, then a host, adds up first
(csrc/schedule/selection.h). Splits of an all-to-all follow from the experts, which all ranks know.

GPUs of several nodes: all tokens and sums travel, once between the nodes, as in the other two ops.
"""

from __future__ import annotations

import torch

from flux.moe.ops import AGGroupedGemm, GroupedGemmRS, Weights


class DispatchGroupedGemm(AGGroupedGemm):
    """AGGroupedGemm for ``ep > 1``: a rank receives only tokens of its experts.

    Arguments, results and order of rows: those of AGGroupedGemm. The backward keeps the received
    tokens, where AGGroupedGemm gathers them again. There is no ``return_gathered``. Path
    ``one_shot``, for few rows between hosts, moves all tokens.
    """

    dispatches = True

    def __call__(  # type: ignore[override]
        self,
        x_shard: torch.Tensor,
        weights: Weights,
        experts: torch.Tensor,
        bias: torch.Tensor | None = None,
        max_rows: int | None = None,
        scale_x: torch.Tensor | None = None,
        scale_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the op: see ``AGGroupedGemm.__call__``. Collective."""
        scales = (scale_x, scale_weight)
        return self._run(x_shard, weights, bias, experts, None, max_rows, False, *scales)[0]


class GroupedGemmCombine(GroupedGemmRS):
    """GroupedGemmRS for ``ep > 1``: a rank sends only sums of tokens that its experts have.

    Arguments and results: those of GroupedGemmRS. Path ``one_shot`` sends sums of all tokens.
    """

    dispatches = True

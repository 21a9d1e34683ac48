"""The routed rows of a call: which rows of a grouped GEMM belong to which token and expert.

A grouped GEMM has one row for each pair of a token and one of its experts, sorted by expert, then
by token (csrc/core/row_map.h). ``Routing`` has the maps between tokens and these rows.
"""

from __future__ import annotations

import torch

from flux import _C
from flux.core.tensors import address_of


def check_integers(experts: torch.Tensor) -> None:
    """Raise TypeError if ``experts`` are no integers. Booleans are a map of all experts."""
    kind = experts.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise TypeError(f"experts must be integers, got {kind}")


class Routing:
    """The routed rows that one rank has of M tokens. Local; any experts may be empty.

    Args:
        experts: [M, topk] integers: the experts of each token, in any order; below 0: that choice
            is dropped. All tokens of the group, the same on all ranks.
        total: number of experts.
        first: the first expert of this rank.
        count: how many it has; None: all.
        world: ranks that own the tokens, as ops split rows.

    Attributes:
        rows: number of routed rows, R.
        tokens: int64 [R]: the token of each.
        choices: int64 [R]: token * topk + which of its experts.
        positions: int64 [M, topk]: the routed row; -1 where this rank has none.
        experts: int64 [M, topk], as passed.
        native: the same in csrc/schedule/routing.h.
        checksum: 32 bits, equal for equal ``experts``.

    Raises:
        TypeError: ``experts`` has no integers.
        ValueError: its shape is wrong, or an expert is not below ``total``.
    """

    def __init__(
        self,
        experts: torch.Tensor,
        total: int,
        first: int = 0,
        count: int | None = None,
        world: int = 1,
    ) -> None:
        check_integers(experts)
        if experts.dim() != 2 or 0 in experts.shape:
            raise ValueError(f"experts of tokens must be [M, topk], got {list(experts.shape)}")
        dense = experts.detach().to(device="cpu", dtype=torch.int64).contiguous()
        m, topk = dense.shape
        self.native = _C.Routing(
            experts=address_of(dense),
            m=m,
            topk=topk,
            total=total,
            first_expert=first,
            local=total - first if count is None else count,
            world=world,
        )
        self.rows = self.native.count
        self.topk = topk
        self.total = total
        self.experts = dense
        self.checksum = self.native.checksum
        self.tokens = torch.empty(self.rows, dtype=torch.int64, device="cpu")
        self.choices = torch.empty_like(self.tokens)
        self.positions = torch.empty(m, topk, dtype=torch.int64, device="cpu")
        maps = (self.tokens, self.choices, self.positions)
        self.native.fill(*(address_of(tensor) for tensor in maps))

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``tokens`` and ``choices`` on a device."""
        return self.tokens.to(device), self.choices.to(device)

    def rows_of_parts(self, ep: int) -> list[int]:
        """Return the routed rows of ranks with each of ``ep`` parts of the experts."""
        chosen = self.experts[self.experts >= 0]
        of_experts = torch.bincount(chosen, minlength=self.total)
        bounds = [
            (_C.core.row_begin(self.total, ep, p), _C.core.row_end(self.total, ep, p))
            for p in range(ep)
        ]
        return [int(of_experts[begin:end].sum()) for begin, end in bounds]

    def groups(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Return the routed rows of the tokens [first, last): (expert, begin, end), none empty.

        Experts count from this rank's first.
        """
        return self.native.groups(first, last)


class Needed:
    """The tokens that ranks need: see ``flux.core.call.NeededTokens``.

    Args:
        routing: of the call.
        ep: parts that the experts are split into.
        world: ranks.
    """

    def __init__(self, routing: Routing, ep: int, world: int) -> None:
        self._routing = routing
        self._ep, self._parts = ep, world // ep

    def selection(self, hops: _C.Hops) -> _C.Selection:
        """Return the rows that the transfers of a schedule carry."""
        routing = self._routing
        m, topk = routing.experts.shape
        return _C.Selection(hops, address_of(routing.experts), m, topk, routing.total)

    def of_rank(self, rank: int) -> torch.Tensor:
        """Return the tokens that a rank needs, in order."""
        routing, group = self._routing, rank // self._parts
        begin = _C.core.row_begin(routing.total, self._ep, group)
        end = _C.core.row_end(routing.total, self._ep, group)
        here = (routing.experts >= begin) & (routing.experts < end)
        return here.any(1).nonzero()[:, 0]

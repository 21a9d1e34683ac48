"""The routed rows of a call: which rows of a grouped GEMM belong to which token and expert.

A grouped GEMM has one row for each pair of a token and one of its experts, sorted by expert, then
by token (csrc/core/row_map.h). ``Routing`` has the maps between tokens and these rows.
"""

from __future__ import annotations

from functools import cached_property

import torch

from flux import _C
from flux.core.sparse_call import Exchanged
from flux.core.tensors import address_of

KEPT = 4
"""Routings that are kept: the ops of a layer, and of its backward, ask for the same one."""
_latest: tuple[tuple[object, Routing], ...] = ()


def check_integers(experts: torch.Tensor) -> None:
    """Raise TypeError if ``experts`` are no integers. Booleans are a map of all experts."""
    kind = experts.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise TypeError(f"experts must be integers, got {kind}")


def routing_of(experts: torch.Tensor, total: int, first: int, count: int, world: int) -> Routing:
    """Return ``Routing(experts, total, first, count, world)``, made once for equal arguments.

    What is made is shared: read it only.
    """
    global _latest
    check_integers(experts)
    key = (total, first, count, world)
    dense = experts.detach().to(device="cpu", dtype=torch.int64)
    for of_known, known in reversed(_latest):
        if of_known == key and torch.equal(known.experts, dense):
            return known
    with torch.inference_mode(False):  # a later call may need gradients
        made = Routing(dense.clone(), *key)  # the caller may write to its tensor
    _latest = (*_latest, (key, made))[-KEPT:]
    return made


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
        self._needed: dict[tuple[int, int], Needed] = {}

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

    @cached_property
    def bags(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of each token: where they are in [M, topk], rows by token, where each begins.

        bool [M, topk]; int64 [R]; int64 [M + 1].
        """
        with torch.inference_mode(False):
            here = self.positions >= 0
            begins = here.new_zeros(here.shape[0] + 1, dtype=torch.int64)
            torch.cumsum(here.sum(1), 0, out=begins[1:])
            return here, self.positions[here], begins

    def needed(self, ep: int, world: int) -> Needed:
        """Return the tokens that each of ``world`` ranks needs; ``ep``: parts of the experts."""
        if (ep, world) not in self._needed:
            self._needed[ep, world] = Needed(self, ep, world)
        return self._needed[ep, world]

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
        self._experts, self._total = routing.experts, routing.total  # the routing keeps this one
        self._ep, self._parts, self._world = ep, world // ep, world
        self._tokens: dict[int, torch.Tensor] = {}  # by part of the experts
        self._exchanged: dict[int, Exchanged] = {}  # by rank

    def selection(self, hops: _C.Hops) -> _C.Selection:
        """Return the rows that the transfers of a schedule carry."""
        m, topk = self._experts.shape
        return _C.Selection(hops, address_of(self._experts), m, topk, self._total)

    def of_rank(self, rank: int) -> torch.Tensor:
        """Return the tokens that a rank needs, in order."""
        group = rank // self._parts
        if group not in self._tokens:
            begin = _C.core.row_begin(self._total, self._ep, group)
            end = _C.core.row_end(self._total, self._ep, group)
            with torch.inference_mode(False):
                here = (self._experts >= begin) & (self._experts < end)
                self._tokens[group] = here.any(1).nonzero()[:, 0]
        return self._tokens[group]

    def exchanged(self, rank: int) -> Exchanged:
        """Return the tokens that a rank exchanges with each other one."""
        if rank not in self._exchanged:
            with torch.inference_mode(False):
                self._exchanged[rank] = self._exchange(rank)
        return self._exchanged[rank]

    def _exchange(self, rank: int) -> Exchanged:
        m, world = self._experts.shape[0], self._world
        begins = [_C.core.row_begin(m, world, owner) for owner in range(1, world)]
        bounds = torch.tensor(begins, dtype=torch.int64, device="cpu")
        by_owner = [
            torch.tensor_split(tokens, torch.searchsorted(tokens, bounds))
            for tokens in map(self.of_rank, range(world))
        ]
        own = torch.cat([of_rank[rank] for of_rank in by_owner])
        own -= _C.core.row_begin(m, world, rank)
        counts = own.bincount(minlength=_C.core.row_count(m, world, rank))
        return Exchanged(
            self.of_rank(rank),
            [len(tokens) for tokens in by_owner[rank]],
            [len(of_rank[rank]) for of_rank in by_owner],
            own,
            own.argsort(stable=True),
            counts.cumsum(0) - counts,
        )

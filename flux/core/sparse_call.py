"""What calls of ops of experts and heads have in place of a weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from flux import _C


class RoutedRows(Protocol):
    """The routed rows of a call, on the host: ``flux.moe.Routing``."""

    rows: int
    topk: int
    total: int
    experts: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    native: _C.Routing


class MadeMaps(Protocol):
    """Maps of routed rows that a kernel makes before the rest of the call."""

    def rows(self) -> int:
        """Wait for them; return this rank's routed rows, -1 if there is none of some expert."""


@dataclass(frozen=True)
class DeviceChoices:
    """What a router chose, on a GPU, whose kernels make the maps: the host does not read it.

    Attributes:
        experts: [M, topk], int32 or int64, dense.
        total: experts of all ranks.
        most: routed rows that a rank may have.
        made: the maps, if a kernel makes them ahead; None: within the call.
        checksum: in place of one of the choices.
    """

    experts: torch.Tensor
    total: int
    most: int
    made: MadeMaps | None = None
    checksum: int = 0

    @property
    def rows(self) -> int:
        """Rows of the call's own matrix: R if the maps are made ahead, else as many as may be."""
        return self.most if self.made is None else self.made.rows()


class GroupedProduct(Protocol):
    """The product of a mixture of experts, in place of one weight's.

    Attributes:
        rows: of its own matrix, which is sorted by expert: the result of an AllGather's product,
            the input of the others.
        weights: of each of this rank's experts, [N, K], also if the user keeps [K, N].
        biases: [experts, N], or None.
        probs: [M, topk], the weights of a token's experts; None: 1.
        routing: the routed rows: ``flux.moe.Routing``, or those that the device knows.
        routed: of an AllGather: takes the routed rows of x, [rows, K]; None: they are not kept.
        scale_x: of a sum: of the routed rows, [rows] or [1]; None: x has no scale, or tokens have.
        scale_weights: float32 [experts, N] or [experts]; None without scaling.
    """

    rows: int
    weights: Sequence[torch.Tensor]
    biases: torch.Tensor | None
    probs: torch.Tensor | None
    routing: RoutedRows | DeviceChoices
    routed: torch.Tensor | None
    scale_x: torch.Tensor | None
    scale_weights: torch.Tensor | None

    def __call__(
        self,
        x: torch.Tensor,
        first: int,
        last: int,
        out: torch.Tensor,
        columns: slice | None,
        scale_x: torch.Tensor | None = None,
        needed: torch.Tensor | None = None,
    ) -> None:
        """Multiply the tokens [first, last).

        Args:
            x: AllGather: the tokens, [last - first, K]; else all routed rows, [rows, K/W].
            first: the first token.
            last: the token behind the last one.
            out: AllGather: all routed rows, [rows, N/W]; else the tokens' sums,
                [last - first, columns].
            columns: of the weights; None: all.
            scale_x: AllGather: of the tokens, [last - first] or [1]; with scaling only.
            needed: int64, in order, those of all M tokens that have a routed row. Where it is
                given, x of an AllGather, and the sums, are [len(needed), ...], of these alone.
        """


@dataclass(frozen=True)
class Sequences:
    """The tokens of a call.

    Attributes:
        batch: sequences.
        lengths: of the part of each sequence that each rank has.
    """

    batch: int
    lengths: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(self.batch * length for length in self.lengths)

    @property
    def total(self) -> int:
        """Length of a whole sequence."""
        return sum(self.lengths)

    def pieces(self, rank: int, first: int, last: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield (batch, part of its whole sequence, rows from ``first`` on) of a rank's rows."""
        length, base, at = self.lengths[rank], sum(self.lengths[:rank]), first
        while at < last:
            batch, token = divmod(at, length)
            count = min(last - at, length - token)
            part = slice(base + token, base + token + count)
            yield batch, part, slice(at - first, at - first + count)
            at += count


class Blocks(Protocol):
    """The operands of an all-to-all, as the blocks of rows that ranks send to each other.

    Attributes:
        rows: of each rank, in the order of its tokens.
        tokens: the same, by sequence.
        tensors: GemmAllToAll: x, [own rows, K]. AllToAllGemm: the own heads of each packed tensor,
            [batch, sequence, heads, head_dim].
        weight: [N, K], also if the user keeps [K, N]; None: heads are gathered alone.
        bias: [N], or None.
        gather: return the gathered heads, [own rows, K], too.
    """

    rows: tuple[int, ...]
    tokens: Sequences
    tensors: Sequence[torch.Tensor]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    gather: bool

    def begin(self) -> None:
        """Allocate the results. GPUs have a way of their own (flux/backends/cuda/exchange.py)."""

    def send(self, peer: int, first: int, last: int, block: torch.Tensor) -> None:
        """Write rows [first, last) of the block for a rank, [last - first, columns]."""

    def receive(self, peer: int, first: int, last: int, block: torch.Tensor) -> None:
        """Take rows [first, last) of the block of a rank; all of the own block first."""

    def results(self) -> list[torch.Tensor]:
        """Return the results, after all rows have been taken."""


class Exchanged(NamedTuple):
    """The tokens that one rank exchanges with the others; tensors are on the host.

    Attributes:
        needed: int64, the tokens of all owners that the rank needs, in order.
        foreign: how many of them each owner has, itself included.
        own: how many of its own each rank needs.
        tokens: int64, its own ones by the rank that needs them, from its first.
        order: int64, ``tokens`` in the order of tokens, then of ranks: indices.
        begins: int64, where in ``order`` each own token begins.
    """

    needed: torch.Tensor
    foreign: list[int]
    own: list[int]
    tokens: torch.Tensor
    order: torch.Tensor
    begins: torch.Tensor


class NeededTokens(Protocol):
    """The tokens of a call that each rank needs, where they travel to no other."""

    def selection(self, hops: _C.Hops) -> _C.Selection:
        """Return the rows that the transfers of a schedule carry."""

    def exchanged(self, rank: int) -> Exchanged:
        """Return the tokens that a rank exchanges with each other one."""

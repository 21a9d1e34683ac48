"""Tiles as they travel between hosts: whole, or the rows of them that are needed, packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from flux.transport.channel import Message


@dataclass
class NetworkPiece:
    """One tile to send or receive: its memory, and its signal, if any.

    A piece to send without a signal is ready from the start. ``rows``: those that travel, packed;
    None: all. A piece without rows is no message.
    """

    tensor: torch.Tensor
    signal: int | None
    rows: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        whole = self.tensor.nbytes
        return whole if self.rows is None else whole // self.tensor.shape[0] * len(self.rows)

    def packed(self) -> torch.Tensor:
        """Return what to send."""
        return self.tensor if self.rows is None else self.tensor.index_select(0, self.rows)

    def room(self) -> torch.Tensor:
        """Return memory to receive into, for ``unpack``."""
        if self.rows is None:
            return self.tensor
        return self.tensor.new_empty(len(self.rows), *self.tensor.shape[1:])

    def unpack(self, received: torch.Tensor) -> None:
        """Put the rows that have been received in their places."""
        if self.rows is not None:
            tensor = self.tensor
            if tensor.itemsize == 1:  # torch cannot copy rows of float8 so
                tensor, received = tensor.view(torch.uint8), received.view(torch.uint8)
            tensor.index_copy_(0, self.rows, received)


class Posted(NamedTuple):
    """A piece under way.

    Attributes:
        message: None if no row travels.
        piece: the piece.
        memory: what is sent, or received into.
        posted_ns: for a trace.
    """

    message: Message | None
    piece: NetworkPiece
    memory: torch.Tensor
    posted_ns: int

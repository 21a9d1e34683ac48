"""Where the tiles of a call that travel between hosts lie in this rank's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flux import _C
from flux.core.schedule import Parcel, ParcelKind, TileSchedule
from flux.core.tensors import address_of
from flux.transport.network_piece import NetworkPiece


class RemoteTiles:
    """The tiles of one call of one rank.

    Args:
        schedule: of the call, as this rank executes it.
        slots: by rank: its memory for partial results, [blocks, rows of a chunk, columns].
        gathered: the gathered input, or where the result of a GemmAR arrives, [M, columns].
        selection: the rows that travel; None: all of them.
        x: own rows of the input of an AllGather.
        partial: partial results of a staged ReduceScatter, [M, columns].
        out: result of a ReduceScatter.
    """

    def __init__(
        self,
        schedule: TileSchedule,
        slots: Sequence[torch.Tensor],
        gathered: torch.Tensor,
        selection: _C.Selection | None = None,
        x: torch.Tensor | None = None,
        partial: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        self._schedule = schedule
        self._slots = slots
        self._gathered = gathered
        self._selection = selection
        self._x, self._partial, self._out = x, partial, out

    def outgoing(self, peer: int) -> Iterator[NetworkPiece]:
        """Return the tiles for a peer, each with the signal that it waits for, in order."""
        rank = self._schedule.rank
        for parcel in self._schedule.parcels_for(peer):
            piece = self._source(parcel, peer)
            piece.rows = self._rows(parcel, rank, peer)
            yield piece

    def incoming(self, peer: int) -> Iterator[NetworkPiece]:
        """Return where the tiles of a peer go, each with the signal to raise, in its order."""
        rank = self._schedule.rank
        for parcel in self._schedule.of_rank(peer).parcels_for(rank):
            if parcel.kind in (ParcelKind.gather, ParcelKind.result):
                target = self._gathered[parcel.row_begin : parcel.row_end]
            else:
                target = self._slots[rank][parcel.block, self._in_chunk(parcel)]
            yield NetworkPiece(target, parcel.signal, self._rows(parcel, peer, rank))

    def _source(self, parcel: Parcel, peer: int) -> NetworkPiece:
        schedule = self._schedule
        rows = slice(parcel.row_begin, parcel.row_end)
        own = parcel.chunk == schedule.rank
        if parcel.kind is ParcelKind.gather and own:
            assert self._x is not None
            return NetworkPiece(self._x[self._in_chunk(parcel)], None)
        if parcel.kind is ParcelKind.gather:
            source = self._gathered[rows]
        elif parcel.kind is ParcelKind.result:
            assert self._out is not None
            source = self._out[rows] if own else self._gathered[rows]
        elif parcel.kind is ParcelKind.partial and schedule.knobs.store == "staged":
            assert self._partial is not None
            source = self._partial[rows]
        else:
            source = self._slots[peer][parcel.block, self._in_chunk(parcel)]
        return NetworkPiece(source, parcel.signal)

    def _rows(self, parcel: Parcel, src: int, dst: int) -> torch.Tensor | None:
        """Return the rows of a tile that travel, counted from its first; None: all of them."""
        selection = self._selection
        if selection is None:
            return None
        begin, end = parcel.row_begin, parcel.row_end
        rows = torch.empty(end - begin, dtype=torch.int64, device="cpu")
        if parcel.kind is ParcelKind.gather:
            count = selection.gathered(parcel.chunk, dst, begin, end, address_of(rows))
        else:
            combined = parcel.kind is ParcelKind.combined
            count = selection.partial(src, combined, begin, end, address_of(rows))
        return None if count == end - begin else rows[:count]

    def _in_chunk(self, parcel: Parcel) -> slice:
        """Return the rows of a tile within its chunk."""
        m, world = self._schedule.shape[0], self._schedule.world
        base = _C.core.row_begin(m, world, parcel.chunk)
        return slice(parcel.row_begin - base, parcel.row_end - base)

"""Slabs of rows: what the CPU backend multiplies at once."""

from __future__ import annotations

from flux import _C
from flux.core.knobs import Op
from flux.core.schedule import TileSchedule, Visit


def merge_visits(schedule: TileSchedule) -> list[tuple[int, int, Visit]]:
    """Merge neighbouring GEMM tiles, since every cut of a GEMM costs packing of the weight.

    Tiles of the own rows wait for nobody, and nobody waits for them. Tiles of an AllGather from
    another host come over a wire that is slower than memory: all of a chunk but the last tile are
    one, so that little is left to compute when the last byte arrives (what the own rows take to
    compute, the wire has for the others).
    """
    m, world, rank = schedule.shape[0], schedule.world, schedule.rank
    tail_only = Op[schedule.op].gathers and schedule.topology.nodes > 1
    hosts = schedule.topology.hosts

    def joins(v: Visit) -> bool:
        if v.owner == rank:
            return True
        far = tail_only and v.owner >= 0 and hosts[v.owner] != hosts[rank]
        return far and v.row_end < _C.core.row_end(m, world, v.owner)

    slabs: list[tuple[int, int, Visit]] = []
    for index, v in enumerate(schedule.visits):
        if slabs:
            first, _, last = slabs[-1]
            columns = (last.col_begin, last.col_end) == (v.col_begin, v.col_end)
            if last.owner == v.owner and columns and last.row_end == v.row_begin and joins(v):
                slabs[-1] = (first, index + 1, last._replace(row_end=v.row_end))
                continue
        slabs.append((index, index + 1, v))
    return slabs

"""Names, records and hypothesis strategies shared by the tests of csrc/core.

The numbers are spelled out here rather than taken from ``flux.core.knobs``: they are the interface
between Python, C++ and CUDA, and a test that reads them from one side would not notice the sides
drifting apart.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from flux import _C
from flux.core import schedule

AG_GEMM, GEMM_RS, GEMM_AR = OPS = range(3)
DIRECT, RING1D, RING2D, HIERARCHICAL, NUMA = ORDERS = range(5)
PUSH, PULL = DIRECTIONS = range(2)
NONE, RANK_SHIFT, XOR = SWIZZLES = range(3)
STORE_DIRECT, STORE_STAGED = STORES = range(2)
GATHER, SEND, REDUCE, RESULT, RECEIVE = range(5)  # kinds of actions in a program

Mesh = tuple[int, int, int]


class Transfer(schedule.Transfer):
    """A communication tile on its way."""

    @property
    def rows(self) -> range:
        return range(self.row_begin, self.row_end)


class Visit(schedule.Visit):
    """A GEMM tile."""

    @property
    def rows(self) -> range:
        return range(self.row_begin, self.row_end)

    @property
    def cols(self) -> range:
        return range(self.col_begin, self.col_end)


class Reduction(NamedTuple):
    """One sum; shares are (source, signal, block). Fields as in csrc/schedule/schedule.h."""

    owner: int
    tile: int
    row_begin: int
    row_end: int
    shares: tuple[tuple[int, int, int], ...]
    target: int
    signal: int
    block: int

    @property
    def rows(self) -> range:
        return range(self.row_begin, self.row_end)


class Case(NamedTuple):
    """What the schedules of all ranks have in common."""

    op: int
    m: int
    n: int
    k: int
    mesh: Mesh
    tile_m: int
    tile_n: int
    raster: int
    comm_rows: int
    direction: int
    order: int
    swizzle: int
    store: int
    hosts: tuple[int, ...] = ()
    spread: bool = False

    @property
    def host_of(self) -> tuple[int, ...]:
        """The host of each rank: as given, else the node of the mesh."""
        per_node = self.mesh[1] * self.mesh[2]
        return self.hosts or tuple(rank // per_node for rank in range(self.world))

    def members(self, rank: int) -> list[int]:
        """The ranks on the host of ``rank``, itself included."""
        return [r for r, host in enumerate(self.host_of) if host == self.host_of[rank]]

    def holder(self, owner: int, source: int) -> int:
        """Return the rank that sums the partial of ``source`` for ``owner``."""
        here = self.members(source)
        if not self.two_levels or owner in here or len(here) == 1:
            return owner
        return here[self.members(owner).index(owner) % len(here)]

    @property
    def has_sequence(self) -> bool:
        """Whether chunks are visited in an order that csrc/core does not know."""
        if self.swizzle != RANK_SHIFT or self.order != HIERARCHICAL:
            return False
        return self.two_levels if self.op != AG_GEMM else bool(self.hosts)

    @property
    def two_levels(self) -> bool:
        """Whether partials are summed inside hosts first, then across them."""
        reduces = self.op != AG_GEMM and self.direction == PUSH
        return reduces and self.order == HIERARCHICAL and len(set(self.host_of)) > 1

    @property
    def world(self) -> int:
        return self.mesh[0] * self.mesh[1] * self.mesh[2]

    @property
    def chunk_rows(self) -> int:
        return -(-self.m // self.world)

    def own_rows(self, rank: int) -> range:
        """Rows of ``rank``, by definition and not by the code under test."""
        return range(min(self.m, rank * self.chunk_rows), min(self.m, (rank + 1) * self.chunk_rows))

    def owner(self, row: int) -> int:
        return row // self.chunk_rows

    def local_n(self, rank: int) -> int:
        if self.op != AG_GEMM:
            return self.n
        share = -(-self.n // self.world)
        return min(self.n, (rank + 1) * share) - min(self.n, rank * share)

    @property
    def tiles_per_chunk(self) -> int:
        return -(-self.chunk_rows // self.comm_rows)

    @property
    def signal_count(self) -> int:
        """Signals of one phase; GemmAR has two."""
        return self.world * self.tiles_per_chunk

    def signal_of_row(self, row: int) -> int:
        chunk, offset = divmod(row, self.chunk_rows)
        return chunk * self.tiles_per_chunk + offset // self.comm_rows

    def build(self, rank: int) -> Schedule:
        return Schedule(self, rank)

    def build_all(self) -> list[Schedule]:
        return [self.build(rank) for rank in range(self.world)]


class Schedule:
    """A native schedule, unrolled into records."""

    def __init__(self, case: Case, rank: int) -> None:
        native = _C.build_schedule(rank=rank, **case._asdict())
        self.case = case
        self.rank = rank
        self.visits = [Visit(*v) for v in native.visits]
        self.transfers = [Transfer(*t) for t in native.transfers]
        self.results = [Transfer(*t) for t in native.results]
        self.receipts = [Transfer(*t) for t in native.receipts]
        self.reductions = [Reduction(*r) for r in native.reductions]
        self.homes: list[tuple[int, int]] = list(native.homes)
        self.parcels_for = native.parcels_for
        self.program: list[tuple[int, int]] = list(native.program)
        self.signals: int = native.signals
        self.publishes_own: bool = native.publishes_own


def tile_order(case: Case, rank: int) -> _C.core.TileOrder:
    """The map of GEMM tiles of one rank."""
    return _C.core.TileOrder(
        op=case.op,
        m=case.m,
        n=case.local_n(rank),
        tile_m=case.tile_m,
        tile_n=case.tile_n,
        raster=case.raster,
        swizzle=case.swizzle,
        order=case.order,
        direction=case.direction,
        mesh=case.mesh,
        rank=rank,
    )


def meshes(max_world: int) -> st.SearchStrategy[Mesh]:
    """Any (nodes, domains, lanes) of at most ``max_world`` ranks, a single rank included."""
    return (
        st.tuples(*[st.integers(1, max_world)] * 3)
        .map(lambda t: (t[0], max(1, min(t[1], max_world // t[0])), t[2]))
        .map(lambda t: (t[0], t[1], max(1, min(t[2], max_world // (t[0] * t[1])))))
    )


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    ops: tuple[int, ...] = tuple(OPS),
    max_world: int = 8,
    max_m: int = 40,
    max_n: int = 6,
) -> Case:
    """Legal cases. Knobs may exceed the problem; M may be smaller than the world."""
    op = draw(st.sampled_from(ops))
    mesh = draw(meshes(max_world))
    world = mesh[0] * mesh[1] * mesh[2]
    hosts: tuple[int, ...] = ()
    if draw(st.integers(0, 3)) == 0:  # no mesh: hosts of any size, their ranks in any order
        names = draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
        hosts = tuple(sorted(set(names)).index(name) for name in names)
        mesh = (1, 1, world)
    m = draw(st.integers(1, max_m))
    chunk = -(-m // world)
    aligned = draw(st.booleans())
    tile_m = draw(
        st.sampled_from([d for d in range(1, chunk + 1) if chunk % d == 0])
        if aligned
        else st.integers(1, m + 2)
    )
    # A GEMM that writes to its owner's memory cannot have tiles with several owners.
    single = all(i // chunk == (min(m, i + tile_m) - 1) // chunk for i in range(0, m, tile_m))
    swizzles = SWIZZLES if world & (world - 1) == 0 else (NONE, RANK_SHIFT)
    return Case(
        op=op,
        m=m,
        n=draw(st.integers(1, max_n)),
        k=draw(st.integers(1, 8)),
        mesh=mesh,
        tile_m=tile_m,
        tile_n=draw(st.integers(1, max_n + 2)),
        raster=draw(st.integers(1, 4)),
        comm_rows=draw(st.integers(1, chunk + 1)),
        direction=draw(st.sampled_from(DIRECTIONS)),
        order=draw(st.sampled_from(ORDERS)),
        swizzle=draw(st.sampled_from(swizzles)),
        store=draw(st.sampled_from(STORES if single else (STORE_STAGED,))),
        hosts=hosts,
        spread=draw(st.booleans()),
    )

"""The tuning space of a fused op on a mesh of ranks; the heuristic fills in the unset fields.

``Topology`` is the mesh that communication orders follow, and ``ClusterTile`` has what the
heuristic knows of GPU kernels. Needs only the standard library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import NamedTuple

SLOT_BYTES = 1 << 20
"""Bytes of a round of path one_shot, and of `flux.Collectives`, in shared memory: in smaller ones,
ranks that share cores wait for each other too often."""


class OpRow(IntEnum):
    """A row of a table of fused ops; values as in csrc/core/problem.h.

    Attributes:
        label: name of the class.
        title: name in reports.
        collective: what torch.distributed calls the communication.
        gathers: the rows of the input are communicated, before the GEMM.
        reduces: the partial results are communicated and summed, after the GEMM.
        scatters: of the sum each rank gets its own rows.
        all_reduces: every rank gets the whole sum.
        exchanges: each rank has a block for each other rank: an all-to-all.
        kernel: family of its kernels (``flux.kernels.config.OPS``).
    """

    label: str
    title: str
    collective: str
    gathers: bool
    reduces: bool
    scatters: bool
    all_reduces: bool
    exchanges: bool
    kernel: str

    def __new__(cls, value: int, label: str, title: str, collective: str) -> OpRow:
        """Return the member; called once for each line below."""
        op = int.__new__(cls, value)
        op._value_ = value
        op.label, op.title, op.collective = label, title, collective
        op.gathers = collective == "all_gather"
        op.exchanges = collective == "all_to_all"
        op.reduces = not (op.gathers or op.exchanges)
        op.scatters = collective == "reduce_scatter"
        op.all_reduces = collective == "all_reduce"
        op.kernel = "ag_gemm" if op.gathers or label == "AllToAllGemm" else "gemm_rs"
        return op


class Op(OpRow):
    """The fused ops of tensor parallelism."""

    @classmethod
    def named(cls, name: str, choices: Sequence[str] = ()) -> Op:
        """Return the op of this name; raise ValueError with the choices if there is none."""
        if name not in cls.__members__:
            known = ", ".join(choices or cls.__members__)
            raise ValueError(f"op must be one of {known}, got {name!r}")
        return cls[name]

    ag_gemm = 0, "AGGemm", "AllGather + GEMM", "all_gather"
    gemm_rs = 1, "GemmRS", "GEMM + ReduceScatter", "reduce_scatter"
    gemm_ar = 2, "GemmAR", "GEMM + AllReduce", "all_reduce"


OPS = tuple(Op.__members__)


class AllToAllOp(OpRow):
    """The fused ops of sequence parallelism by heads (flux.ulysses)."""

    gemm_all_to_all = 3, "GemmAllToAll", "GEMM + AllToAll", "all_to_all"
    all_to_all_gemm = 4, "AllToAllGemm", "AllToAll + GEMM", "all_to_all"


def op_row(name: str) -> OpRow:
    """Return the op of a schedule by its name."""
    return Op[name] if name in Op.__members__ else AllToAllOp[name]


class Order(IntEnum):
    """Communication orders; values as in csrc/core/comm_order.h (Flux paper, 4.3)."""

    direct = 0
    ring1d = 1
    ring2d = 2
    hierarchical = 3
    numa = 4


class Direction(IntEnum):
    """The rank that moves a tile: source (push) or destination (pull) (Flux paper, 3.2 and 4.3)."""

    push = 0
    pull = 1


class Swizzle(IntEnum):
    """How ranks avoid visiting the same rows at the same time (Flux paper, 4.1)."""

    none = 0
    rank_shift = 1
    xor = 2


class Store(IntEnum):
    """Where a ReduceScatter GEMM writes: the owner's memory, or a staging buffer first."""

    direct = 0
    staged = 1


PATHS = ("fused", "medium", "unfused", "one_shot", "in_kernel")
REDUCES = ("local", "in_flight", "in_kernel")
SENDS = ("stores", "copies")
TILE_SCHEDULERS = ("static", "dynamic")

_CHOICES: dict[str, tuple[str, ...]] = {
    "path": PATHS,
    "direction": tuple(d.name for d in Direction),
    "order": tuple(o.name for o in Order),
    "swizzle": tuple(s.name for s in Swizzle),
    "store": tuple(s.name for s in Store),
    "reduce": REDUCES,
    "sends": SENDS,
    "tile_scheduler": TILE_SCHEDULERS,
}


@dataclass(frozen=True)
class Knobs:
    """All parameters of *how* an op runs. ``None`` lets the heuristic choose.

    Attributes:
        path: ``fused`` (tiles), ``medium`` (one chunk per rank around a ring and one GEMM per
            chunk, as in TransformerEngine; between nodes of GPUs GemmRS and GemmAR keep one GEMM,
            whose tiles leave by themselves, as on path fused), ``unfused`` (library collective and
            one GEMM), ``one_shot`` (CPU, between hosts: parts go straight to their ranks, in rounds
            of ``comm_tile_rows``, and the GEMM is cut along the rounds) or ``in_kernel`` (AGGemm
            and GemmAR on GPUs of one node, M up to 512: the GEMM's own blocks send rows or sums, in
            one launch).
        tile: (rows, columns) of a GEMM tile of the local output. one_shot: M rows or more leave the
            GEMM whole, or, with fewer than N columns, cut the GEMM of an AllReduce into blocks of
            them; smaller tiles have no meaning of their own.
        raster: rows of tiles per sweep; a sweep goes column by column.
        comm_tile_rows: rows of a communication tile, in [1, ceil(M/W)].
        direction: ``push`` | ``pull``.
        order: ``direct`` | ``ring1d`` | ``ring2d`` | ``hierarchical`` | ``numa``. In GemmRS and
            GemmAR partials go straight to their owner, and this sets only the order of the owners.
            Exception: with push and ``hierarchical``, the ranks of a node first add up their
            partials for other nodes.
        swizzle: ``none`` | ``rank_shift`` | ``xor``.
        store: ``direct`` (the GEMM writes into the owner's buffer) | ``staged`` (it writes to
            private memory, from which tiles are copied).
        reduce: ``local`` (the owner reduces, in rank order) | ``in_flight`` (CUDA only: the NVLink
            switch adds up in float32; without a switch, the owner's memory adds up in the dtype of
            the result, on path fused alone. The order of the sum is not fixed: results differ in
            their last bits from call to call) | ``in_kernel`` (GemmRS on GPUs of sm_90a and one
            node: as local, but warps of the GEMM's kernel that do not multiply sum, and no
            reduction follows).
        copy_streams: 1 moves tiles on a thread beside the GEMM, 0 on the calling thread, which is
            faster for small transfers.
        sm_margin: CUDA: multiprocessors that kernels that wait for peers leave to other streams'
            kernels; None: 8, or a 16th of fewer than 128, on which blocks that claim tiles multiply
            until they would wait for long. With 0 two streams can wait for each other through a
            peer, and the reduction of GemmRS begins while the GEMM ends.
        buffers: AGGemm on GPUs of one node, direction push: of gathered rows, 1 or 2. With 2 a call
            waits for no peer's entry, and takes twice the memory; None: 2 up to 64 MiB of rows.
        sends: GemmRS and GemmAR on GPUs of one node: ``stores`` (tiles are stored at their owners)
            | ``copies`` (in own memory, from which copy engines take each owner's rows, for links
            that stores make slow). Path medium: copies.
        tile_scheduler: CUDA: ``static`` (each block of a GEMM has tiles of its own) | ``dynamic``
            (blocks that run claim them one by one, so other kernels that hold multiprocessors cost
            no whole wave; kernels of stream-K have no such variant).
    """

    path: str = "fused"
    tile: tuple[int, int] | None = None
    raster: int | None = None
    comm_tile_rows: int | None = None
    direction: str | None = None
    order: str | None = None
    swizzle: str | None = None
    store: str | None = None
    reduce: str | None = None
    copy_streams: int | None = None
    sm_margin: int | None = None
    tile_scheduler: str | None = None
    buffers: int | None = None
    sends: str | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            is_open = value is None and name != "path"  # the heuristic does not choose the path
            if not is_open and value not in choices:
                raise ValueError(f"Knobs.{name} must be one of {', '.join(choices)}, got {value!r}")
        tile = self.tile
        if tile is not None and not (
            isinstance(tile, tuple)
            and len(tile) == 2
            and all(type(extent) is int and 1 <= extent < 2**31 for extent in tile)
        ):
            raise ValueError(f"Knobs.tile must be two positive integers, got {tile!r}")
        for name, least in (("raster", 1), ("comm_tile_rows", 1), ("sm_margin", 0)):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and least <= value < 2**31):
                wanted = "a positive integer" if least else "an integer >= 0"
                raise ValueError(f"Knobs.{name} must be {wanted}, got {value!r}")
        for name, few in (("copy_streams", (0, 1)), ("buffers", (1, 2))):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and value in few):
                raise ValueError(f"Knobs.{name} must be {few[0]} or {few[1]}, got {value!r}")

    @property
    def is_tiled(self) -> bool:
        """Whether tiles of a schedule wait for rows, or send them."""
        return self.path in ("fused", "medium", "in_kernel")

    def __str__(self) -> str:
        parts = []
        for knob in fields(self):
            value = getattr(self, knob.name)
            if value is not None:
                text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
                parts.append(f"{knob.name}={text}")
        return " ".join(parts)


@dataclass(frozen=True)
class Topology:
    """Ranks as ``nodes`` x ``domains`` (NUMA) x ``lanes``, lanes fastest.

    rank = (node * domains + domain) * lanes + lane

    Hosts with different numbers of ranks, or with ranks that are not numbered host by host, form no
    such mesh. For them ``uneven`` holds the host of each rank, ``nodes`` is the number of hosts,
    and ``lanes`` is the number of ranks of the largest host. Only the hierarchical order uses
    ``uneven``.

    ``world`` is the number of ranks. ``mesh`` is (nodes, domains, lanes), as the native maps take
    it; flat if there is no mesh.
    """

    nodes: int = 1
    domains: int = 1
    lanes: int = 1
    uneven: tuple[int, ...] = ()
    world: int = field(init=False, repr=False, compare=False)
    mesh: tuple[int, int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (
            ("nodes", self.nodes),
            ("domains", self.domains),
            ("lanes", self.lanes),
        ):
            if value < 1:
                raise ValueError(f"Topology.{name} must be at least 1, got {value}")
        if self.uneven and set(self.uneven) != set(range(self.nodes)):
            raise ValueError(
                f"Topology.uneven must number its hosts from 0 to {self.nodes - 1}, "
                f"got {self.uneven}"
            )
        world = len(self.uneven) or self.nodes * self.domains * self.lanes
        mesh = (1, 1, world) if self.uneven else (self.nodes, self.domains, self.lanes)
        vars(self).update(world=world, mesh=mesh)

    @staticmethod
    def flat(world: int) -> Topology:
        """Return a topology of ``world`` equal ranks: one node, one domain."""
        return Topology(1, 1, world)

    @staticmethod
    def of_hosts(hosts: Sequence[Hashable]) -> Topology:
        """Return the topology of ranks on these hosts (one entry per rank; any hashable value)."""
        numbers: dict[Hashable, int] = {}
        of_ranks = tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
        nodes, lanes = len(numbers), max(Counter(of_ranks).values())
        if of_ranks == tuple(rank // lanes for rank in range(nodes * lanes)):
            return Topology(nodes, 1, lanes)
        return Topology(nodes, 1, lanes, of_ranks)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host (node) of each rank."""
        per_node = self.domains * self.lanes
        return self.uneven or tuple(rank // per_node for rank in range(self.world))

    def __str__(self) -> str:
        if self.uneven:
            return f"{self.nodes} hosts, by rank {'-'.join(map(str, self.uneven))}"
        return f"{self.nodes} node(s) x {self.domains} domain(s) x {self.lanes} rank(s)"


def check_legal(knobs: Knobs, topology: Topology) -> None:
    """Raise if the knobs are illegal on this topology for every shape.

    Raises:
        ValueError: ``xor`` without a power-of-two world; rows that kernels send another way.
    """
    world = topology.world
    way = (knobs.direction or "push", knobs.order or "direct")
    if knobs.path == "in_kernel" and way != ("push", "direct"):
        raise ValueError(
            f"path in_kernel pushes rows to all ranks, direction push and order direct, got {way}"
        )
    if knobs.path == "in_kernel" and knobs.reduce == "in_kernel":
        raise ValueError(
            "path in_kernel sums behind its tiles, reduce local or (NVLink switch) in_flight, "
            f"got reduce {knobs.reduce}"
        )
    stores = knobs.path in ("fused", "unfused") and knobs.sends in (None, "stores")
    if knobs.reduce == "in_kernel" and not stores:
        raise ValueError(f"reduce in_kernel needs path fused and sends stores, got {knobs}")
    if knobs.swizzle == "xor" and world & (world - 1):
        raise ValueError(f"swizzle xor needs a power-of-two world, got {world}")


class ClusterTile(NamedTuple):
    """The properties of an op's GPU kernels that schedules depend on.

    Attributes:
        rows: rows of the result that a cluster of thread blocks computes at once.
        columns: columns of the same.
    """

    rows: int
    columns: int

    @classmethod
    def of(cls, tiles: Sequence[tuple[int, int]]) -> ClusterTile:
        """Return the smallest extents that hold each of these ``GemmConfig.cluster_tile``."""
        return cls(max(rows for rows, _ in tiles), max(columns for _, columns in tiles))

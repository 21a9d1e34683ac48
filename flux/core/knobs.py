"""The tuning space of a fused op: one dataclass; the heuristic fills in the unset fields.

``ClusterTile`` has what the heuristic knows of GPU kernels. Needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flux.core.topology import Topology


class Op(IntEnum):
    """The table of fused ops; values as in csrc/core/problem.h.

    Attributes:
        label: name of the class.
        title: name in reports.
        collective: what torch.distributed calls the communication.
        gathers: the rows of the input are communicated, before the GEMM.
        reduces: the partial results are communicated and summed, after the GEMM.
        scatters: of the sum each rank gets its own rows.
        all_reduces: every rank gets the whole sum.
        kernel: family of its kernels (``flux.kernels.config.OPS``).
    """

    label: str
    title: str
    collective: str
    gathers: bool
    reduces: bool
    scatters: bool
    all_reduces: bool
    kernel: str

    def __new__(cls, value: int, label: str, title: str, collective: str) -> Op:
        """Return the member; called once for each line below."""
        op = int.__new__(cls, value)
        op._value_ = value
        op.label, op.title, op.collective = label, title, collective
        op.gathers = collective == "all_gather"
        op.reduces = not op.gathers
        op.scatters = collective == "reduce_scatter"
        op.all_reduces = collective == "all_reduce"
        op.kernel = "ag_gemm" if op.gathers else "gemm_rs"
        return op

    @classmethod
    def named(cls, name: str) -> Op:
        """Return the op of this name; raise ValueError with the choices if there is none."""
        if name not in cls.__members__:
            raise ValueError(f"op must be one of {', '.join(cls.__members__)}, got {name!r}")
        return cls[name]

    ag_gemm = 0, "AGGemm", "AllGather + GEMM", "all_gather"
    gemm_rs = 1, "GemmRS", "GEMM + ReduceScatter", "reduce_scatter"
    gemm_ar = 2, "GemmAR", "GEMM + AllReduce", "all_reduce"


OPS = tuple(Op.__members__)


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
REDUCES = ("local", "in_flight")
TILE_SCHEDULERS = ("static", "dynamic")

_CHOICES: dict[str, tuple[str, ...]] = {
    "path": PATHS,
    "direction": tuple(d.name for d in Direction),
    "order": tuple(o.name for o in Order),
    "swizzle": tuple(s.name for s in Swizzle),
    "store": tuple(s.name for s in Store),
    "reduce": REDUCES,
    "tile_scheduler": TILE_SCHEDULERS,
}


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value < 2**31


@dataclass(frozen=True)
class Knobs:
    """All parameters of *how* an op runs. ``None`` lets the heuristic choose.

    Attributes:
        path: ``fused`` (tiles), ``medium`` (one chunk per rank around a ring and one GEMM per
            chunk, as in TransformerEngine; on GPUs GemmRS and GemmAR keep one GEMM, whose tiles
            leave by themselves, as on path fused), ``unfused`` (library collective and one GEMM),
            ``one_shot`` (CPU, between hosts: parts go straight to their ranks, in rounds of
            ``comm_tile_rows``, and the GEMM is cut along the rounds) or ``in_kernel`` (AGGemm on
            GPUs of one node, M up to 512: the GEMM's own blocks send the rows, in one launch).
        tile: (rows, columns) of a GEMM tile of the local output. one_shot: M rows or more leave the
            GEMM whole; smaller tiles have no meaning of their own.
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
            the result. The order of the sum is not fixed: results differ in their last bits from
            call to call).
        copy_streams: 1 moves tiles on a thread beside the GEMM, 0 on the calling thread, which is
            faster for small transfers.
        sm_margin: CUDA: multiprocessors that kernels that wait for peers leave to other streams'
            kernels; None: 8, or a 16th of fewer than 128. With 0 two streams can wait for each
            other through a peer, and the reduction of GemmRS begins while the GEMM ends.
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

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            is_open = value is None and name != "path"  # the heuristic does not choose the path
            if not is_open and value not in choices:
                raise ValueError(f"Knobs.{name} must be one of {', '.join(choices)}, got {value!r}")
        tile = self.tile
        if tile is not None and not (
            isinstance(tile, tuple) and len(tile) == 2 and all(map(_is_count, tile))
        ):
            raise ValueError(f"Knobs.tile must be two positive integers, got {tile!r}")
        for name in ("raster", "comm_tile_rows"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                raise ValueError(f"Knobs.{name} must be a positive integer, got {value!r}")
        margin = self.sm_margin
        if margin is not None and margin != 0 and not _is_count(margin):
            raise ValueError(f"Knobs.sm_margin must be an integer >= 0, got {margin!r}")
        if self.copy_streams is not None and not (
            type(self.copy_streams) is int and self.copy_streams in (0, 1)
        ):
            raise ValueError(f"Knobs.copy_streams must be 0 or 1, got {self.copy_streams!r}")

    @property
    def is_tiled(self) -> bool:
        """Whether tiles of a schedule wait for rows, or send them."""
        return self.path in ("fused", "medium", "in_kernel")

    def __str__(self) -> str:
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
                parts.append(f"{field.name}={text}")
        return " ".join(parts)


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
    if knobs.swizzle == "xor" and world & (world - 1):
        raise ValueError(f"swizzle xor needs a power-of-two world, got {world}")


@dataclass(frozen=True)
class ClusterTile:
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

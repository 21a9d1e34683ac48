"""Draw a routing of an op of experts on GPUs, and list the work of its kernel on each rank.

The lists are those of csrc/schedule/grouped.h, with which tests compare the kernel's own ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from flux import _C
from flux.core.knobs import Knobs, Topology
from flux.core.problem import DTYPES, ceil_div
from flux.core.schedule import TileSchedule
from flux.core.sparse_problem import SparseProblem
from flux.kernels.config import GemmConfig
from flux.machine.cluster import Cluster
from flux.select import dispatching
from flux.select.cost import memory_ms, roofline_ms
from flux.select.hardware import UNHIDDEN, blocks_per_wave
from flux.select.heuristic import dispatching as pushed_rows
from flux.select.heuristic import make_schedule, resolve
from flux.select.kernel import default_kernel
from flux.select.share import gemm_units

_DRAWN = 8192  # tokens at a time: a draw has a number for each of all experts


@dataclass(frozen=True)
class KernelWork:
    """What the blocks of one rank's kernel claim.

    Attributes:
        items: in the order of claims: tile * columns + column; below 0: -1 - i. Dispatch: i = 0
            awaits all rows, else it is push i - 1. Combine: i is a tile of sums * columns + column.
        columns: tiles of a row of tiles.
        touches: by tile: dispatch: signals of its tokens; combine: tiles of sums with its tokens.
        counts: combine: by tile of sums, the products of its tokens.
        pushes: peer, signal that follows, and how many rows.
        experts: of this rank that have a row.
        rows: routed ones.
    """

    items: list[int]
    columns: int
    touches: list[list[int]]
    counts: list[int]
    pushes: list[tuple[int, int, int]]
    experts: int
    rows: int

    def gemm_ms(
        self, problem: SparseProblem, cluster: Cluster, kernel: GemmConfig, slower: float = 1.0
    ) -> float:
        """Return the time of the GEMM alone: whole tiles, and the weights of experts with rows.

        ``slower``: time of multiplying over that on all multiprocessors.
        """
        (n, k), device = problem.local, cluster.device
        itemsize, result = (DTYPES[problem.dtype].itemsize, kernel.output_itemsize)
        moved = float(itemsize * (self.rows * k + self.experts * n * k) + result * self.rows * n)
        operations = 2.0 * slower * len(self.touches) * kernel.tile[0] * n * k
        return roofline_ms(device, problem.dtype, operations, moved)


@dataclass(frozen=True, eq=False)
class DrawnRouting:
    """A routing whose tokens take each set of experts equally often; equal for equal seeds."""

    problem: SparseProblem
    seed: int = 0

    @cached_property
    def chosen(self) -> npt.NDArray[np.int64]:
        """[M, topk]: the experts of each token."""
        generator, problem = np.random.default_rng(self.seed), self.problem
        parts = []
        for first in range(0, problem.m, _DRAWN):
            tokens = min(_DRAWN, problem.m - first)
            keys = generator.random((tokens, problem.experts), np.float32)
            parts.append(np.argpartition(keys, problem.topk - 1)[:, : problem.topk])
        return np.ascontiguousarray(np.concatenate(parts), np.int64)

    @cached_property
    def needed(self) -> npt.NDArray[np.bool_]:
        """[M, W]: whether a rank has an expert of a token."""
        problem = self.problem
        of_part = np.empty(problem.experts, np.int64)
        for part in range(problem.ep):
            begin = _C.core.row_begin(problem.experts, problem.ep, part)
            of_part[begin : _C.core.row_end(problem.experts, problem.ep, part)] = part
        parts = np.zeros((problem.m, problem.ep), bool)
        np.put_along_axis(parts, of_part[self.chosen], True, 1)
        return parts.repeat(problem.world // problem.ep, 1)

    @cached_property
    def _before(self) -> npt.NDArray[np.int64]:
        counts = np.zeros((self.problem.m + 1, self.problem.world), np.int64)
        np.cumsum(self.needed, 0, out=counts[1:])
        return counts

    def count(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return, by rank, how many of the tokens [begin, end) have one of its experts."""
        counts: npt.NDArray[np.int64] = self._before[end] - self._before[begin]
        return counts

    @property
    def busiest(self) -> int:
        """Tokens that the busiest rank sends or receives."""
        ranks = range(self.problem.world)
        sent = np.array([self.count(*self.problem.rows(rank)) for rank in ranks])
        np.fill_diagonal(sent, 0)
        return int(max(sent.sum(0).max(), sent.sum(1).max()))

    def work(
        self, schedule: TileSchedule, kernel: GemmConfig, ahead: int, moves: bool
    ) -> KernelWork:
        """Return the work of one rank.

        Args:
            schedule: of the rank.
            kernel: the grouped one.
            ahead: tiles between a sum and the last product that it awaits.
            moves: whether the kernel sends tokens only where their experts are.
        """
        problem, address = self.problem, self.chosen.ctypes.data
        first, local = problem.spec().local_experts(problem.world, schedule.rank)
        sizes = {"m": problem.m, "topk": problem.topk, "total": problem.experts}
        routing = _C.Routing(
            experts=address, **sizes, first_expert=first, local=local, world=problem.world
        )
        rows, width = kernel.tile[:2]
        columns = ceil_div(problem.local[0], width)
        if problem.op.gathers:
            made = routing.gather_work(schedule.native, rows, columns)
            if moves and problem.world > 1:
                made.dispatch(schedule.native, address, problem.topk, problem.experts, problem.ep)
        else:
            made = routing.sum_work(schedule.native, rows, width, ahead)
        items, experts, routed, tokens, _, counts, pushes, _, _ = _filled(made)
        number = tokens // rows
        if problem.op.gathers:
            (per_chunk, span), chunk = _spans(schedule), problem.chunk
            number = tokens // chunk * per_chunk + tokens % chunk // span
        of_tiles = zip(routed.reshape(-1, rows) >= 0, number.reshape(-1, rows), strict=True)
        fours: list[list[int]] = pushes.reshape(-1, 4).tolist()
        return KernelWork(
            items=items.tolist(),
            columns=columns,
            touches=[np.unique(numbers[there]).tolist() for there, numbers in of_tiles],
            counts=counts.tolist(),
            pushes=[(peer, signal, end - begin) for peer, signal, begin, end in fours],
            experts=len(set(experts.tolist())),
            rows=routing.count,
        )


def _filled(work: _C.GroupedWork) -> list[npt.NDArray[np.int32]]:
    maps = np.empty(sum(work.sizes), np.int32)
    work.fill(maps.ctypes.data)
    return np.split(maps, np.cumsum(work.sizes)[:-1])


def _spans(schedule: TileSchedule) -> tuple[int, int]:
    """Return communication tiles of a chunk, and rows of one."""
    rows = schedule.knobs.comm_tile_rows
    assert rows is not None
    return _C.core.tiles_per_chunk(schedule.shape[0], schedule.world, rows), rows


@dataclass(frozen=True)
class RoutedCall:
    """A call of a dispatch or a combine, and the unfused path.

    Attributes:
        drawn: the routing.
        kernel: of the GEMM.
        knobs: all fields set.
        schedules: by rank.
        works: by rank.
        moves: whether kernels send only rows that are needed.
        blocks: of a kernel, that run at once.
        waves: tiles of the busiest block.
        tile_us: by rank the time of a tile.
        parts: of the unfused path, in ms, in the order of a dispatch.
    """

    drawn: DrawnRouting
    kernel: GemmConfig
    knobs: Knobs
    schedules: list[TileSchedule]
    works: list[KernelWork]
    moves: bool
    blocks: int
    waves: int
    tile_us: list[float]
    parts: dict[str, float]


def routed_call(
    problem: SparseProblem,
    cluster: Cluster,
    topology: Topology,
    knobs: Knobs,
    gemm_ms: float | None = None,
    seed: int = 0,
) -> RoutedCall:
    """Draw a routing, and list and rate the work of a call.

    ``gemm_ms``: time of the busiest rank's GEMM; None: the roofline's.

    Raises:
        ValueError: the kernels cannot run with these knobs, or none supports the shape.
    """
    world, device, dense = problem.world, cluster.device, problem.scheduled
    reason = problem.spec().reason_not_on_gpus(knobs, problem.nodes)
    if reason is not None:
        raise ValueError(reason)
    kernel, drawn = default_kernel(problem, cluster, knobs), DrawnRouting(problem, seed)
    comm_rows = knobs.comm_tile_rows or pushed_rows(problem).comm_tile_rows
    knobs = resolve(dense, replace(knobs, comm_tile_rows=comm_rows), kernel.cluster_tile)
    units = gemm_units(problem, cluster, knobs, kernel)
    sizes, moves = (problem.m, dense.n, problem.k), problem.nodes == 1
    make = partial(make_schedule, itemsize=problem.itemsize, cluster=kernel.cluster_tile)
    schedules = [
        make(problem.op.name, sizes, world, rank, topology, knobs) for rank in range(world)
    ]
    ahead = units * (2 if kernel.arch == "90a" else 1)
    works = [drawn.work(schedule, kernel, ahead, moves) for schedule in schedules]
    blocks = min(blocks_per_wave(kernel, units), max(len(work.items) for work in works))
    whole = max(work.gemm_ms(problem, cluster, kernel) for work in works)
    given = 1.0 if gemm_ms is None or not whole else gemm_ms / whole
    sent = drawn.busiest if moves else (world - 1) * problem.chunk
    moved = memory_ms(device, sent * problem.row_bytes * (2 if problem.op.gathers else 1))
    tile_us, waves = [], []
    for work in works:
        tiles = max(1, len(work.touches) * work.columns)
        waves.append(ceil_div(tiles, blocks))
        slower = waves[-1] / ceil_div(tiles, blocks_per_wave(kernel, device.units))
        busy = given * work.gemm_ms(problem, cluster, kernel, slower)
        tile_us.append(1e3 * (busy + UNHIDDEN * min(busy, moved)) / waves[-1])
    parts = {"lists of work": dispatching.lists_ms(problem)}
    if world > 1:
        on_all = drawn.busiest * world / (world - 1)
        parts |= dispatching.unfused_parts(problem, cluster, on_all)
    parts["GEMM"] = given * whole
    made = schedules, works, moves, blocks, max(waves), tile_us, parts
    return RoutedCall(drawn, kernel, knobs, *made)

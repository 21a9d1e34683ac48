"""Simulate one call of a fused op on hardware that is not here, in virtual time.

The call is executed from its real tile schedule (flux/core/schedule.py) by processes on the virtual
hardware of machine.py: gather.py has those of AGGemm, pushed.py those of its path in_kernel, and
scatter.py those of GemmRS and GemmAR. Each rank is simulated. The only inputs are the cluster file
and the time of the whole GEMM; no time of an overlapped call enters.

    stream   enter | own rows | kernel: blocks take tiles, wait, multiply, store | reduction
    copies   rows of a peer, signal | rows of a peer, signal | ...
    network  the same between hosts

The GEMM is cut into the tiles of its kernel. The blocks that run at once take W = ceil(tiles /
blocks) tiles each, and a tile takes the whole GEMM's time / W. So a call that never waits takes
exactly the time of the GEMM, in which the last, partly filled wave is contained. It is that of a
GEMM on all multiprocessors, times what the busiest block has more to do because of the margin that
kernels that wait leave. Transfers use the memory that the GEMM reads too, which makes it longer
(flux/select/cost.py). Blocks for which other kernels leave no room start when others end.

path = medium is that of TransformerEngine's userbuffers: a tile is a whole GEMM of one rank's rows,
with a launch, a kernel and waves of its own, and copies between neighbours, or of partials to their
owners, have the size of a chunk.

    GEMMs    own rows | rows of a peer | rows of the next ...    AllGather: each waits for its rows
    copies   own rows, signal | rows of a peer, signal ...
    GEMMs    a peer's rows | the next one's | ... | own rows     ReduceScatter: then the sum
    copies                 | partials, signal | partials ...

Experts: rows are those of all experts together. Those of an owner's tokens come one after the
other, and every expert's last tile is multiplied as a whole.

docs/use/simulator.md says what is not modelled, and how far the results are from published times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from flux.core.collector import paused_collector
from flux.core.events import Event, Kind
from flux.core.knobs import Direction, Knobs, Order, Topology
from flux.core.problem import Problem, ceil_div, round_up
from flux.core.schedule import TileSchedule
from flux.kernels.config import GemmConfig
from flux.machine.cluster import Cluster
from flux.opsim.exchange import HeadsScatter
from flux.opsim.gather import Gather
from flux.opsim.machine import SimulatedFabric, SimulatedMachine
from flux.opsim.parts import LAUNCH_US, Log, Move, SimulatedCall
from flux.opsim.pushed import Pushed
from flux.opsim.scatter import Scatter
from flux.select.chunks import chunk_gemm_ms
from flux.select.cost import gemm_beside_transfers_ms, library_ms, shuffle_ms
from flux.select.cost import gemm_ms as modelled_gemm_ms
from flux.select.cycles import CLAIM
from flux.select.hardware import CYCLES_PER_MS, blocks_per_wave
from flux.select.heuristic import make_schedule, resolve, untuned
from flux.select.kernel import chunk_kernel, default_kernel
from flux.select.share import gemm_units, slowdown

MOST_TILES = 200_000
"""GEMM tiles of all ranks that one simulation runs; more take over a minute."""
FEW_TILES = 4_000
"""The same of one operator of a plan."""
Processes = Gather | HeadsScatter | Pushed | Scatter
"""Those of all ranks of a call."""


@dataclass(frozen=True)
class Simulated:
    """The outcome of one simulated call. All times begin when all ranks enter the call.

    Attributes:
        kernel: the kernel of the GEMM; None for unfused.
        gemm_ms: time of the whole GEMM of one rank, alone.
        comm_ms: time of the library's collective, alone.
        ranks_ms: end of the call, by rank.
        moves: transfers between ranks, in order of their end.
        waves: tiles that the busiest block computes; medium: GEMMs, one after the other.
        blocks: blocks (clusters of thread blocks) that run at once; medium: 1, a GEMM.
    """

    method: str
    problem: Problem
    knobs: Knobs
    kernel: GemmConfig | None
    gemm_ms: float
    comm_ms: float
    ranks_ms: tuple[float, ...]
    moves: tuple[Move, ...] = ()
    waves: int = 0
    blocks: int = 0
    _log: Log = field(default_factory=Log, repr=False, compare=False)

    @property
    def total_ms(self) -> float:
        """Time of the call: the end of its last rank."""
        return max(self.ranks_ms)

    @property
    def ect_ms(self) -> float:
        """Effective communication time (Flux paper, section 2.3): beyond the whole GEMM."""
        return self.total_ms - self.gemm_ms

    def events(self) -> Iterator[Event]:
        """Yield the events of all ranks, as a trace of `flux trace op` has them."""
        for rank, lane, kind, name, start, end, details in self._log.spans:
            yield Event(rank, lane, kind, name, start, end - start, details)


def topology_of(problem: Problem, cluster: Cluster) -> Topology:
    """Return the mesh of the ranks: hosts are filled one after the other.

    Only on PCIe do NUMA domains matter, so only there are they part of the mesh.
    """
    world, nodes = problem.world, problem.nodes
    if world % nodes:
        raise ValueError(f"{world} ranks cannot be divided evenly over {nodes} hosts")
    lanes = world // nodes
    if lanes > cluster.devices or nodes > cluster.hosts:
        raise ValueError(
            f"{cluster.name} has {cluster.hosts} hosts of {cluster.devices} devices, got {nodes} "
            f"hosts of {lanes} ranks"
        )
    domains = cluster.numa_domains
    if cluster.link.kind == "pcie" and lanes == cluster.devices and lanes % domains == 0:
        return Topology(nodes, domains, lanes // domains)
    return Topology(nodes, 1, lanes)


def check(problem: Problem, cluster: Cluster, gemm_ms: float | None) -> None:
    """Raise ValueError if the problem cannot be simulated on this cluster."""
    if cluster.device.kind != "cuda":
        raise ValueError(
            f"the op simulator models GPUs, and the devices of {cluster.name} are of kind "
            f"{cluster.device.kind}"
        )
    if problem.experts > 1 and problem.m < problem.experts and not problem.variant:
        raise ValueError(
            f"each of {problem.experts} experts needs a row, got {problem.m} rows of all tokens"
        )
    if problem.world > 1 and cluster.link.gbs <= 0:
        raise ValueError(
            f"{cluster.name} has no speed of its link, which {problem.world} ranks use"
        )
    if gemm_ms is not None and not 0 < gemm_ms < 1e9:
        raise ValueError(f"the GEMM's time must be above 0 and below 1e9 ms, got {gemm_ms}")


def _check_knobs(problem: Problem, cluster: Cluster, knobs: Knobs) -> None:
    if problem.experts > 1 and knobs.path != "fused":
        raise ValueError(f"path = {knobs.path} of a grouped GEMM is not simulated")
    if knobs.reduce == "in_flight" and not (knobs.path == "in_kernel" and cluster.switch_adds):
        raise ValueError(
            "reduce = in_flight is simulated on path in_kernel behind an NVLink switch of sm_90 "
            f"alone, got path {knobs.path} on {cluster.name}"
        )
    if knobs.direction != "pull":
        return
    if problem.nodes > 1:
        raise ValueError("direction = pull needs memory that peers can read, got several hosts")
    if problem.op.reduces:
        raise ValueError(f"the GPU kernel of {problem.op.name} stores partials itself: no pull")


def unfused(problem: Problem, cluster: Cluster, gemm_ms: float | None = None) -> Simulated:
    """Return the unfused path: the library's collective, and the GEMM after or before it."""
    check(problem, cluster, gemm_ms)
    whole = modelled_gemm_ms(problem, cluster) if gemm_ms is None else gemm_ms
    comm, shuffle = library_ms(problem, cluster), shuffle_ms(problem, cluster)
    parts = {problem.op.collective: comm, "rows of experts": shuffle, "GEMM": whole}
    return one_by_one(problem, parts, comm, gathers=problem.op.gathers)


def one_by_one(
    problem: Problem, parts: dict[str, float], comm: float, *, gathers: bool
) -> Simulated:
    """Return the unfused path: ``parts`` in ms, in this order if it ``gathers``."""
    log, ordered = Log(), [*parts.items()]
    for rank in range(problem.world):
        begin = 0.0
        for name, length in ordered if gathers else reversed(ordered):
            if length:
                kind = Kind.gemm if name == "GEMM" else Kind.copy
                log.add(rank, "stream", kind, name, begin, begin + 1e3 * length)
            begin += 1e3 * length
    total, gemm = (sum(parts.values()),) * problem.world, parts["GEMM"]
    return Simulated("unfused", problem, Knobs(path="unfused"), None, gemm, comm, total, _log=log)


def simulate(
    problem: Problem,
    cluster: Cluster,
    knobs: Knobs | None = None,
    *,
    kernel: GemmConfig | None = None,
    gemm_ms: float | None = None,
    taken: int = 0,
) -> Simulated:
    """Run one call in virtual time. Pure: equal arguments, equal result.

    ``knobs`` fixes fields; the order of ``untuned`` and the heuristic of GPUs are the rest.
    ``kernel`` is by default ``default_kernel``, of path medium ``chunk_kernel``. ``gemm_ms`` is the
    time of the whole GEMM of one rank alone, by default the roofline's. ``taken``: multiprocessors
    that other kernels hold all the time.

    Raises:
        ValueError: the cluster has no GPUs or too few, no kernel supports the shape, the knobs are
            illegal, the schedule has more than MOST_TILES tiles, or the path is not simulated.
    """
    knobs = knobs or Knobs()
    if knobs.path == "unfused":
        return unfused(problem, cluster, gemm_ms)
    if knobs.path == "one_shot":
        raise ValueError("path = one_shot is of CPUs, and is not simulated")
    check(problem, cluster, gemm_ms)
    topology = topology_of(problem, cluster)
    _check_knobs(problem, cluster, knobs)
    whole = modelled_gemm_ms(problem, cluster) if gemm_ms is None else gemm_ms
    medium = knobs.path == "medium"
    of_whole = whole, kernel or default_kernel(problem, cluster, knobs)
    kernel = kernel or (chunk_kernel(problem, cluster, of_whole) if medium else of_whole[1])
    if knobs.path == "fused" and knobs.order is None:
        knobs = replace(knobs, order=untuned(problem, cluster).order)
    full = _resolved(problem, knobs, kernel)
    _check_size(problem, full)
    schedules = [
        schedule_of(problem, topology, full, kernel, rank) for rank in range(problem.world)
    ]
    tiles = max(len(schedule.visits) for schedule in schedules)
    units = gemm_units(problem, cluster, full, kernel)
    alone, raster, start_us = whole, full.raster, 0.0
    blocks, late, waiting = 1, 0, 1
    if not medium:
        blocks = blocks_of(kernel, units, tiles)
        late = blocks - blocks_of(kernel, min(units, cluster.device.units - taken), tiles)
        waiting = blocks_of(kernel, gemm_units(problem, cluster, full), tiles)
        slower = slowdown(problem, cluster, full, kernel) * _filled(problem, kernel)
        alone *= modelled_gemm_ms(problem, cluster, slower=slower)
        alone /= modelled_gemm_ms(problem, cluster)
        if kernel.tile_scheduler == "dynamic" and kernel.arch == "80":  # others claim ahead
            start_us = 1e3 * CLAIM["80"] / CYCLES_PER_MS
    elif problem.world > 1:
        alone = tiles * chunk_gemm_ms(problem, cluster.device, kernel, of_whole, units)
        raster, start_us = None, LAUNCH_US
    waves = ceil_div(tiles, blocks)
    busy = gemm_beside_transfers_ms(problem, cluster, kernel, raster, alone)
    call = call_of(
        problem,
        cluster,
        topology,
        kernel=kernel,
        schedules=schedules,
        blocks=blocks,
        late=late,
        waiting=waiting,
        tile_us=[1e3 * busy / waves + start_us] * problem.world,
    )
    kind: type[Processes] = Gather if problem.op.gathers else Scatter
    if knobs.path == "in_kernel" and problem.op.gathers:
        kind = Pushed
    return finished(call, kind, full, whole, library_ms(problem, cluster), waves)


def call_of(problem: Problem, cluster: Cluster, topology: Topology, **fields: Any) -> SimulatedCall:
    """Return a call on the links of a cluster. ``fields``: the others of ``SimulatedCall``."""
    fabric = SimulatedFabric(cluster, topology.hosts)
    ranks = range(problem.world)
    routes = {(src, dst): fabric.route(src, dst) for src in ranks for dst in ranks if src != dst}
    machine = SimulatedMachine(fabric.capacity)
    fields |= {"hosts": topology.hosts, "routes": routes, "machine": machine}
    return SimulatedCall(problem=problem, cluster=cluster, **fields)


def finished(
    call: SimulatedCall,
    kind: type[Processes],
    knobs: Knobs,
    gemm_ms: float,
    comm_ms: float,
    waves: int,
) -> Simulated:
    """Run a call's processes to their end; ``knobs``: all fields set."""
    with paused_collector():
        ends = kind(call).start()
        call.machine.run()
    return Simulated(
        method="flux" if knobs.path in (None, "fused") else knobs.path,
        problem=call.problem,
        knobs=knobs,
        kernel=call.kernel,
        gemm_ms=gemm_ms,
        comm_ms=comm_ms,
        ranks_ms=tuple((end.flag.at_us or 0.0) * 1e-3 for end in ends),
        moves=tuple(call.log.moves),
        waves=waves,
        blocks=call.blocks,
        _log=call.log,
    )


def simulated_part(problem: Problem, cluster: Cluster) -> tuple[int, Simulated]:
    """Return a call of every n-th of the rows of an op of experts, and n: it has FEW_TILES.

    Time grows with rows, as all experts have more of them.
    """
    rows, columns = default_kernel(problem, cluster).tile[:2]
    tiles = problem.world * ceil_div(problem.m, rows) * ceil_div(problem.local[0], columns)
    least = problem.topk * problem.experts * rows
    times = max(1, min(ceil_div(tiles, FEW_TILES), problem.m // least))
    fewer = replace(problem, m=round_up(ceil_div(problem.m, times), problem.topk))
    return times, simulate(fewer, cluster)


def _filled(problem: Problem, kernel: GemmConfig) -> float:
    """Return the rows that the kernel multiplies over those there are: experts fill whole tiles."""
    if problem.experts == 1:
        return 1.0
    of_expert = ceil_div(problem.m, problem.experts)
    return problem.experts * round_up(of_expert, kernel.cluster_tile.rows) / problem.m


def blocks_of(kernel: GemmConfig, units: int, tiles: int) -> int:
    """Return the blocks, or clusters of blocks, that run at once."""
    size = kernel.cluster[0] * kernel.cluster[1]
    return min(max(blocks_per_wave(kernel, max(units, 1)) // size, 1), tiles)


def _resolved(problem: Problem, knobs: Knobs, kernel: GemmConfig) -> Knobs:
    """Return the knobs with every field set. A tile of path medium is the GEMM of a chunk."""
    if knobs.path == "medium":
        knobs = replace(knobs, tile=(problem.chunk, problem.local[0]))
    return resolve(problem, knobs, kernel.cluster_tile)


def _check_size(problem: Problem, knobs: Knobs) -> None:
    assert knobs.tile is not None
    rows, columns = knobs.tile
    tiles = problem.world * ceil_div(problem.m, rows) * ceil_div(problem.local[0], columns)
    check_tiles(tiles, knobs)


def check_tiles(tiles: int, knobs: Knobs) -> None:
    """Raise ValueError for more GEMM tiles of all ranks than a simulation runs."""
    assert knobs.tile is not None
    if tiles > MOST_TILES:
        rows, columns = knobs.tile
        raise ValueError(
            f"the ranks have {tiles} GEMM tiles of {rows} x {columns} together, and the simulator "
            f"runs at most {MOST_TILES}; take smaller sizes"
        )


def schedule_of(
    problem: Problem, topology: Topology, knobs: Knobs, kernel: GemmConfig, rank: int
) -> TileSchedule:
    """Return the schedule of a rank."""
    sizes = (problem.m, problem.n, problem.k)
    return make_schedule(
        problem.op.name,
        sizes,
        problem.world,
        rank,
        topology,
        knobs,
        itemsize=problem.itemsize,
        cluster=kernel.cluster_tile,
    )


def legal_knobs(
    problem: Problem, cluster: Cluster, fixed: Knobs | None = None
) -> list[tuple[Knobs, tuple[str, ...]]]:
    """Return the knobs of every order and direction whose schedule differs from the others.

    Returns:
        Pairs of knobs and the names of the orders that make this schedule, the first included. In
        GemmRS and GemmAR the kernel itself stores partials, and there is one direction: push.
    """
    fixed = fixed or Knobs()
    check(problem, cluster, None)
    _check_knobs(problem, cluster, fixed)
    topology, kernel = topology_of(problem, cluster), default_kernel(problem, cluster, fixed)
    pulls = problem.op.gathers and problem.nodes == 1
    directions = [d.name for d in Direction] if pulls else ["push"]
    ends = sorted({0, problem.world - 1})
    by_schedule: dict[object, tuple[Knobs, list[str]]] = {}
    for order in [fixed.order] if fixed.order else [o.name for o in Order]:
        for direction in [fixed.direction] if fixed.direction else directions:
            knobs = _resolved(problem, replace(fixed, order=order, direction=direction), kernel)
            _check_size(problem, knobs)
            schedules = [schedule_of(problem, topology, knobs, kernel, rank) for rank in ends]
            parts = ((s.visits, s.transfers, s.results, s.homes) for s in schedules)
            by_schedule.setdefault((direction, *parts), (knobs, []))[1].append(str(order))
    return [(knobs, tuple(orders)) for knobs, orders in by_schedule.values()]

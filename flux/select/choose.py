"""Choose the knobs of an op for each M: fixed by the user, tuned, or from the cost model.

Rank 0 reads the cache once, when the op is built, and sends the result to the other ranks. If every
rank read the file itself, at different moments, ranks could run different schedules. Calls read no
files and communicate nothing for this. The schedule of an M that was called before is a dictionary
lookup, as without tuning.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from flux.core.knobs import Knobs, Topology, check_legal
from flux.core.problem import DTYPES, SCALED, Problem, ceil_div
from flux.core.sparse_problem import SparseProblem, problem_of
from flux.core.spec import OpSpec
from flux.kernels.config import GemmConfig
from flux.machine.cluster import Cluster, group_parts, world_shape
from flux.machine.detection import detect, product_tflops
from flux.machine.host import machine_identity
from flux.select.all_to_all import ModelledPath
from flux.select.cache import look_up
from flux.select.dispatching import predict_sparse
from flux.select.heuristic import IN_KERNEL_ROWS, dispatching, untuned
from flux.select.in_kernel import FewRows, reason_not_in_kernel
from flux.select.one_shot import ALL_ROWS, MOST_BLOCKS, ONE_SHOTS
from flux.select.winners import Entry, Key, Winner, fit, most_tiles
from flux.transport.exchange import Exchange
from flux.transport.link_speed import measured_gbs
from flux.transport.placement import Placement

_warned: set[str] = set()


class Choice(Protocol):
    """Knobs by M; equal on all ranks."""

    @property
    def kernel(self) -> GemmConfig | None:
        """Kernel of the GEMM, on a GPU, if tuning found one."""
        ...

    @property
    def most_tiles(self) -> int:
        """Most communication tiles that tuned winners cut a chunk into, at any M; 0 without any.

        ``variants`` leave the rows of winners' tiles open: a winner is scaled to each M.
        """
        ...

    def knobs(self, m: int) -> Knobs:
        """Return the knobs of a call with ``m`` rows; the heuristic fills in open fields."""
        ...

    @property
    def variants(self) -> Sequence[Knobs]:
        """All knobs that ``knobs`` may return, except fields that do not affect memory."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same knobs for all M: the user's, or none."""

    given: Knobs
    kernel: GemmConfig | None = None
    most_tiles: int = 0

    def knobs(self, m: int) -> Knobs:
        """Return the fixed knobs."""
        return self.given

    @property
    def variants(self) -> Sequence[Knobs]:
        """The fixed knobs."""
        return (self.given,)


@dataclass(frozen=True)
class Modelled:
    """The choice of the cost model among ``variants``, for ops without tuning results.

    Attributes:
        config: on GPUs, a kernel like the op's own, by which calls are predicted.
        apart: see ``usable``; consider ``ways_of_rows``, too, which need no more memory.
    """

    problem: Problem
    cluster: Cluster
    variants: tuple[Knobs, ...]
    config: GemmConfig | None = None
    kernel: GemmConfig | None = None
    most_tiles: int = 0
    apart: bool = False

    def knobs(self, m: int) -> Knobs:
        """Return the knobs of least modelled time, the first of equals."""
        problem = replace(self.problem, m=m)
        ways = [*self.variants, *(ways_of_rows(problem) if self.apart else [])]

        def time(knobs: Knobs) -> float:
            return sum(predict_sparse(problem, self.cluster, knobs, self.config))

        return min(ways, key=time)


@dataclass(frozen=True)
class Tuned:
    """Winners, by M; for an M that was not tuned, the nearest winner, scaled to it."""

    entry: Entry
    spec: OpSpec
    topology: Topology
    speaks: bool
    legal: Callable[[int, Knobs], bool]
    kernel: GemmConfig | None = None

    @property
    def most_tiles(self) -> int:
        """Most communication tiles of a chunk, over all winners."""
        return most_tiles(self.entry.winners, self.topology.world)

    def knobs(self, m: int) -> Knobs:
        """Return the winner's knobs for ``m``, scaled; warn once if ``m`` was not tuned."""
        winner, close = self.entry.nearest(m)
        assert winner is not None
        if not close and self.speaks:
            self._warn_once(m, winner)
        knobs = fit(winner.knobs, winner.m, m, self.topology.world)
        if knobs.path == "in_kernel" and m > IN_KERNEL_ROWS:
            knobs = Knobs()  # which pushes rows directly, too
        # Rounding may have made tiles straddle owners. Then the heuristic chooses those fields.
        alternatives = (knobs, replace(knobs, store=None), replace(knobs, store=None, tile=None))
        for candidate in alternatives:
            if self.legal(m, candidate):
                return candidate
        return Knobs(path=knobs.path, direction=knobs.direction, order=knobs.order)

    @property
    def variants(self) -> Sequence[Knobs]:
        """The winners' knobs, without the sizes of tiles: see ``most_tiles``."""
        return [replace(w.knobs, tile=None, comm_tile_rows=None) for w in self.entry.winners]

    def _warn_once(self, m: int, winner: Winner) -> None:
        text = (
            f"{self.spec.label}(n={sum(self.spec.n)}, k={self.spec.k}): not tuned for M = {m}; "
            f"knobs tuned for M = {winner.m} are used (`flux tune --op {self.entry.key.op} "
            f"--m {m} ...` finds better ones)"
        )
        if self.entry.key.name not in _warned:
            _warned.add(self.entry.key.name)
            warnings.warn(text, UserWarning, stacklevel=2)


def choose(
    spec: OpSpec,
    exchange: Exchange,
    placement: Placement,
    topology: Topology,
    kind: str,
    legal: Callable[[int, Knobs], bool],
) -> Choice:
    """Return the choice of an op with ``tuning="cache"``. Collective.

    Args:
        spec: the op.
        exchange: the op's ranks.
        placement: which ranks share memory, as the op sees it.
        topology: of the group.
        kind: of device: ``cpu`` | ``cuda``.
        legal: whether a schedule can be made for (M, knobs).
    """
    if exchange.world == 1:
        return Fixed(Knobs())  # no communication to tune
    shape = world_shape(placement.nodes)
    problem = problem_of(spec, topology.world, topology.nodes)
    # A topology says how rows travel. Whether memory can be pulled from follows from the placement.
    apart = placement.topology.nodes > 1 if kind == "cpu" else topology.nodes > 1
    cluster = _detected(kind)
    cores = machine_identity(), os.sched_getaffinity(0), torch.get_num_threads()
    gathered = exchange.all_gather((None if cluster is None else cluster.parts(shape), cores))
    everybody = [parts for parts, _ in gathered]
    entry: Entry | None = None
    known = [parts for parts in everybody if parts is not None]
    if exchange.rank == 0 and len(known) == exchange.world:
        key = Key.of(problem, shape, group_parts(known), kind)
        entry = look_up(key, timeout_s=exchange.timeout_s)
        entry = None if entry is None else usable(entry, topology, kind, apart)
    entry, cluster = exchange.all_gather((entry, cluster))[0]
    if entry is not None:
        kernel = None
        if kind == "cuda":
            entry, kernel = _one_kernel(entry, spec.max_m)
        return Tuned(entry, spec, topology, exchange.rank == 0, legal, kernel)
    if cluster is None or (spec.op.exchanges and kind == "cpu"):  # of which there is no model
        return Fixed(Knobs())
    if isinstance(problem, SparseProblem) and spec.op.exchanges:
        return ModelledPath(problem, cluster)
    if kind == "cuda":
        return untuned_on_gpus(spec, problem, cluster)
    if apart:
        cluster = with_measured_speeds(cluster, exchange, placement, problem.dtype)
        cluster = cluster.crowded(threads_per_core([cores for _, cores in gathered]))
    return modelled(problem, cluster, apart, spec.dispatches)


def untuned_on_gpus(spec: OpSpec, problem: Problem, cluster: Cluster) -> Choice:
    """Return the choice of an op on GPUs without winners; flux/select/kernel.py models kernels."""
    from flux.select.kernel import default_kernel  # ops on CPUs load no model of kernels

    between_nodes = problem.nodes > 1
    if spec.dispatches and not between_nodes:
        return Fixed(dispatching(problem))
    fixed = Fixed(untuned(problem.dense, cluster))
    if not between_nodes and reason_not_in_kernel(spec, problem.world, 1) is not None:
        return fixed
    try:
        config = default_kernel(problem, cluster)
    except ValueError:  # no kernel of the default set has these sizes: there is no prediction
        return fixed
    if between_nodes:
        return Modelled(problem, cluster, (*fixed.variants, Knobs(path="unfused")), config)
    return FewRows(problem.dense, cluster, config)


def threads_per_core(ranks: Sequence[tuple[str, set[int], int]]) -> float:
    """Return the threads of ranks on a core of the most crowded machine, at least 1.

    Args:
        ranks: of each its machine, its cores and its threads. Containers of a machine share its
            cores, and so do simulated hosts.
    """
    cores: dict[str, set[int]] = {}
    threads: dict[str, int] = {}
    for machine, own, count in ranks:
        cores.setdefault(machine, set()).update(own)
        threads[machine] = threads.get(machine, 0) + count
    return max(1.0, *(threads[machine] / len(cores[machine]) for machine in cores))


def with_measured_speeds(
    cluster: Cluster, exchange: Exchange, placement: Placement, dtype: str
) -> Cluster:
    """Return a host of CPU ranks with the speeds of products, and of a network that states none.

    Collective; ``cluster`` and the result are equal on all ranks: the slowest one's products count.

    Args:
        cluster: a host, as it was detected.
        exchange: the ranks.
        placement: their hosts.
        dtype: of the products' operands.
    """
    dtype = "float32" if dtype == SCALED else dtype  # as CPUs multiply it
    own = product_tflops(DTYPES[dtype].torch, torch.get_num_threads())
    tflops = {**cluster.device.tflops, dtype: min(exchange.all_gather(own))}
    cluster = replace(cluster, device=replace(cluster.device, tflops=tflops, gemm_share=1.0))
    if cluster.network.gbs:
        return cluster
    nics = max(cluster.network.nics, 1)
    gbits = measured_gbs(exchange, placement) * 8 / nics
    return replace(cluster, network=replace(cluster.network, nics=nics, gbits=gbits))


def _detected(kind: str) -> Cluster | None:
    """Return this rank's host; None if no device can be inspected."""
    if kind == "cuda" and not torch.cuda.is_available():
        return None
    return detect(kind)


def modelled(
    problem: Problem, cluster: Cluster, apart: bool = False, dispatches: bool = False
) -> Modelled:
    """Return the cost model's choice for an op without winners.

    Args:
        problem: the op at its largest M.
        cluster: devices and links.
        apart: see ``usable``.
        dispatches: the op moves some tokens only.

    Between hosts a chunk may be whole where rows travel before the GEMM.
    """
    paths = ("fused", "medium", "unfused") if problem.nodes == 1 else ("fused", "unfused")
    direction = "push" if apart else None
    ways = tuple(Knobs(path=path, direction=direction) for path in paths)
    whole = Knobs(path="fused", direction=direction, comm_tile_rows=ALL_ROWS)
    if apart:
        ways += ONE_SHOTS
    if apart and (dispatches or problem.op.gathers):
        ways += (whole,)
    return Modelled(problem, cluster, ways, apart=apart)


def ways_of_rows(problem: Problem) -> list[Knobs]:
    """Return ways of a call between hosts, on CPUs, whose sizes depend on M.

    An AllReduce of path one_shot may be cut into blocks of any number of columns. Partials of
    experts may leave by hosts: each slab packs the weights of all experts again, and ranks of a
    host may share cores.
    With 8 experts, M = 1024 and 2 hosts of 2 ranks, GroupedGemmRS took 0.53 of the unfused path
    with two slabs, and 0.64 with four.
    """
    ways: list[Knobs] = []
    if problem.op.all_reduces:
        n = problem.local[0]
        step = ceil_div(n, 64 * MOST_BLOCKS) * 64  # whole cache lines
        widths = range(step, n // 2 + 1, step)
        ways += [Knobs(path="one_shot", tile=(ALL_ROWS, width)) for width in widths]
    if problem.op.reduces and problem.experts > 1 and problem.lanes > 1:
        slab = min(problem.m, problem.chunk * problem.lanes), problem.local[0]
        ways.append(Knobs(path="fused", direction="push", tile=slab))
    return ways


def usable(entry: Entry, topology: Topology, kind: str, apart: bool = False) -> Entry | None:
    """Return the winners that this group can run; warn about each of the others.

    Args:
        entry: the winners.
        topology: of the group.
        kind: of device: ``cpu`` | ``cuda``.
        apart: some ranks share no memory, so rows are pushed.
    """
    kept = []
    for winner in entry.winners:
        reason = _reason_unusable(winner, topology, kind, apart)
        if reason is None and apart and winner.knobs.path != "unfused":
            kept.append(replace(winner, knobs=replace(winner.knobs, direction="push")))
        elif reason is None:
            kept.append(winner)
        else:
            warnings.warn(
                f"tuned knobs of {entry.key.name} for M = {winner.m} are ignored: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )
    return replace(entry, winners=tuple(kept)) if kept else None


def _reason_unusable(winner: Winner, topology: Topology, kind: str, apart: bool) -> str | None:
    try:
        check_legal(winner.knobs, topology)
    except ValueError as error:
        return str(error)
    if winner.knobs.direction == "pull" and apart and winner.knobs.path != "unfused":
        return "direction = pull needs memory that peers can read, but there are several hosts"
    if kind == "cpu" and winner.knobs.reduce == "in_flight":
        return "reduce = in_flight needs backend cuda"
    if kind == "cuda" and winner.kernel is None and winner.knobs.path != "unfused":
        return "no kernel is named"
    return None


def _sums(winner: Winner) -> str:
    return winner.knobs.reduce or "local"


def _one_kernel(entry: Entry, max_m: int) -> tuple[Entry, GemmConfig | None]:
    """Restrict an entry to one kernel and one way to move tiles, as an op on GPUs needs.

    A call may overtake the previous call of a peer, and the order of their writes depends on the
    direction. The winner nearest ``max_m`` determines kernel and direction; winners that differ are
    left out.
    """
    base, _ = entry.nearest(max_m)
    assert base is not None

    def way(winner: Winner) -> tuple[object, ...]:
        k = winner.knobs
        return (k.direction, k.order, k.reduce, winner.kernel)

    def fits(winner: Winner) -> bool:
        alike = winner.kernel == base.kernel and _sums(winner) == _sums(base)
        pushed = winner.knobs.path == "in_kernel" and alike
        return pushed or winner.knobs.path == "unfused" or way(winner) == way(base)

    same = tuple(w for w in entry.winners if fits(w))
    return replace(entry, winners=same), base.kernel

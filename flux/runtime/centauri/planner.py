"""The plan of a run: the FSDP step of a module's own units, simulated for each way to run it.

    found = plan_run(model, mesh, tokens=2 * 256, cluster="cpu")
    parallelize(model, mesh, found.plan)
    with sharded(model).recorded() as order:
        step()
    found.check(order)

The graph has what ``flux.runtime.centauri`` does: the same units and chunks, gathers that begin
with the unit which calls for them, and reductions that begin after the gradients of a chunk. When
it runs, gathers and reductions have lanes of their own, but share the links. So here there is one
stream for the links inside a host and one for those between hosts.

Weights say what is computed: each of two dimensions or more multiplies all tokens once, and others
are read and written with them. Products without weights, as those of attention, are not counted, so
a step is underrated where sequences are long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh

from flux.core.problem import DTYPES, ceil_div, checked_integer, round_up
from flux.machine.cluster import Cluster, load_cluster
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.graph import Builder, Operator
from flux.plan.mesh import SubGroup
from flux.plan.model import Parallel
from flux.plan.schedule import StepSchedule
from flux.plan.simulate import Timeline, simulate
from flux.runtime.centauri.plan import RuntimePlan, chunked, ranks_of, units_of

CHUNK_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 1 << 40)
"""Candidates; the last one: all parameters of a unit together."""
PREFETCH = 4
"""Most units ahead that are tried."""
_ADAM = 7
"""Tensors in float32 that Adam reads and writes."""

Order = list[tuple[str, str]]
"""Collectives as they begin: (AllGather or ReduceScatter, label of the chunk)."""


@dataclass(frozen=True)
class PlannedRun:
    """A plan for ``parallelize``, and what the simulator says of it.

    Attributes:
        plan: the fastest one.
        tried: all plans with their simulated steps in ms, the fastest first.
    """

    plan: RuntimePlan
    timeline: Timeline
    order: tuple[tuple[str, str], ...]
    tried: tuple[tuple[RuntimePlan, float], ...]

    @property
    def step_ms(self) -> float:
        """Predicted time of a step, in ms."""
        return self.timeline.iteration_ms

    def check(self, recorded: Sequence[tuple[str, str]]) -> None:
        """Check that a step has begun its collectives as planned.

        Forward must run units in the order of the modules.

        Raises:
            ValueError: another order; the message names the first collective that differs.
        """
        for number, planned in enumerate(self.order):
            record = recorded[number] if number < len(recorded) else ("nothing", "")
            if record != planned:
                raise ValueError(
                    f"collective {number} is {' of '.join(record)}, and {' of '.join(planned)} was "
                    "planned"
                )
        if len(recorded) > len(self.order):
            extra = " of ".join(recorded[len(self.order)])
            raise ValueError(f"{extra} was not planned, as the {len(self.order)} before it were")


def plan_run(
    model: nn.Module,
    mesh: DeviceMesh | tuple[int, ...],
    *,
    tokens: int,
    cluster: Cluster | str,
    fixed: RuntimePlan | None = None,
) -> PlannedRun:
    """Return the fastest plan for a model: how far ahead, in which chunks, by groups or flat.

    Args:
        model: as ``parallelize`` takes it; it is not changed.
        mesh: as ``parallelize`` takes it; or its sizes alone.
        tokens: of a step on each rank.
        cluster: devices and links; or the name or file of one. Its hosts are as many as the mesh
            has, with as many devices.
        fixed: the other fields of the plan; prefetch, chunk_bytes and by_group are replaced.
    """
    fixed = RuntimePlan() if fixed is None else fixed
    checked_integer("tokens", tokens, 1)
    replicas, hosts, ranks = _sizes(mesh, fixed)
    described = load_cluster(cluster) if isinstance(cluster, str) else cluster
    described = replace(described, hosts=replicas * hosts, devices=ranks)
    attempts = []
    groups = (True, False) if hosts > 1 and ranks > 1 else (fixed.by_group,)
    ahead = range(min(PREFETCH, len(units_of(model, fixed))) + 1)
    for by_group, chunk_bytes, prefetch in product(groups, CHUNK_BYTES, ahead):
        plan = replace(fixed, by_group=by_group, chunk_bytes=chunk_bytes, prefetch=prefetch)
        step = _Step(model, plan, (replicas, hosts, ranks), tokens, described)
        attempts.append((plan, simulate(step.schedule(), step.cost), step))
    # Of equally fast ones: fewest weights at a time, then fewest collectives.
    attempts.sort(key=lambda a: (round(a[1].iteration_ms, 6), a[0].prefetch, len(a[2].order)))
    plan, timeline, step = attempts[0]
    listed = tuple((candidate, line.iteration_ms) for candidate, line, _ in attempts)
    return PlannedRun(plan, timeline, tuple(step.order), listed)


def _sizes(mesh: DeviceMesh | tuple[int, ...], plan: RuntimePlan) -> tuple[int, int, int]:
    """Return replicas, hosts, and ranks of a host."""
    if isinstance(mesh, DeviceMesh):
        replicas, hosts, ranks = ranks_of(mesh, replace(plan, by_group=True)).shape
        return replicas, hosts, ranks
    sizes = list(mesh) if plan.replicate else [1, *mesh]
    if not all(type(size) is int and size >= 1 for size in sizes) or len(sizes) not in (2, 3):
        raise ValueError(f"mesh must be one or two sizes, hosts and ranks of a host, got {mesh!r}")
    return sizes[0], sizes[1] if len(sizes) == 3 else 1, sizes[-1]


@dataclass(frozen=True)
class _PlannedWeight:
    """A parameter, as chunks are made of it; see ``Managed``."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    trained: bool
    nbytes: int
    looked_up: bool

    def work(self, tokens: int) -> tuple[str, tuple[int, ...]]:
        """Return kind and shape of the operator that it takes part in."""
        if len(self.shape) < 2 or self.looked_up:
            return "elementwise", (tokens, self.shape[-1], 2)
        return "gemm", (tokens, self.shape[0], prod(self.shape[1:]))


class _Step:
    """Builds the step of one plan: operators, the lanes that they run on, and the order."""

    def __init__(
        self,
        model: nn.Module,
        plan: RuntimePlan,
        sizes: tuple[int, int, int],
        tokens: int,
        cluster: Cluster,
    ) -> None:
        self.plan, self.sizes, self.tokens = plan, sizes, tokens
        replicas, hosts, ranks = sizes
        self.world = hosts * ranks
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        self.units = []
        for name, module, parameters in units_of(model, plan):
            weights = [self._weight(n, p, id(p) in tables) for n, p in parameters]
            chunks = chunked(weights, plan.chunk_bytes, name)
            self.units.append((chunks, weights, module is model))
        first = self.units[0][1][0].dtype
        named = DTYPES.get(str(first).removeprefix("torch."))
        self.dtype = "float32" if named is None else named.name
        self.itemsize = first.itemsize
        fabric = Fabric(cluster, Parallel(dp=replicas * self.world))
        # On a CPU the runtime moves bytes itself, and does not wait for gloo to start.
        start_us = 0.0 if fabric.cluster.device.kind == "cpu" else None
        self.cost = AnalyticCost(fabric, self.dtype, self.itemsize, start_us)
        self.shares = cluster.device.kind == "cpu" and plan.shared_memory is not False and ranks > 1
        self.builder = Builder(self.itemsize)
        self.lanes: dict[str, list[int]] = {}
        self.order: Order = []
        self.last: int | None = None  # what was computed last
        self.there: dict[str, int] = {}  # by label: what brings a chunk's weights
        self.held: set[int] = set()  # units
        self.ends: list[int] = []  # reductions

    def _weight(self, name: str, p: nn.Parameter, looked_up: bool) -> _PlannedWeight:
        param_dtype = self.plan.param_dtype
        dtype = param_dtype if param_dtype is not None and p.is_floating_point() else p.dtype
        rows = round_up(p.shape[0], self.world)
        nbytes = rows * prod(p.shape[1:]) * dtype.itemsize
        return _PlannedWeight(name, p.shape, dtype, p.requires_grad, nbytes, looked_up)

    def schedule(self) -> StepSchedule:
        """Return the step: as ``Sharded`` runs forward, backward and the optimizer."""
        last = len(self.units) - 1
        trains = [any(w.trained for w in weights) for _, weights, _ in self.units]
        for number, (_, _, is_model) in enumerate(self.units):
            for ahead in range(number, min(last, number + self.plan.prefetch) + 1):
                self._gather(ahead, "forward")
            self._compute(number, "fwd")
            keeps = not self.plan.reshard_after_forward or self.shares
            if not (keeps or is_model or number == last):
                self.held.discard(number)
        for number in reversed(range(last + 1)):
            if not any(trains[: number + 1]):
                break  # no gradient comes so far
            self._gather(number, "backward")
            for ahead in range(number - 1, max(0, number - self.plan.prefetch) - 1, -1):
                if any(trains[: ahead + 1]):
                    self._gather(ahead, "backward")
            self._compute(number, "bwd")
            self.held.discard(number)
        elements = sum(w.nbytes for _, weights, _ in self.units for w in weights) / self.itemsize
        shape = (1, ceil_div(int(elements), self.world), _ADAM)
        self._add("comp", "optimizer", "optimizer", shape, "step", self.ends)
        numbers = {(0, lane): tuple(of) for lane, of in self.lanes.items()}
        return StepSchedule(self.builder.build(), numbers, "centauri")

    def _add(
        self,
        lane: str,
        name: str,
        kind: str,
        shape: tuple[int, ...],
        role: str,
        behind: Sequence[int],
        group: SubGroup | None = None,
    ) -> int:
        label = "" if group is None else group.name
        resource = "comp" if group is None else self.cost.fabric.resource(label)
        op = Operator(name, kind, resource, role, 0, name, shape=shape, group=label)
        number = self.builder.add(op, behind)
        self.lanes.setdefault(lane, []).append(number)
        if group is None:
            self.last = number
        return number

    def _behind(self) -> list[int]:
        return [] if self.last is None else [self.last]

    def _groups(self) -> tuple[SubGroup, SubGroup, SubGroup]:
        """Return the ranks of the replicas, between hosts, and inside a host."""
        mesh = self.sizes
        return SubGroup("dp", mesh, 0), SubGroup("dp", mesh, 1), SubGroup("dp", mesh, 2)

    def _gather(self, unit: int, when: str) -> None:
        """Begin to gather a unit with what is computed next."""
        if unit in self.held:
            return
        self.held.add(unit)
        behind = self._behind()
        for label, weights in self.units[unit][0]:
            self.order.append(("AllGather", label))
            end = behind
            for lane, group, elements in self._moves(weights, gathers=True):
                shape = (1, elements)
                name = f"{label}.{when}.{lane}"
                end = [self._add(lane, name, "all_gather", shape, "fwd", end, group)]
            if end is not behind:
                self.there[label] = end[0]

    def _moves(
        self, weights: Sequence[_PlannedWeight], gathers: bool
    ) -> list[tuple[str, SubGroup, int]]:
        """Return (lane, group, elements of the whole tensor) of the parts of an AllGather."""
        _, hosts, ranks = self.sizes
        _, inter, intra = self._groups()
        elements = sum(w.nbytes for w in weights) // self.itemsize
        if not self.plan.by_group and hosts > 1:
            # Each rank sends its shard to each other one, so to each of the ranks of a host.
            flat = SubGroup("dp", (self.sizes[0], hosts * ranks), 1)
            return [("inside", flat, elements * ranks)]
        moves = []
        if hosts > 1:
            moves.append(("between", inter, elements // ranks))
        if ranks > 1:  # whole weights that a host shares are not moved inside, ranks only meet
            moves.append(("inside", intra, 0 if gathers and self.shares else elements))
        return moves

    def _compute(self, unit: int, direction: str) -> None:
        chunks, weights, _ = self.units[unit]
        label_of = {w.name: label for label, of in chunks for w in of}
        if direction == "fwd":
            for w in weights:
                self._work(w, "fwd", label_of[w.name])
            return
        open_ones = {label: {w.name for w in of if w.trained} for label, of in chunks}
        of_label = dict(chunks)
        for w in reversed(weights):
            label = label_of[w.name]
            self._work(w, "dgrad", label)
            if not w.trained:
                continue
            self._work(w, "wgrad", label)
            open_ones[label].discard(w.name)
            if not open_ones[label]:
                self._reduce(label, of_label[label])

    def _work(self, w: _PlannedWeight, role: str, label: str) -> None:
        kind, shape = w.work(self.tokens)
        if kind == "gemm" and role != "fwd":  # m, n, k of the gradient
            m, n, k = shape
            shape = (m, k, n) if role == "dgrad" else (n, k, m)
        behind = self._behind() + [self.there[label]] * (label in self.there)
        self._add("comp", f"{w.name}.{role}", kind, shape, role, behind)

    def _reduce(self, label: str, weights: Sequence[_PlannedWeight]) -> None:
        self.order.append(("ReduceScatter", label))
        behind = self._behind()
        end = behind
        for lane, group, elements in reversed(self._moves(weights, gathers=False)):
            name = f"{label}.reduce.{lane}"
            shape = (1, elements)
            end = [self._add(lane, name, "reduce_scatter", shape, "wgrad", end, group)]
        if self.sizes[0] > 1:
            share = sum(w.nbytes for w in weights) // self.itemsize // self.world
            copies = self._groups()[0]
            name = f"{label}.reduce.replicas"
            end = [
                self._add("reduce between", name, "all_reduce", (1, share), "wgrad", end, copies)
            ]
        self.ends += end if end is not behind else []

"""Measure what operators take by themselves, and two at a time, on these ranks.

The result is JSON that can be shared: a plan of the same shapes on the same hosts and links uses it
in place of the analytic costs.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flux.core.datafile import Table, shown, write_output
from flux.plan.cost import CostModel
from flux.plan.graph import (
    COLLECTIVES,
    COMPUTE,
    FUSED,
    GROUPS,
    RESOURCES,
    RING,
    ROLES,
    Graph,
    Operator,
)
from flux.plan.mesh import parse_group
from flux.plan.model import Parallel
from flux.runtime.execute import OperatorWork, own_group

_FORMAT = 1
_MOST_MS = 1e9
_SIZES = {
    "gemm": 3,
    "attention": 5,
    RING: 6,
    **dict.fromkeys(FUSED, 3),
    **dict.fromkeys(COLLECTIVES, 2),
}
"""Numbers in the shape of an operator; others have 3 (``graph.Operator``)."""
T = TypeVar("T")
Key = tuple[str, tuple[int, ...], str, str]
"""(kind, shape, group, role): what the time of an operator depends on."""


def key_of(op: Operator) -> Key:
    """Return what the time of an operator depends on."""
    role = op.role if op.kind in ("attention", RING, "norm") else ""
    return op.kind, op.shape, op.group, role


@dataclass(frozen=True)
class Profile:
    """Measured times.

    Attributes:
        oef: overlap effectiveness factor by (kind of the compute operator, resource).
        pairs: overlap effectiveness factor of two operators, which DHelix pairs.
    """

    solo: Mapping[Key, float]
    oef: Mapping[tuple[str, str], float]
    place: Mapping[str, Any]
    pairs: Mapping[tuple[Key, Key], float] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        content = {
            "format": _FORMAT,
            "place": dict(self.place),
            "solo": [{**_described(key), "ms": ms} for key, ms in self.solo.items()],
            "oef": [
                {"compute": kind, "resource": resource, "oef": oef}
                for (kind, resource), oef in self.oef.items()
            ],
            "pairs": [
                {"first": _described(a), "second": _described(b), "oef": oef}
                for (a, b), oef in self.pairs.items()
            ],
        }
        write_output(path, json.dumps(content, indent=1) + "\n")


def read_profile(path: Path) -> Profile:
    """Return the profile in a file that ``Profile.write`` has written."""
    top = Table.load_json(path, "a profile of flux", _FORMAT)
    solo: dict[Key, float] = {}
    for row in top.tables("solo"):
        _put(row, solo, _key(row), row.number("ms", most=_MOST_MS))
    oef: dict[tuple[str, str], float] = {}
    for row in top.tables("oef"):
        kinds = row.text("compute", choices=COMPUTE), row.text("resource", choices=RESOURCES[1:])
        _put(row, oef, kinds, _oef(row))
    pairs: dict[tuple[Key, Key], float] = {}
    for row in top.tables("pairs"):
        tables = row.table("first"), row.table("second")
        first, second = map(_key, tables)
        for of, key in zip(tables, (first, second), strict=True):
            of.done()
            if key not in solo:
                of.fail("kind", f"{key[0]} {list(key[1])} has no time by itself in solo")
        _put(row, pairs, (first, second), _oef(row))
    place = top.scalars("place")
    top.done()
    return Profile(solo, oef, place, pairs)


def _put(table: Table, into: dict[T, float], key: T, value: float) -> None:
    """Add an entry of a profile; fail if it is there already, or if a key of it was not read."""
    table.done()
    if key in into:
        table.fail("", f"a second entry for {shown(key)}")
    into[key] = value


def _described(key: Key) -> dict[str, Any]:
    kind, shape, group, role = key
    return {"kind": kind, "shape": list(shape), "group": group, "role": role}


def _key(table: Table) -> Key:
    kind = table.text("kind", choices=(*COMPUTE, *COLLECTIVES))
    shape, count = table.integers("shape"), _SIZES.get(kind, 3)
    if len(shape) != count:
        table.fail("shape", f"expected {count} sizes of {kind}, got {list(shape)}")
    roles = ROLES if kind in ("attention", RING, "norm") else ("",)
    return kind, shape, _group(table, kind), table.text("role", choices=roles)


def _group(table: Table, kind: str) -> str:
    """Return the group of a collective or fused op, or a part of one; others have none: ``""``."""
    group = table.text("group")
    if kind in (*COLLECTIVES, *FUSED, RING):
        try:
            base = parse_group(group).base
        except ValueError as error:
            table.fail("group", str(error))
        if base not in GROUPS:
            table.fail("group", f"expected one of {', '.join(GROUPS)}, got {group!r}")
    elif group:
        table.fail("group", f"{kind} has none, got {group!r}")
    return group


def _oef(table: Table) -> float:
    return table.number("oef", least=-_MOST_MS, most=1.0)


class ProfiledCost:
    """Times that were measured.

    Args:
        profile: of the operators.
        estimate: says the others' times, which are scaled as the measured ones of the same kind and
            group say. Policies look for the best of many operators, of which few are measured.

    Raises:
        ValueError: an operator was not measured, and there is no estimate; the message names it.
    """

    def __init__(self, profile: Profile, estimate: CostModel | None = None) -> None:
        self.profile, self.estimate = profile, estimate
        self._estimated: dict[Key, float] = {}
        self._ratios = {} if estimate is None else _ratios(profile, estimate)

    def solo(self, op: Operator) -> float:
        """Return the time of an operator by itself, in ms."""
        key = key_of(op)
        time = self.profile.solo.get(key, self._estimated.get(key))
        if time is None and self.estimate is not None:
            ratios = [self._ratios.get(of) for of in ((op.kind, op.group), (op.kind,), ())]
            ratio = next((known for known in ratios if known is not None), 1.0)
            time = self._estimated[key] = ratio * self.estimate.solo(op)
        if time is None:
            raise ValueError(
                f"{op.name}: {op.kind} {op.shape} is not in the profile; measure it with "
                "flux plan profile and the same model, parallelism and policies"
            )
        return time

    def oef(self, comp: Operator, comm: Operator) -> float:
        """Return the overlap effectiveness factor of two operators.

        That of the pair, if it was measured; else that of their kinds. Collectives inside hosts
        and between them use different links: 1, if they were not measured.
        """
        a, b = key_of(comp), key_of(comm)
        pairs = self.profile.pairs
        measured = pairs.get((a, b), pairs.get((b, a)))
        if measured is not None:
            return measured
        if comp.is_collective:
            return 1.0
        factor = self.profile.oef.get((comp.kind, comm.resource))
        if factor is None and self.estimate is not None:
            return self.estimate.oef(comp, comm)
        if factor is None:
            raise ValueError(f"{comp.kind} beside {comm.resource} is not in the profile")
        return factor


def _ratios(profile: Profile, estimate: CostModel) -> dict[tuple[str, ...], float]:
    """Return measured over estimated times: medians by (kind, group), by (kind,) and of all."""
    samples: dict[tuple[str, ...], list[float]] = {}
    for (kind, shape, group, role), ms in profile.solo.items():
        time = estimate.solo(Operator("", kind, "", role, 0, "", shape=shape, group=group))
        if time > 0:
            for of in ((kind, group), (kind,), ()):
                samples.setdefault(of, []).append(ms / time)
    return {of: statistics.median(ratios) for of, ratios in samples.items()}


class Profiler:
    """Measures operators on all ranks. Construction is collective: it makes process groups.

    Args:
        repeats: of each measurement, of which the median counts.
        place: what the profile says about where it was measured.
    """

    def __init__(
        self, parallel: Parallel, work: OperatorWork, repeats: int, place: Mapping[str, Any]
    ) -> None:
        self.work, self.repeats, self.place = work, repeats, place
        self.parallel = parallel
        self.groups = self._groups(GROUPS)
        self.others: dict[str, dist.ProcessGroup | None] = {}  # for a second collective at a time

    def measure(
        self,
        graphs: Sequence[Graph],
        progress: Callable[[int, int], None],
        beside: Sequence[tuple[Operator, Operator]] = (),
        known: Profile | None = None,
    ) -> Profile:
        """Return the times of all operators of these graphs. Collective.

        Each round measures every operator once, so that a disturbance of the machine does not meet
        all repeats of one operator.

        ``beside`` are operators of these graphs that are measured two at a time; ``progress`` gets
        how many operators are done, and their number. The result includes ``known``.
        """
        known = known or Profile({}, {}, self.place)
        all_ops = {key_of(op): op for graph in graphs for op in graph.ops}
        ops = [op for key, op in all_ops.items() if key not in known.solo]
        parts = sorted({op.group for op in all_ops.values() if op.group} - set(self.groups))
        self.groups |= self._groups(parts)
        pairs = [
            (comp, comm)
            for comp, comm in _pairs(list(all_ops.values()))
            if (comp.kind, comm.resource) not in known.oef
        ]
        total = len(ops) + len(pairs) + len(beside)
        calls = [self._call(op) for op in ops]
        times: list[list[float]] = [[] for _ in ops]
        for round_ in range(self.repeats + 1):
            for row, call in zip(times, calls, strict=True):
                taken = self._together([call])
                if round_:  # the first one warms up
                    row.append(taken)
            progress((round_ + 1) * len(ops) // (self.repeats + 1), total)
        solo = {**known.solo, **dict(zip(map(key_of, ops), _slowest(times), strict=True))}
        oef = dict(known.oef)
        for done, (comp, comm) in enumerate(pairs):
            oef[comp.kind, comm.resource] = self._factor(comp, comm, solo)
            progress(len(ops) + done + 1, total)
        factors = dict(known.pairs)
        if any(a.is_collective and b.is_collective for a, b in beside):
            self.others = self.others or self._groups(sorted(self.groups))
        for done, (a, b) in enumerate(beside):
            factors[key_of(a), key_of(b)] = self._factor(a, b, solo)
            progress(total - len(beside) + done + 1, total)
        return Profile(solo, oef, self.place, factors)

    def _call(
        self, op: Operator, groups: Mapping[str, dist.ProcessGroup | None] | None = None
    ) -> Callable[[], object]:
        if op.kind == "send":
            return self._exchange(op)
        return self.work.call(op, (groups or self.groups)[op.group] if op.group else None)

    def _groups(self, kinds: Sequence[str]) -> dict[str, dist.ProcessGroup | None]:
        """Return this rank's process group of each kind, or part of one. Collective."""
        return {kind: own_group(self.parallel, kind) for kind in kinds}

    def _exchange(self, op: Operator) -> Callable[[], object]:
        """Return a call that sends to the next stage and receives from the one before."""
        group = self.groups["pp"]
        assert group is not None
        size, place = dist.get_world_size(group), dist.get_rank(group)
        ranks = dist.get_process_group_ranks(group)
        count = op.shape[0] * op.shape[1]
        out, into = self.work.tensor("sent", count), self.work.tensor("received", count)

        def run() -> None:
            works = [
                dist.isend(out, ranks[(place + 1) % size], group=group),
                dist.irecv(into, ranks[(place - 1) % size], group=group),
            ]
            for each in works:
                assert each is not None
                each.wait()

        return run

    def _together(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the time in ms in which all calls end that start together."""
        dist.barrier()
        threads = [threading.Thread(target=_quietly, args=(call,)) for call in calls[1:]]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        _quietly(calls[0])
        for thread in threads:
            thread.join()
        return 1e3 * (time.perf_counter() - began)

    def _factor(self, a: Operator, b: Operator, solo: Mapping[Key, float]) -> float:
        """Return the OEF of an operator, repeated for as long as another takes, alongside it."""
        times = max(1, round(solo[key_of(b)] / max(solo[key_of(a)], 1e-3)))
        communicate = self._call(b, self.others if a.is_collective else self.groups)
        first = self._call(a)

        def many() -> None:
            for _ in range(times):
                first()

        ways: list[list[Callable[[], object]]] = [[many], [communicate], [many, communicate]]
        factors: list[list[float]] = [[] for _ in ways]
        for round_ in range(self.repeats + 1):
            for times_of, way in zip(factors, ways, strict=True):
                taken = self._together(way)
                if round_:
                    times_of.append(taken)
        alone, beside, both = _slowest(factors)
        factor = (alone + beside - both) / max(min(alone, beside), 1e-6)
        return min(factor, 1.0)


def _slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """Return the slowest rank's median of each row. Collective."""
    medians = torch.tensor([statistics.median(row) for row in times], dtype=torch.float64)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return [float(value) for value in medians]


def _quietly(call: Callable[[], object]) -> None:
    with torch.no_grad():
        call()


def layer_pairs(graph: Graph) -> list[tuple[Operator, Operator]]:
    """Return each forward operator of a layer with each backward one on another resource.

    A compute operator comes first. Equal ones are returned once. It is the matrix that DHelix
    measures once for new hardware (arXiv 2411.15871, section 4.2).
    """
    pairs: dict[tuple[Key, Key], tuple[Operator, Operator]] = {}
    ops = [op for op in graph.ops if op.layer == 0 and op.micro == 0 and op.kind != "send"]
    for forward in ops:
        for backward in ops:
            is_pair = forward.role == "fwd" and backward.role != "fwd"
            if is_pair and forward.resource != backward.resource:
                a, b = sorted((forward, backward), key=lambda op: op.is_collective)
                if (key_of(b), key_of(a)) not in pairs:
                    pairs.setdefault((key_of(a), key_of(b)), (a, b))
    return list(pairs.values())


def _pairs(ops: Sequence[Operator]) -> list[tuple[Operator, Operator]]:
    """Return each kind's largest compute operator alongside each resource's largest collective.

    A send stands for a resource that has nothing else.
    """

    def size(op: Operator) -> tuple[bool, int]:
        return op.kind != "send", int(torch.Size(op.shape).numel())

    largest: dict[tuple[str, str], Operator] = {}
    for op in sorted(ops, key=size):
        largest[("comm", op.resource) if op.is_collective else ("comp", op.kind)] = op
    comps = [op for (kind, _), op in largest.items() if kind == "comp"]
    comms = [op for (kind, _), op in largest.items() if kind == "comm"]
    return [(comp, comm) for comp in comps for comm in comms]

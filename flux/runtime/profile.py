"""Measure what operators take by themselves, and beside communication, on these ranks."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from flux.plan.cost import CostModel
from flux.plan.graph import GROUPS, RING, Graph, Operator
from flux.plan.model import Parallel
from flux.runtime.execute import OperatorWork, own_group, pass_on

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
        solo: of operators by themselves, in ms.
        oef: overlap effectiveness factor by (kind of the compute operator, resource).
    """

    solo: Mapping[Key, float] = field(default_factory=dict)
    oef: Mapping[tuple[str, str], float] = field(default_factory=dict)


class ProfiledCost:
    """Times that were measured.

    Args:
        profile: of the operators.
        estimate: says the others' times, which are scaled as the measured ones of the same kind and
            group say. Policies look for the best of many operators, of which few are measured.
    """

    by_kind = True

    def __init__(self, profile: Profile, estimate: CostModel) -> None:
        self.profile, self.estimate = profile, estimate
        self._estimated: dict[Key, float] = {}
        self._ratios = _ratios(profile, estimate)

    def solo(self, op: Operator) -> float:
        """Return the time of an operator by itself, in ms."""
        key = key_of(op)
        time = self.profile.solo.get(key, self._estimated.get(key))
        if time is None:
            ratios = [self._ratios.get(of) for of in ((op.kind, op.group), (op.kind,), ())]
            ratio = next((known for known in ratios if known is not None), 1.0)
            time = self._estimated[key] = ratio * self.estimate.solo(op)
        return time

    def oef(self, comp: Operator, comm: Operator) -> float:
        """Return the overlap effectiveness factor of two operators: that of their kinds."""
        factor = self.profile.oef.get((comp.kind, comm.resource))
        return self.estimate.oef(comp, comm) if factor is None else factor


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
    """

    def __init__(self, parallel: Parallel, work: OperatorWork, repeats: int) -> None:
        self.work, self.repeats, self.parallel = work, repeats, parallel
        self.groups = {kind: own_group(parallel, kind) for kind in GROUPS}

    def measure(
        self,
        graphs: Sequence[Graph],
        progress: Callable[[int, int], None],
        known: Profile | None = None,
    ) -> Profile:
        """Return the times of all operators of these graphs. Collective.

        Each round measures every operator once, so that a disturbance of the machine does not meet
        all repeats of one operator. ``progress`` gets how many operators are done, and their
        number. The result includes ``known``.
        """
        known = known or Profile()
        all_ops = {key_of(op): op for graph in graphs for op in graph.ops}
        ops = [op for key, op in all_ops.items() if key not in known.solo]
        parts = sorted({op.group for op in all_ops.values() if op.group} - set(self.groups))
        self.groups |= {part: own_group(self.parallel, part) for part in parts}
        pairs = [
            (comp, comm)
            for comp, comm in _pairs(list(all_ops.values()))
            if (comp.kind, comm.resource) not in known.oef
        ]
        total = len(ops) + len(pairs)
        times = self._repeated([[self._call(op)] for op in ops], lambda n: progress(n, total))
        solo = {**known.solo, **dict(zip(map(key_of, ops), times, strict=True))}
        oef = dict(known.oef)
        for done, (comp, comm) in enumerate(pairs):
            oef[comp.kind, comm.resource] = self._factor(comp, comm, solo)
            progress(len(ops) + done + 1, total)
        return Profile(solo, oef)

    def _call(self, op: Operator) -> Callable[[], object]:
        if op.kind == "send":
            return self._exchange(op)
        return self.work.call(op, self.groups[op.group] if op.group else None)

    def _exchange(self, op: Operator) -> Callable[[], object]:
        """Return a call that sends to the next stage and receives from the one before."""
        group = self.groups["pp"]
        count = op.shape[0] * op.shape[1]
        out, into = self.work.tensor("sent", count), self.work.tensor("received", count)

        def run() -> None:
            for work in pass_on(out, into, group):
                work.wait()

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

    def _repeated(
        self,
        ways: Sequence[Sequence[Callable[[], object]]],
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[float]:
        """Return the slowest rank's median time of each row of calls. Collective."""
        times: list[list[float]] = [[] for _ in ways]
        for round_ in range(self.repeats + 1):
            for row, calls in zip(times, ways, strict=True):
                taken = self._together(calls)
                if round_:  # the first one warms up
                    row.append(taken)
            progress((round_ + 1) * len(ways) // (self.repeats + 1))
        medians = torch.tensor([statistics.median(row) for row in times], dtype=torch.float64)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        return [float(value) for value in medians]

    def _factor(self, comp: Operator, comm: Operator, solo: Mapping[Key, float]) -> float:
        """Return the OEF of an operator, repeated for as long as a collective takes, beside it."""
        times = max(1, round(solo[key_of(comm)] / max(solo[key_of(comp)], 1e-3)))
        communicate, compute = self._call(comm), self._call(comp)

        def many() -> None:
            for _ in range(times):
                compute()

        alone, beside, both = self._repeated([[many], [communicate], [many, communicate]])
        factor = (alone + beside - both) / max(min(alone, beside), 1e-6)
        return min(factor, 1.0)


def _quietly(call: Callable[[], object]) -> None:
    with torch.no_grad():
        call()


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

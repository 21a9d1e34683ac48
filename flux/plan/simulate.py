"""Run a schedule in virtual time.

Each stream runs its operators in order, each as soon as what it depends on has ended. Operators of
one stage that run at the same time slow each other down: a compute operator alongside collectives
b1, b2, ... progresses at 1 / (1 + sum(1 - OEF(a, b))), a collective alongside it at 1 / (2 - OEF).
Whenever an operator starts or ends, the ends of those that run on its stage are computed anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from flux.core.collector import paused_collector
from flux.core.spans import Span, covered
from flux.plan.cost import CostModel
from flux.plan.graph import FUSED, RING, Graph, GraphError
from flux.plan.schedule import StepSchedule

if TYPE_CHECKING:
    from flux.core.events import Event


@dataclass(frozen=True)
class Timeline:
    """When each operator of a schedule ran, in ms from the beginning of the step.

    Attributes:
        solo: time of each operator by itself.
    """

    schedule: StepSchedule
    start: Sequence[float]
    end: Sequence[float]
    solo: Sequence[float]

    @property
    def iteration_ms(self) -> float:
        """Time of the step."""
        return max(self.end, default=0.0)

    @property
    def compute_ms(self) -> float:
        """Time of the compute operators by themselves, on the stage that has most."""
        return self._most(collectives=False)

    @property
    def comm_ms(self) -> float:
        """Time of the collectives by themselves, on the stage that has most."""
        return self._most(collectives=True)

    def _most(self, *, collectives: bool) -> float:
        graph = self.schedule.graph
        sums = [0.0] * max(graph.stages, 1)
        for op, time in zip(graph.ops, self.solo, strict=True):
            if op.is_collective == collectives:
                sums[op.stage] += time
        return max(sums)

    @cached_property
    def _busy_by_stage(self) -> list[tuple[float, float]]:
        """Time in which a stage computes, and in which it computes or communicates, by stage."""
        graph = self.schedule.graph
        spans: list[tuple[list[Span], list[Span]]] = [([], []) for _ in range(graph.stages)]
        for op, start, end in zip(graph.ops, self.start, self.end, strict=True):
            comp, both = spans[op.stage]
            both.append((start, end))
            if not op.is_collective:
                comp.append((start, end))
        return [(covered(comp), covered(both)) for comp, both in spans]

    @property
    def exposed_by_stage(self) -> list[float]:
        """Time in which a stage communicates and computes nothing, by stage."""
        return [max(0.0, both - comp) for comp, both in self._busy_by_stage]

    @property
    def exposed_comm_ms(self) -> float:
        """Time in which the stage communicates and computes nothing, of the stage with most."""
        return max(self.exposed_by_stage, default=0.0)

    @cached_property
    def idle_ms(self) -> float:
        """Time in which a device neither computes nor communicates, of all stages the mean."""
        busy = [both for _, both in self._busy_by_stage]
        return max(0.0, self.iteration_ms - sum(busy) / max(len(busy), 1))

    @property
    def resident_bytes(self) -> float:
        """Bytes of weights, gradients and optimizer, of the stage with the highest peak."""
        resident = self.schedule.graph.resident_by_stage
        return resident[self.peak.index(max(self.peak))] if resident else 0.0

    @cached_property
    def peak(self) -> list[float]:
        """Most bytes that are allocated at a time, by stage; weights and optimizer included.

        An operator allocates when it starts, and frees when it ends.
        """
        graph = self.schedule.graph
        changes: list[list[tuple[float, float]]] = [[] for _ in range(graph.stages)]
        for op, start, end in zip(graph.ops, self.start, self.end, strict=True):
            if op.allocates:
                changes[op.stage].append((start, op.allocates))
            if op.frees:
                changes[op.stage].append((end, -op.frees))
        peaks = []
        for stage, of_stage in enumerate(changes):
            held = most = graph.resident_by_stage[stage]
            for _, change in sorted(of_stage):  # at one time, what is freed comes first
                held += change
                most = max(most, held)
            peaks.append(most)
        return peaks

    @property
    def peak_memory_bytes(self) -> float:
        """Most bytes allocated at a time, of the stage with most."""
        return max(self.peak, default=0.0)

    def events(self, label: str = "") -> list[Event]:
        """Return the events of a trace: a rank for each stage, a lane for each stream."""
        from flux.core.events import Event, Kind

        kinds = dict.fromkeys(("gemm", "attention", RING, *FUSED), Kind.gemm)
        events = []
        for (stage, stream), numbers in self.schedule.lanes.items():
            for number in numbers:
                op = self.schedule.graph.ops[number]
                kind = Kind.send if op.is_collective else kinds.get(op.kind, Kind.reduce)
                events.append(
                    Event(
                        rank=stage,
                        lane=f"{label}{stream}",
                        kind=kind,
                        name=op.name,
                        start_us=1e3 * self.start[number],
                        duration_us=1e3 * (self.end[number] - self.start[number]),
                        details={"kind": op.kind, "shape": str(op.shape)},
                    )
                )
        return events


def simulate(schedule: StepSchedule, cost: CostModel) -> Timeline:
    """Return when each operator runs; raise GraphError if the schedule cannot be run."""
    with paused_collector():
        schedule.check_lanes()
        return _Ordered(schedule, cost).timeline()


class Simulation:
    """Runs operators in virtual time, on lanes that run one at a time.

    Subclasses say what a free lane starts next: the next one in its order, or the most urgent one.
    """

    def __init__(self, graph: Graph, cost: CostModel, lane_of: Sequence[int], lanes: int) -> None:
        self.graph, self.cost, self.lane_of = graph, cost, lane_of
        self.ops, self.after = graph.ops, graph.after
        count = len(graph.ops)
        self.solo = [cost.solo(op) for op in graph.ops]
        self.start, self.end = [0.0] * count, [0.0] * count
        self.missing = [len(deps) for deps in graph.deps]
        self._busy = [False] * lanes
        self._left = list(self.solo)  # ms that an operator still needs by itself
        self._rate_of, self._since, self._version = [0.0] * count, [0.0] * count, [0] * count
        self._running: list[list[int]] = [[] for _ in range(graph.stages)]
        self._changed: set[int] = set()  # stages on which operators have started or ended
        self._heap: list[tuple[float, int, int]] = []

    def next_on(self, lane: int) -> int | None:
        """Return the operator that a free lane starts now, and count it as begun; None: none."""
        raise NotImplementedError

    def run(self) -> int:
        """Run until nothing can start; return how many operators have ended."""
        heap, versions, lane_of = self._heap, self._version, self.lane_of
        ended, now = 0, 0.0
        free: Iterable[int] = range(len(self._busy))
        while True:
            self._start(free, now)
            for stage in self._changed:
                self._share(self._running[stage], now)
            self._changed.clear()
            if not heap:
                return ended
            now, free = heap[0][0], []
            while heap and heap[0][0] == now:
                _, number, version = heapq.heappop(heap)
                if version == versions[number]:
                    ended += 1
                    free.append(lane_of[number])
                    for later in self.finish(number, now):
                        free.append(lane_of[later])

    def finish(self, number: int, now: float) -> list[int]:
        """End an operator; return those that wait for nothing any more."""
        self.end[number] = now
        stage = self.ops[number].stage
        self._running[stage].remove(number)
        self._changed.add(stage)
        self._busy[self.lane_of[number]] = False
        ready, missing = [], self.missing
        for later in self.after[number]:
            missing[later] -= 1
            if missing[later] == 0:
                ready.append(later)
        return ready

    def _start(self, lanes: Iterable[int], now: float) -> None:
        for lane in lanes:
            if self._busy[lane] or (number := self.next_on(lane)) is None:
                continue
            stage = self.ops[number].stage
            self._busy[lane] = True
            self.start[number] = self._since[number] = now
            self._running[stage].append(number)
            self._changed.add(stage)

    def _share(self, running: Sequence[int], now: float) -> None:
        """Compute the ends of a stage's running operators, which have changed."""
        alone = len(running) == 1
        for number in running:
            rate = 1.0 if alone else self.rate(number, running)
            before = self._rate_of[number]
            if rate == before:
                continue
            self._left[number] -= (now - self._since[number]) * before
            self._since[number], self._rate_of[number] = now, rate
            self._version[number] += 1
            end = now + max(self._left[number], 0.0) / rate
            heapq.heappush(self._heap, (end, number, self._version[number]))

    def rate(self, number: int, running: Sequence[int]) -> float:
        """Return the progress of an operator alongside others, of what it makes by itself."""
        oef, communicates = self.cost.oef, self.graph.communicates
        op, lost, is_comm = self.ops[number], 0.0, communicates[number]
        for other in running:
            if communicates[other] != is_comm:
                beside = self.ops[other]
                lost += 1.0 - (oef(beside, op) if is_comm else oef(op, beside))
        return 1.0 / (1.0 + lost) if lost > 0.0 else 1.0


class _Ordered(Simulation):
    """Lanes run their operators in the order of a schedule."""

    def __init__(self, schedule: StepSchedule, cost: CostModel) -> None:
        self._schedule, self._lanes = schedule, list(schedule.lanes.values())
        lane_of = [0] * len(schedule.graph.ops)
        for lane, numbers in enumerate(self._lanes):
            for number in numbers:
                lane_of[number] = lane
        super().__init__(schedule.graph, cost, lane_of, len(self._lanes))
        self._place = [0] * len(self._lanes)

    def next_on(self, lane: int) -> int | None:
        """Return the next operator of the lane if it waits for nothing."""
        numbers, place = self._lanes[lane], self._place[lane]
        if place == len(numbers) or self.missing[numbers[place]]:
            return None
        self._place[lane] += 1
        return numbers[place]

    def timeline(self) -> Timeline:
        ended = self.run()
        if ended < len(self.ops):
            self._schedule.validate()  # says which operators wait for each other
            raise GraphError(f"{len(self.ops) - ended} operators never start")
        return Timeline(self._schedule, self.start, self.end, self.solo)

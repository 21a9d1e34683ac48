"""Run a schedule in virtual time.

Each stream runs its operators in order, each as soon as what it depends on has ended. Operators of
one stage that run at the same time slow each other down: a compute operator alongside collectives
b1, b2, ... progresses at 1 / (1 + sum(1 - OEF(a, b))), a collective alongside it at 1 / (2 - OEF).
Whenever an operator starts or ends, the ends of those that run on its stage are computed anew
(csrc/plan/simulation.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from flux.core.collector import paused_collector
from flux.core.spans import Span, covered
from flux.plan.cost import CostModel, solo_times
from flux.plan.graph import FUSED, RING, Graph, GraphError
from flux.plan.schedule import StepSchedule

if TYPE_CHECKING:
    from flux._C import StepTimes
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
                start, length = self.start[number], self.end[number] - self.start[number]
                details = {"kind": op.kind, "shape": str(op.shape)}
                lane, times = f"{label}{stream}", (1e3 * start, 1e3 * length)
                events.append(Event(stage, lane, kind, op.name, *times, details))
        return events


def simulate(schedule: StepSchedule, cost: CostModel) -> Timeline:
    """Return when each operator runs; raise GraphError if the schedule cannot be run."""
    with paused_collector():
        _ = schedule.is_whole  # raises otherwise
        graph, solo = schedule.graph, solo_times(schedule.graph, cost)
        times = run_in_order(graph, list(schedule.lanes.values()), cost, solo)
        if waiting := len(graph.ops) - times.ended:
            schedule.validate()  # says which operators wait for each other
            raise GraphError(f"{waiting} operators never start")
        return Timeline(schedule, times.start, times.end, solo)


def run_in_order(
    graph: Graph, lanes: Sequence[Sequence[int]], cost: CostModel, solo: Sequence[float]
) -> StepTimes:
    """Return when operators run, on lanes that are not checked; ``solo``: times by themselves."""
    ops = graph.ops
    kinds = graph.kinds if getattr(cost, "by_kind", False) else range(len(ops))
    return graph.native.run_in_order(solo, lanes, kinds, lambda a, b: cost.oef(ops[a], ops[b]))

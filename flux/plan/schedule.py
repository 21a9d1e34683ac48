"""Which stream runs which operator in which order, on each pipeline stage.

A stage has streams. Operators of one stream run one after the other, in the order given here, each
when everything that it depends on has ended. Streams run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from flux.plan.graph import RESOURCES, Graph, GraphError, Operator, topological

Lane = tuple[int, str]
"""(stage, stream)"""


@dataclass(frozen=True)
class StepSchedule:
    """The order of a step's operators.

    Attributes:
        lanes: for each stage and stream, numbers of operators in the order in which they run.
        policy: that made it, for display.
        actions: of each pipeline rank, as torch.distributed.pipelining writes them, if ranks have
            several stages; else they follow from the operators.
    """

    graph: Graph
    lanes: Mapping[Lane, tuple[int, ...]] = field(default_factory=dict)
    policy: str = ""
    actions: tuple[tuple[str, ...], ...] = ()

    def validate(self) -> None:
        """Check that the schedule can be run, once.

        Raises:
            GraphError: an operator is missing, scheduled twice, or on another stage's lane; or the
                order of the lanes contradicts the dependencies: the step would never end.
        """
        _ = self.is_whole
        ordered = list(self.graph.deps)
        for numbers in self.lanes.values():
            for before, after in pairwise(numbers):
                ordered[after] = (*ordered[after], before)
        try:
            topological(self.graph.ops, ordered)
        except GraphError as error:
            raise GraphError(f"the lanes contradict the dependencies: {error}") from error

    @cached_property
    def is_whole(self) -> bool:
        """True: each operator is on a lane of its stage, once. Raises GraphError otherwise."""
        ops = self.graph.ops
        seen = [False] * len(ops)
        for (stage, stream), numbers in self.lanes.items():
            for number in numbers:
                if not 0 <= number < len(ops):
                    raise GraphError(f"stage {stage}, {stream}: no operator has number {number}")
                if seen[number]:
                    raise GraphError(f"{ops[number].name} is scheduled twice")
                if ops[number].stage != stage:
                    raise GraphError(
                        f"{ops[number].name} of stage {ops[number].stage} is on a lane of "
                        f"stage {stage}"
                    )
                seen[number] = True
        for number, scheduled in enumerate(seen):
            if not scheduled:
                raise GraphError(f"{ops[number].name} is not scheduled")
        return True

    def rows(self) -> list[list[str]]:
        """Return the actions of each stage, as torch.distributed.pipelining writes them.

        ``0F3`` is the forward of stage 0 for micro-batch 3; ``0B3`` its whole backward. An action
        stands where its first operator on the stage's compute lane does. ``(0F4;7B0)OVERLAP_F_B``
        are two that are interleaved.
        """
        if self.actions:
            return [list(row) for row in self.actions]
        table: list[list[str]] = []
        for stage in range(self.graph.stages):
            actions: dict[str, None] = {}
            for number in self.lanes.get((stage, "comp"), ()):
                op = self.graph.ops[number]
                if op.micro >= 0:
                    actions[f"{stage}{'F' if op.role == 'fwd' else 'B'}{op.micro}"] = None
            table.append(list(actions))
        return table


def on_lanes(
    graph: Graph,
    sequences: Sequence[Iterable[int]],
    policy: str,
    stream: Callable[[Operator], str] = lambda op: op.resource,
) -> StepSchedule:
    """Return a schedule in which each stage's operators, in order, go to streams.

    ``sequences`` has each stage's operators in the order of its streams; ``stream`` returns the
    stream of an operator, by default its resource.
    """
    lanes: dict[Lane, list[int]] = {}
    for stage, numbers in enumerate(sequences):
        for resource in RESOURCES:
            lanes.setdefault((stage, resource), [])
        for number in numbers:
            lanes.setdefault((stage, stream(graph.ops[number])), []).append(number)
    filled = {lane: tuple(numbers) for lane, numbers in lanes.items() if numbers}
    return StepSchedule(graph, filled, policy)

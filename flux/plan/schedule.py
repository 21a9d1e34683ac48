"""Which stream runs which operator in which order, on each pipeline stage.

A stage has streams. Operators of one stream run one after the other, in the order given here, each
when everything that it depends on has ended. Streams run side by side.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from flux.core.datafile import load_json, shown
from flux.plan.graph import RESOURCES, Graph, GraphError, Op, topological

Lane = tuple[int, str]
"""(stage, stream)"""

_FORMAT = 1


@dataclass(frozen=True)
class StepSchedule:
    """The order of a step's operators.

    Attributes:
        graph: the operators.
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
        self.check_lanes()
        _ = self._can_end

    def check_lanes(self) -> None:
        """Check that each operator is on a lane of its stage, once.

        Raises:
            GraphError: it is not.
        """
        _ = self._is_whole

    @cached_property
    def _is_whole(self) -> bool:
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
        for number, found in enumerate(seen):
            if not found:
                raise GraphError(f"{ops[number].name} is not scheduled")
        return True

    @cached_property
    def _can_end(self) -> bool:
        if not self._ends():
            deps = list(self.graph.deps)
            for numbers in self.lanes.values():
                for before, after in pairwise(numbers):
                    deps[after] = (*deps[after], before)
            try:
                topological(self.graph.ops, deps)
            except GraphError as error:
                raise GraphError(f"the lanes contradict the dependencies: {error}") from error
        return True

    def _ends(self) -> bool:
        """Return whether all operators run, if each lane waits for what its next one depends on."""
        deps, lanes = self.graph.deps, list(self.lanes.values())
        done = [False] * len(deps)
        places = [0] * len(lanes)
        waiting: dict[int, list[int]] = {}  # lanes, by the operator that they wait for
        ready = list(range(len(lanes)))
        while ready:
            lane = ready.pop()
            numbers = lanes[lane]
            for place in range(places[lane], len(numbers)):
                number = numbers[place]
                missing = next((dep for dep in deps[number] if not done[dep]), None)
                if missing is not None:
                    places[lane] = place
                    waiting.setdefault(missing, []).append(lane)
                    break
                done[number] = True
                ready += waiting.pop(number, ())
        return all(done)

    def collectives(self, stage: int, group: str) -> list[str]:
        """Return the names of a stage's collectives of a group, in the order of its lanes.

        All ranks of a group are of one stage, whose lanes they share, so they agree on the order.
        """
        ops = self.graph.ops
        return [
            ops[number].name
            for (of, _), numbers in self.lanes.items()
            for number in numbers
            if of == stage and ops[number].group == group
        ]

    def rows(self) -> list[list[str]]:
        """Return the actions of each stage, as torch.distributed.pipelining writes them.

        ``0F3`` is the forward of stage 0 for micro-batch 3; ``0B3`` its whole backward. An action
        stands where its first operator on the stage's compute lane does. ``(0F4;7B0)OVERLAP_F_B``
        are two that are interleaved.
        """
        if self.actions:
            return [list(row) for row in self.actions]
        found: list[list[str]] = []
        for stage in range(self.graph.stages):
            actions: dict[str, None] = {}
            for number in self.lanes.get((stage, "comp"), ()):
                op = self.graph.ops[number]
                if op.micro >= 0:
                    actions[f"{stage}{'F' if op.role == 'fwd' else 'B'}{op.micro}"] = None
            found.append(list(actions))
        return found

    def to_csv(self) -> str:
        """Return ``rows`` as comma-separated values, a line for each stage."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.rows())
        return text.getvalue()

    def to_json(self) -> dict[str, Any]:
        """Return the schedule and its graph as data for JSON."""
        return {
            "format": _FORMAT,
            "policy": self.policy,
            "actions": [list(row) for row in self.actions],
            "itemsize": self.graph.itemsize,
            "resident": list(self.graph.resident),
            "ops": [op._asdict() for op in self.graph.ops],
            "deps": [list(deps) for deps in self.graph.deps],
            "lanes": [
                {"stage": stage, "stream": stream, "ops": list(numbers)}
                for (stage, stream), numbers in self.lanes.items()
            ],
        }

    def write(self, path: Path) -> None:
        """Write the schedule as JSON."""
        path.write_text(json.dumps(self.to_json()) + "\n")


def read_schedule(path: Path) -> StepSchedule:
    """Return the schedule in a file that ``StepSchedule.write`` has written.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, or a schedule that cannot be run.
    """
    content = load_json(path)
    try:
        if content["format"] != _FORMAT:
            raise ValueError(f"format: expected {_FORMAT}, got {shown(content['format'])}")
        ops = tuple(_op_of(values) for values in content["ops"])
        deps = tuple(_numbers(values) for values in content["deps"])
        resident = tuple(float(value) for value in content["resident"])
        graph = Graph(ops, deps, int(content["itemsize"]), resident)
        lanes = {
            (int(lane["stage"]), str(lane["stream"])): _numbers(lane["ops"])
            for lane in content["lanes"]
        }
        actions = tuple(tuple(map(str, row)) for row in content.get("actions", ()))
        schedule = StepSchedule(graph, lanes, str(content["policy"]), actions)
    except GraphError as error:
        raise ValueError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a schedule of flux: {shown(str(error))}") from error
    schedule.validate()
    return schedule


def _op_of(values: Mapping[str, Any]) -> Op:
    op = Op(**{**values, "shape": tuple(values["shape"])})
    for name, kind in Op.__annotations__.items():
        value, wanted = getattr(op, name), {"str": str, "int": int, "float": (int, float)}
        if str(kind) in wanted and not isinstance(value, wanted[str(kind)]):  # type: ignore[arg-type]
            raise ValueError(f"{name}: expected {kind}, got {shown(value)}")
    return op


def _numbers(values: Iterable[Any]) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(value) is int for value in numbers):
        raise ValueError(f"expected integers, got {shown(numbers)}")
    return numbers


def on_lanes(
    graph: Graph,
    sequences: Sequence[Iterable[int]],
    policy: str,
    stream: Callable[[Op], str] = lambda op: op.resource,
) -> StepSchedule:
    """Return a schedule in which each stage's operators, in order, go to streams.

    Args:
        graph: the operators.
        sequences: for each stage, the numbers of its operators in the order of each of its streams.
        policy: name of the policy.
        stream: returns the stream of an operator; by default one for each resource.
    """
    lanes: dict[Lane, list[int]] = {}
    for stage, numbers in enumerate(sequences):
        for resource in RESOURCES:
            lanes.setdefault((stage, resource), [])
        for number in numbers:
            lanes.setdefault((stage, stream(graph.ops[number])), []).append(number)
    filled = {lane: tuple(numbers) for lane, numbers in lanes.items() if numbers}
    return StepSchedule(graph, filled, policy)

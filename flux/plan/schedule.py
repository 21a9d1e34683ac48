"""Which stream runs which operator in which order, on each pipeline stage.

A stage has streams. Operators of one stream run one after the other, in the order given here, each
when everything that it depends on has ended. Streams run side by side.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from flux.core.datafile import Table, one_line, shown
from flux.core.wholefile import write_output
from flux.plan.graph import RESOURCES, ROLES, Graph, GraphError, Operator, topological
from flux.plan.records import read_group, read_kind, read_shape

Lane = tuple[int, str]
"""(stage, stream)"""

_FORMAT = 1
_MOST_ITEMSIZE = 16
_PASS = r"[0-9]{1,6}[A-Z]{1,2}[0-9]{1,6}"
_ACTION = re.compile(rf"{_PASS}|\({_PASS};{_PASS}\)OVERLAP_F_B")


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
        for number, scheduled in enumerate(seen):
            if not scheduled:
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
        table: list[list[str]] = []
        for stage in range(self.graph.stages):
            actions: dict[str, None] = {}
            for number in self.lanes.get((stage, "comp"), ()):
                op = self.graph.ops[number]
                if op.micro >= 0:
                    actions[f"{stage}{'F' if op.role == 'fwd' else 'B'}{op.micro}"] = None
            table.append(list(actions))
        return table

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
        write_output(path, json.dumps(self.to_json()) + "\n")


def read_schedule(path: Path) -> StepSchedule:
    """Return the schedule in a file that ``StepSchedule.write`` has written.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, or a schedule that cannot be run; the message names the
            file.
    """
    top = Table.load_json(path, "a schedule of flux", _FORMAT)
    ops = tuple(map(_op_of, top.tables("ops")))
    deps = tuple(
        top.checked_integers(f"deps[{number}]", values, 0, empty=True)
        for number, values in enumerate(top.values("deps", empty=True))
    )
    stages = _stages(top, ops)
    lanes: dict[Lane, tuple[int, ...]] = {}
    for table in top.tables("lanes"):
        lane = table.integer("stage", least=0), table.text("stream")
        if lane in lanes:
            table.fail("stream", f"a second lane {lane[1]} of stage {lane[0]}")
        lanes[lane] = table.integers("ops", least=0, empty=True)
        table.done()
    policy, itemsize = top.text("policy"), top.integer("itemsize", most=_MOST_ITEMSIZE)
    resident, actions = _resident(top, stages), _actions(top, stages)
    top.done()
    try:
        schedule = StepSchedule(Graph(ops, deps, itemsize, resident), lanes, policy, actions)
        schedule.validate()
    except GraphError as error:
        raise ValueError(f"{path}: {one_line(str(error))}") from error
    return schedule


def _op_of(table: Table) -> Operator:
    kind = read_kind(table)
    pieces = table.integer("pieces")
    op = Operator(
        name=table.text("name"),
        kind=kind,
        resource=table.text("resource", choices=RESOURCES),
        role=table.text("role", choices=ROLES),
        stage=table.integer("stage", least=0),
        part=table.text("part"),
        layer=table.integer("layer", least=-1),
        micro=table.integer("micro", least=-1),
        piece=table.integer("piece", least=0, most=pieces - 1),
        pieces=pieces,
        strand=table.integer("strand", least=0),
        shape=read_shape(table, kind),
        group=read_group(table, kind),
        allocates=table.number("allocates"),
        frees=table.number("frees"),
    )
    table.done()
    return op


def _stages(top: Table, ops: Sequence[Operator]) -> int:
    """Return the number of stages; fail if one of them has no operators.

    Lists by stage are as long as the largest number, whatever it is.
    """
    present = {op.stage for op in ops}
    missing = next((stage for stage in range(len(present)) if stage not in present), None)
    if missing is not None:
        top.fail("ops", f"none is of stage {missing}, and some are of stage {max(present)}")
    return len(present)


def _resident(top: Table, stages: int) -> tuple[float, ...]:
    values = top.values("resident", empty=True)
    if len(values) not in (0, stages):
        top.fail("resident", f"expected {stages} numbers, one for each stage, got {shown(values)}")
    for value in values:
        if type(value) not in (int, float) or not 0 <= value <= 1e15:
            top.fail("resident", f"expected numbers in [0, 1e15], got {shown(value)}")
    return tuple(map(float, values))


def _actions(top: Table, stages: int) -> tuple[tuple[str, ...], ...]:
    """Return the rows of actions in torch's notation, of each pipeline rank, or none."""
    rows = top.values("actions", (), empty=True)
    if len(rows) not in (0, stages):
        top.fail("actions", f"expected {stages} rows, one for each rank, got {len(rows)}")
    for row in rows:
        if not isinstance(row, list):
            top.fail("actions", f"expected lists of texts, got {shown(row)}")
        for text in row:
            if not isinstance(text, str) or not _ACTION.fullmatch(text):
                top.fail("actions", f"expected actions such as 0F3, got {shown(text)}")
    return tuple(map(tuple, rows))


def on_lanes(
    graph: Graph,
    sequences: Sequence[Iterable[int]],
    policy: str,
    stream: Callable[[Operator], str] = lambda op: op.resource,
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

"""An explicit-state model checker for programs of streams, kernels and signals.

``explore`` visits every state that a program can get into, and looks in each for

    race       an access under way to a cell that another access under way writes
    value      a read that does not find the bytes it should (of an earlier call, of another rank,
               poison), or a result that is wrong in the end
    signal     a raise that puts a word back to an earlier epoch
    deadlock   a state that is not the end, and in which nobody can go on

``Mode.literal`` takes every step of every thread by itself, and an access is two: it begins and it
ends. ``Mode.reduced`` explores much less and finds the same; docs/kernels/protocol.md says why.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from flux import _C
from model.program import NOTHING, Item, Program, Step, Symbol, blocks_of
from model.records import Kind, What

Reached = Callable[[int, int], bool]
_MEETS = {
    Kind.raise_: (Kind.raise_, Kind.reset),
    Kind.await_: (Kind.reset,),
    Kind.reset: (Kind.raise_, Kind.await_, Kind.reset),
}
"""Operations on one word that do not commute."""
SPOILT: Symbol = (What.nothing, 0, 0, 0, 2)  # what a write that has begun leaves


class Mode(Enum):
    literal = "literal"
    reduced = "reduced"


@dataclass(frozen=True)
class Violation:
    """What went wrong, and the steps that lead there."""

    kind: str
    text: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"  {i:3}  {line}" for i, line in enumerate(self.trace, 1))
        return f"{self.kind}: {self.text}\nafter\n{steps}"


@dataclass(frozen=True)
class Report:
    """What an exploration found.

    Attributes:
        places: states that differ in where threads are, and not only in what memory holds.
    """

    states: int
    places: int
    transitions: int
    seconds: float
    violation: Violation | None

    def __str__(self) -> str:
        outcome = str(self.violation) if self.violation else "no violation"
        size = f"{self.states:,} states, {self.transitions:,} transitions"
        return f"{size}, {self.seconds:.1f} s: {outcome}"


class LimitError(RuntimeError):
    """There are more states than were allowed."""


class _Violated(Exception):
    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


@dataclass
class _Node:
    """A place in one stream: of the stream itself, or of every block of its current kernel.

    Attributes:
        moves: steps that are next, and the node after each; those that are eager once more.
        under_way: bits of the accesses that may be under way here.
        hazard: bits of the accesses that must not be under way at the same time.
    """

    moves: list[tuple[_Move, int]] = field(default_factory=list)
    eager: list[tuple[_Move, int]] = field(default_factory=list)
    under_way: int = 0
    hazard: int = 0


class _Move(NamedTuple):
    """A step, or (literal) the half of an access that begins it."""

    step: Step
    begins: bool
    eager: bool  # reduced: taken as soon as it can be
    waits: bool
    is_access: bool


def conflicts_of(steps: list[Step]) -> list[int]:
    """For every step the bits of those that may not be under way together with it."""
    readers: dict[int, int] = {}
    writers: dict[int, int] = {}
    # A word that is reset goes back: then it matters on which side of that it is raised or awaited.
    of_word: dict[Kind, dict[int, int]] = {kind: {} for kind in _MEETS}
    for step in steps:
        bit = 1 << step.number
        for cell in step.reads:
            readers[cell] = readers.get(cell, 0) | bit
        for cell in step.writes:
            writers[cell] = writers.get(cell, 0) | bit
        if step.kind in of_word:
            same = of_word[step.kind]
            same[step.word] = same.get(step.word, 0) | bit
    items = []
    for step in steps:
        bits = 0
        for kind in _MEETS.get(step.kind, ()):
            bits |= of_word[kind].get(step.word, 0)
        for cell in step.reads:
            bits |= writers.get(cell, 0)
        for cell in step.writes:
            bits |= writers.get(cell, 0) | readers.get(cell, 0)
        items.append(bits & ~(1 << step.number))
    return items


class _Space:
    """The streams of a program as graphs of nodes, made once."""

    def __init__(self, program: Program, mode: Mode) -> None:
        self.program, self.mode = program, mode
        self.steps = program.number()
        self.conflicts = conflicts_of(self.steps)
        self.concurrent = self._concurrent()
        self.streams = [self._nodes(items) for items in program.streams]

    def _concurrent(self) -> list[int]:
        """For every step the bits of those that its own stream does not put before or after it."""
        everything = (1 << len(self.steps)) - 1
        counts = [0] * len(self.steps)
        for items in self.program.streams:
            kernels = [
                [sum(1 << step.number for step in block) for block in blocks_of(item)]
                for item in items
            ]
            of_stream = sum(map(sum, kernels))
            for item, bits in zip(items, kernels, strict=True):
                for block, own in zip(blocks_of(item), bits, strict=True):
                    for step in block:
                        counts[step.number] = (everything & ~of_stream) | (sum(bits) & ~own)
        return counts

    def _moves(self, step: Step) -> list[_Move]:
        rest = (step.kind in (Kind.await_, Kind.join), step.is_access)
        if self.mode is Mode.literal:
            halves = [True, False] if step.is_access else [False]
            return [_Move(step, begins, False, *rest) for begins in halves]
        harmless = not self.conflicts[step.number] & self.concurrent[step.number]
        return [_Move(step, False, harmless, *rest)]

    def _nodes(self, items: list[Item]) -> list[_Node]:
        nodes: list[_Node] = []
        for item in items:
            moves = [[m for step in block for m in self._moves(step)] for block in blocks_of(item)]
            self._product(nodes, moves)
        nodes.append(_Node())
        return nodes

    def _product(self, nodes: list[_Node], blocks: list[list[_Move]]) -> None:
        """Nodes for all places of the blocks of a kernel; then comes what follows in the stream."""
        base, size, strides = len(nodes), 1, []
        for block in blocks:
            strides.append(size)
            size *= len(block) + 1
        size -= 1  # all blocks at their end: the first node of what follows
        for place in range(size):
            node = _Node()
            for block, stride in zip(blocks, strides, strict=True):
                at = place // stride % (len(block) + 1)
                if at < len(block):
                    move = block[at]
                    # The node of the last place is the next one to be made.
                    node.moves.append((move, base + place + stride))
                    self._mark(node, move)
            nodes.append(node)

    def _mark(self, node: _Node, move: _Move) -> None:
        """An access is under way between its halves; (reduced) wherever it is next."""
        if move.eager:
            node.eager.append(node.moves[-1])
        number = move.step.number
        whole = self.mode is Mode.reduced and not move.eager
        if move.begins:
            return
        if whole or (self.mode is Mode.literal and move.is_access):
            node.under_way |= 1 << number
            node.hazard |= self.conflicts[number]


class _State(NamedTuple):
    """Where every stream is, and what words and cells hold."""

    nodes: tuple[int, ...]
    words: tuple[int, ...]
    cells: tuple[int, ...]


Log = Callable[[_Move], None]


class _Machine:
    """Takes steps, and looks at what they do."""

    def __init__(self, program: Program, mode: Mode, reached: Reached) -> None:
        self.program, self.mode = program, mode
        self.reached = functools.cache(reached)
        space = _Space(program, mode)
        self.steps, self.conflicts, self.streams = space.steps, space.conflicts, space.streams
        self.numbers: dict[Symbol, int] = {NOTHING: 0, SPOILT: 1}
        self.checks = [
            [(c, self._number(s)) for c, s in step.expects.items()] for step in self.steps
        ]
        self.puts = [[(c, self._number(s)) for c, s in t.puts.items()] for t in self.steps]
        self.results = [(c, self._number(s)) for c, s in program.results.items()]
        self.symbols = list(self.numbers)
        # Where an event is recorded: (stream, first node behind it).
        self.events = {
            move.step.event: (stream, after)
            for stream, nodes in enumerate(self.streams)
            for node in nodes
            for move, after in node.moves
            if move.step.kind is Kind.event
        }

    def _number(self, symbol: Symbol) -> int:
        return self.numbers.setdefault(symbol, len(self.numbers))

    def start(self) -> _State:
        words = (self.program.recording.word_before,) * len(self.program.words)
        return _State((0,) * len(self.streams), words, (0,) * len(self.program.cells))

    def key(self, state: _State) -> object:
        """Without races, and until one is found, places alone say what words and cells hold."""
        return state.nodes if self.mode is Mode.reduced else state

    def enabled(self, state: _State, move: _Move) -> bool:
        if not move.waits:
            return True
        step = move.step
        if step.kind is Kind.await_:
            return self.reached(state.words[step.word], step.value)
        stream, after = self.events[step.event]
        return state.nodes[stream] >= after

    def _first_enabled(
        self, state: _State, moves: list[tuple[_Move, int]]
    ) -> tuple[_Move, int] | None:
        for pair in moves:
            if self.enabled(state, pair[0]):
                return pair
        return None

    def choices(self, state: _State) -> Iterator[tuple[int, _Move, int]]:
        """(stream, move, node after it) of everything that can happen next."""
        for stream, at in enumerate(state.nodes):
            for move, after in self.streams[stream][at].moves:
                if self.enabled(state, move):
                    yield stream, move, after

    def go(self, state: _State, stream: int, move: _Move, after: int) -> _State:
        nodes = (*state.nodes[:stream], after, *state.nodes[stream + 1 :])
        step, words, cells = move.step, state.words, state.cells
        if move.is_access:
            cells = self._access(cells, move)
        elif not move.waits and step.kind in (Kind.raise_, Kind.reset):
            if step.kind is Kind.raise_:
                self._check_raise(words[step.word], step)
            words = (*words[: step.word], step.value, *words[step.word + 1 :])
        return _State(nodes, words, cells)

    def _check_raise(self, before: int, step: Step) -> None:
        if not self.reached(step.value, before):
            raise _Violated(
                "signal", f"{self.program.describe(step)}, and it had been at {before} already"
            )

    def _access(self, cells: tuple[int, ...], move: _Move) -> tuple[int, ...]:
        step = move.step
        for cell, expected in self.checks[step.number]:
            if cells[cell] != expected:
                self._wrong(self.program.describe(step), cell, cells[cell], expected)
        changed = list(cells)
        if move.begins:
            for cell in step.writes:
                changed[cell] = self.numbers[SPOILT]
        else:
            for cell, symbol in self.puts[step.number]:
                changed[cell] = symbol
            for source, target in step.moves:
                changed[target] = cells[source]
        return tuple(changed)

    def _wrong(self, where: str, cell: int, actual: int, expected: int) -> None:
        names = [self.program.name(self.symbols[number]) for number in (actual, expected)]
        at = self.program.cells[cell]
        raise _Violated("value", f"{where}, and {at} holds {names[0]}, not {names[1]}")

    def settle(self, state: _State, log: Log | None = None) -> _State:
        """Take all eager steps that can be taken."""
        if self.mode is Mode.literal:
            return state
        going = True
        while going:
            going = False
            for stream, nodes in enumerate(self.streams):
                node = nodes[state.nodes[stream]]
                while (first := self._first_enabled(state, node.eager)) is not None:
                    move, after = first
                    state = self.go(state, stream, move, after)
                    if log:
                        log(move)
                    node = nodes[after]
                    going = True
        return state

    def look(self, state: _State) -> None:
        """Look for accesses that must not be under way together."""
        here = [self.streams[stream][at] for stream, at in enumerate(state.nodes)]
        under_way = 0
        for node in here:
            under_way |= node.under_way
        for node in here:
            if node.hazard & under_way:
                self._race(under_way)

    def _race(self, under_way: int) -> None:
        for step in self.steps:
            others = self.conflicts[step.number] & under_way
            if under_way >> step.number & 1 and others:
                other = self.steps[(others & -others).bit_length() - 1]
                pair = sorted((step, other), key=lambda s: s.kind is Kind.raise_)
                names = [self.program.describe(s) for s in pair]
                raise _Violated("race", f"[{names[0]}] while [{names[1]}]")

    def end(self, state: _State) -> None:
        """Look at a state in which nothing can happen."""
        stuck = [
            move.step
            for stream, at in enumerate(state.nodes)
            for move, _ in self.streams[stream][at].moves
        ]
        if stuck:
            held = "; ".join(f"[{self.program.describe(step)}]" for step in stuck)
            raise _Violated("deadlock", f"nobody can go on: {held}")
        for cell, expected in self.results:
            if state.cells[cell] != expected:
                self._wrong("a result", cell, state.cells[cell], expected)


class _Search:
    """Breadth first, so that what is found has few steps before it."""

    def __init__(self, machine: _Machine, limit: int) -> None:
        self.machine = machine
        self.limit = limit
        self.transitions = 0
        # How each state was reached: the state before, and which of its choices.
        self.origin: dict[object, tuple[object, int] | None] = {}

    def run(self) -> Violation | None:
        machine = self.machine
        key: object = None
        choice = 0
        queue: deque[_State] = deque()
        known: set[tuple[int, ...]] = set()  # places before eager steps: those lead to one state
        try:
            state = machine.settle(machine.start())
            self.origin[machine.key(state)] = None
            queue.append(state)
            while queue:
                state = queue.popleft()
                key, choice = machine.key(state), -1
                machine.look(state)
                any_choice = False
                for choice, (stream, move, after) in enumerate(machine.choices(state)):
                    any_choice = True
                    self.transitions += 1
                    if machine.mode is Mode.reduced:
                        nodes = state.nodes
                        places = (*nodes[:stream], after, *nodes[stream + 1 :])
                        if places in known:
                            continue
                        known.add(places)
                    successor = machine.settle(machine.go(state, stream, move, after))
                    found_key = machine.key(successor)
                    if found_key not in self.origin:
                        self._add(found_key, key, choice)
                        queue.append(successor)
                if not any_choice:
                    choice = -1
                    machine.end(state)
        except _Violated as stop:
            return Violation(stop.kind, str(stop), self._trace(key, choice))
        return None

    def _add(self, state: object, before: object, choice: int) -> None:
        self.origin[state] = (before, choice)
        if len(self.origin) > self.limit:
            raise LimitError(f"more than {self.limit:,} states")

    def _trace(self, key: object, last: int) -> tuple[str, ...]:
        """The steps to a state, and the choice there that failed (-1: none, the state did)."""
        chosen: list[int] = []
        while key is not None and (origin := self.origin[key]) is not None:
            key, choice = origin
            chosen.append(choice)
        chosen.reverse()
        if last >= 0:
            chosen.append(last)
        lines: list[str] = []

        def log(move: _Move) -> None:
            step = move.step
            if step.kind is not Kind.event and step.rank >= 0:
                half = "begins: " if move.begins else ""
                lines.append(half + self.machine.program.describe(step))

        machine = self.machine
        try:
            state = machine.settle(machine.start(), log)
            for choice in chosen:
                stream, move, after = next(
                    c for i, c in enumerate(machine.choices(state)) if i == choice
                )
                log(move)
                state = machine.settle(machine.go(state, stream, move, after), log)
        except _Violated:
            pass
        return tuple(lines)


def explore(
    program: Program,
    mode: Mode = Mode.reduced,
    limit: int = 5_000_000,
    reached: Reached = _C.core.epoch_reached,
) -> Report:
    """Look at every state of a program, or at all up to the first violation.

    Args:
        reached: how waits compare (observed, expected).

    Raises:
        LimitError: there are more than ``limit`` states.
    """
    begin = time.monotonic()
    search = _Search(_Machine(program, mode, reached), limit)
    violation = search.run()
    seconds = time.monotonic() - begin
    keys = search.origin
    places = len({key.nodes if isinstance(key, _State) else key for key in keys})
    return Report(len(keys), places, search.transitions, seconds, violation)

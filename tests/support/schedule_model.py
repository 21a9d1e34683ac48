"""A model of ranks that execute tile schedules, for checking every or many interleavings of them.

Each rank is one or two *agents*: its calling thread, which computes GEMM tiles, and its worker,
which runs the schedule's program. An agent is a straight line of atomic steps on a memory that all
ranks share:

    wait  (place, epoch)               blocked until the signal at ``place`` has reached ``epoch``
    read  ((place, value), ...)        fails unless every place holds that value
    write ((place, value), ...)

Data is moved row by row, and its values name the call, so a read that comes too early, or so late
that the next call has overwritten its place, sees another value than the one it expects. The rules
of an execution (who waits for what before touching which buffer) restate csrc/cpu/engine.cpp in a
few lines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

from core_cases import (
    AG_GEMM,
    GATHER,
    GEMM_AR,
    PULL,
    PUSH,
    REDUCE,
    RESULT,
    SEND,
    STORE_DIRECT,
    STORE_STAGED,
    Case,
    Reduction,
    Transfer,
)

Place = Hashable
Values = tuple[tuple[Place, Any], ...]


class Step(NamedTuple):
    kind: str  # wait | read | write
    values: Values


class Call(NamedTuple):
    """One call: its case, and whether a worker moves tiles or the calling thread does."""

    case: Case
    threaded: bool


class Wrong(AssertionError):
    """A deadlock, or a read of an unexpected value."""


Keep = Callable[[str], bool]


class Rank:
    """The steps of one rank. ``keep`` may drop a kind of wait, to see that the model notices."""

    def __init__(self, rank: int, calls: list[Call], keep: Keep) -> None:
        self.rank = rank
        self.keep = keep
        self.main: list[Step] = []
        self.worker: list[Step] = []
        for epoch, call in enumerate(calls, start=1):
            self.epoch, self.case, self.schedule = epoch, call.case, call.case.build(rank)
            if call.case.op == AG_GEMM:
                self.all_gather(call.threaded)
            else:
                self.reduction(call.threaded)

    # Steps ---------------------------------------------------------------------------------------

    def wait(self, to: list[Step], why: str, *places: Place) -> None:
        if self.keep(why):
            to += [Step("wait", ((place, self.epoch),)) for place in places]

    def raise_signal(self, to: list[Step], *place: Hashable) -> None:
        to.append(Step("write", ((place, self.epoch),)))

    def wait_entries(self, to: list[Step]) -> None:
        others = (r for r in range(self.case.world) if r != self.rank)
        self.wait(to, "entries", *(("entered", r) for r in others))

    def wait_signal(self, to: list[Step], why: str, pad: int, signals: Iterable[int]) -> None:
        self.wait(to, why, *(("signal", pad, s) for s in signals))

    def begin(self, threaded: bool) -> list[Step]:
        """Enters the call; returns where the program's steps go."""
        self.raise_signal(self.main, "entered", self.rank)
        if not threaded:
            return self.main
        self.raise_signal(self.main, "submitted", self.rank)
        self.wait(self.worker, "submitted", ("submitted", self.rank))
        return self.worker

    def end(self, threaded: bool) -> None:
        if threaded:
            self.raise_signal(self.worker, "finished", self.rank)
            self.wait(self.main, "finished", ("finished", self.rank))

    def offset(self, row: int) -> int:
        return row % self.case.chunk_rows

    # AllGather -----------------------------------------------------------------------------------

    def all_gather(self, threaded: bool) -> None:
        rank, epoch = self.rank, self.epoch
        own = self.case.own_rows(rank)
        shard = tuple((("x", rank, self.offset(row)), (epoch, row)) for row in own)
        self.main.append(Step("write", shard))
        to = self.begin(threaded)
        self.wait_entries(to)
        for kind, index in self.schedule.program:
            assert kind == GATHER
            self.gather(to, self.schedule.transfers[index])
        for v in self.schedule.visits:
            self.wait_signal(self.main, "visit", rank, range(*v.waits))
            for row in v.rows:
                place = ("x", rank, self.offset(row)) if v.owner == rank else ("full", rank, row)
                self.main.append(Step("read", ((place, (epoch, row)),)))
        self.end(threaded)

    def gather(self, to: list[Step], t: Transfer) -> None:
        shard = t.src == self.rank == t.chunk
        if not shard:
            self.wait_signal(to, "gather", t.src, [t.signal])
        if not self.keep("data before signal"):
            self.raise_signal(to, "signal", t.dst, t.signal)
        for row in t.rows:
            place = ("x", self.rank, self.offset(row)) if shard else ("full", t.src, row)
            self.move(to, row, place, ("full", t.dst, row))
        self.raise_signal(to, "signal", t.dst, t.signal)

    # ReduceScatter and AllReduce -----------------------------------------------------------------

    def partial(self, row: int, staged: bool) -> Place:
        """Return the place of this rank's partial row: local, or in the owner's block."""
        owner = self.case.owner(row)
        holder, block = self.schedule.homes[owner]
        if staged or block < 0:
            return ("partial", self.rank, row)
        return ("block", holder, block, self.offset(row))

    def row_values(self, place: Place, sources: Iterable[int], row: int) -> Values:
        """A complete row, summed over ``sources``: all of its columns."""
        terms = frozenset(sources)
        return tuple(((place, col), (self.epoch, terms, row, col)) for col in range(self.case.n))

    def result(self, holder: int, row: int) -> Place:
        pull = self.case.direction == PULL
        return ("result", holder, self.offset(row) if pull else row)

    def reduction(self, threaded: bool) -> None:
        c, rank, epoch = self.case, self.rank, self.epoch
        direct = c.store == STORE_DIRECT
        to = self.begin(threaded)
        if direct:
            self.wait_entries(self.main)
        for v in self.schedule.visits:
            for row in v.rows:
                place = self.partial(row, staged=not direct)
                terms = frozenset({rank})
                values = (((place, col), (epoch, terms, row, col)) for col in v.cols)
                self.main.append(Step("write", tuple(values)))
            for index in range(*v.completes):
                t = self.schedule.transfers[index]
                if direct:
                    self.raise_signal(self.main, "signal", t.dst, t.signal)
                else:
                    self.raise_signal(self.main, "computed", rank, index)
        self.wait_entries(to)
        for kind, index in self.schedule.program:
            if kind == SEND:
                self.send(to, index)
            elif kind == REDUCE:
                self.reduce(to, index)
            elif kind == RESULT and c.direction == PUSH:
                self.push_result(to, self.schedule.results[index])
            else:
                pulled = kind == RESULT
                t = (self.schedule.results if pulled else self.schedule.receipts)[index]
                self.take_result(to, t, holder=t.src if pulled else rank)
        self.end(threaded)
        rows = range(c.m) if c.op == GEMM_AR else c.own_rows(rank)
        self.main += [Step("read", ((("out", rank, row), (epoch, row)),)) for row in rows]

    def move(self, to: list[Step], row: int, src: Place, dst: Place) -> None:
        to.append(Step("read", ((src, (self.epoch, row)),)))
        to.append(Step("write", ((dst, (self.epoch, row)),)))

    def push_result(self, to: list[Step], t: Transfer) -> None:
        if t.forwarded:
            self.wait_signal(to, "result", self.rank, [t.signal])
        for row in t.rows:
            place = self.result(self.rank, row) if t.forwarded else ("out", self.rank, row)
            self.move(to, row, place, self.result(t.dst, row))
        self.raise_signal(to, "signal", t.dst, t.signal)

    def take_result(self, to: list[Step], t: Transfer, holder: int) -> None:
        self.wait_signal(to, "result", holder, [t.signal])
        for row in t.rows:
            self.move(to, row, self.result(holder, row), ("out", self.rank, row))

    def send(self, to: list[Step], index: int) -> None:
        t = self.schedule.transfers[index]
        self.wait(to, "computed", ("computed", self.rank, index))
        for row in t.rows if t.dst != self.rank else ():
            home, away = self.partial(row, True), self.partial(row, False)
            to.append(Step("read", self.row_values(home, [self.rank], row)))
            to.append(Step("write", self.row_values(away, [self.rank], row)))
        self.raise_signal(to, "signal", t.dst, t.signal)

    def terms(self, r: Reduction, source: int) -> list[int]:
        """The ranks whose partials one share holds: what another host sends is its ranks' sum."""
        c = self.case
        summed = c.two_levels and r.target == r.owner == self.rank
        return (
            c.members(source) if summed and c.host_of[source] != c.host_of[self.rank] else [source]
        )

    def reduce(self, to: list[Step], index: int) -> None:
        c, rank, r = self.case, self.rank, self.schedule.reductions[index]
        pull = c.direction == PULL
        self.wait_signal(to, "reduce", rank, [signal for _, signal, _ in r.shares])
        summed = sorted(term for source, _, _ in r.shares for term in self.terms(r, source))
        group = range(c.world) if r.target == rank else c.members(rank)
        assert summed == list(group), "every partial once"
        for row in r.rows:
            for source, _, block in r.shares:
                place: Place = ("block", source if pull else rank, block, self.offset(row))
                if source == rank:
                    place = self.partial(row, c.store == STORE_STAGED)
                to.append(Step("read", self.row_values(place, self.terms(r, source), row)))
            if r.target == rank:
                to.append(Step("write", ((("out", rank, row), (self.epoch, row)),)))
            else:
                place = ("block", r.target, r.block, self.offset(row))
                to.append(Step("write", self.row_values(place, group, row)))
        if r.target != rank:
            self.raise_signal(to, "signal", r.target, r.signal)
        elif c.op == GEMM_AR and pull and c.world > 1:
            for row in r.rows:
                to.append(Step("write", ((self.result(rank, row), (self.epoch, row)),)))
            self.raise_signal(to, "signal", rank, r.signal)


def agents_of(calls: list[Call], drop: str = "") -> list[list[Step]]:
    """The agents of all ranks that make ``calls`` one after the other."""
    world = calls[0].case.world
    ranks = [Rank(rank, calls, lambda why: why != drop) for rank in range(world)]
    return [steps for rank in ranks for steps in (rank.main, rank.worker) if steps]


def enabled(step: Step, memory: dict[Place, Any]) -> bool:
    return step.kind != "wait" or all(memory.get(p, 0) >= epoch for p, epoch in step.values)


def check(step: Step, memory: dict[Place, Any]) -> None:
    for place, value in step.values:
        if memory.get(place) != value:
            raise Wrong(f"{place} holds {memory.get(place)}, expected {value}")


def run_randomly(agents: list[list[Step]], seed: int) -> None:
    """Run one interleaving. Agents have very different speeds, which exposes races."""
    rng = random.Random(seed)
    weight = [rng.choice((1, 10, 1000)) for _ in agents]
    at = [0] * len(agents)
    memory: dict[Place, Any] = {}
    while live := [i for i, steps in enumerate(agents) if at[i] < len(steps)]:
        ready = [i for i in live if enabled(agents[i][at[i]], memory)]
        if not ready:
            stuck = [agents[i][at[i]].values for i in live]
            raise Wrong(f"deadlock, everyone waits: {stuck}")
        i = rng.choices(ready, [weight[i] for i in ready])[0]
        step = agents[i][at[i]]
        if step.kind == "write":
            memory.update(step.values)
        elif step.kind == "read":
            check(step, memory)
        at[i] += 1


def run_exhaustively(agents: list[list[Step]]) -> int:
    """All interleavings, up to those that lead to the same state; returns the number of states.

    Signals only grow, so a wait that is enabled stays so and can be taken at once without losing
    any behaviour (it commutes with every step of the others).
    """
    start: tuple[tuple[int, ...], frozenset[tuple[Place, Any]]] = ((0,) * len(agents), frozenset())
    seen = {start}
    stack = [start]
    while stack:
        at, frozen = stack.pop()
        memory = dict(frozen)
        live = [i for i, steps in enumerate(agents) if at[i] < len(steps)]
        ready = [i for i in live if enabled(agents[i][at[i]], memory)]
        if live and not ready:
            raise Wrong(f"deadlock, everyone waits: {[agents[i][at[i]].values for i in live]}")
        waits = [i for i in ready if agents[i][at[i]].kind == "wait"]
        for i in waits[:1] or ready:
            step = agents[i][at[i]]
            after = frozen
            if step.kind == "write":
                after = frozenset({**memory, **dict(step.values)}.items())
            elif step.kind == "read":
                check(step, memory)
            state = (*at[:i], at[i] + 1, *at[i + 1 :]), after
            if state not in seen:
                seen.add(state)
                stack.append(state)
    return len(seen)

"""The order of collectives in forward and backward: the same on all ranks, whatever a rank runs.

Experts get tokens on some ranks only, and branches are taken by some. Collectives must still meet
their equals, so a rank takes part in those of units that it does not run:

    forward     units are gathered in the order of the model. One that is asked for brings those in
                front of it along, and the end of the call brings the rest.
    backward    the same in reverse, down to the first unit with gradients.
    gradients   chunks are reduced in reverse, each when the gradients that backward will come to
                are there, and not before those after it. Others count as zeros.
    its end     ranks add up which parameters had a gradient. Where no rank had one, none is set.
                Chunks whose gradients came after their reduction are reduced a second time.

A unit that is gathered a second time in one pass is outside of this order; all ranks must do so,
and ``Routes.enter`` checks it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import torch

from flux.runtime.centauri.lanes import Done
from flux.runtime.centauri.shards import Chunk, Managed
from flux.runtime.centauri.units import Traffic, Unit


class Forward:
    """A call of the model, or of a part of it, from outside."""

    def __init__(self, units: Sequence[Unit], keeps: Collection[Unit], prefetch: int) -> None:
        self.units, self._keeps, self._prefetch = units, keeps, prefetch
        self._place = {unit: place for place, unit in enumerate(units)}
        self._next = 0

    def need(self, unit: Unit) -> None:
        """Gather a unit, those before it, and those ahead, if they have not been yet."""
        self._gather(self._place[unit] + self._prefetch)

    def _gather(self, last: int) -> None:
        while self._next <= min(last, len(self.units) - 1):
            self.units[self._next].gather()
            self._next += 1

    def has(self, unit: Unit) -> bool:
        """Return whether a unit is of the part."""
        return unit in self._place

    def release(self, units: Sequence[Unit]) -> None:
        """Free units whose module has run, or is not run any more."""
        for unit in units:
            here = unit in self._place and self._place[unit] < self._next
            if here and unit not in self._keeps and unit.depth == 0 and not unit.in_backward:
                unit.free()

    def finish(self) -> None:
        """Gather what this rank has not run, as others may have."""
        self._gather(len(self.units))
        for unit in self.units:
            unit.wait()
        self.release(self.units)


class Backward:
    """One ``backward()`` of the model: gathers in reverse, and reductions.

    Args:
        reach: those that every rank's backward goes through.
        reduces: whether gradients are reduced.
    """

    def __init__(
        self, units: Sequence[Unit], reach: Collection[Unit], traffic: Traffic, reduces: bool
    ) -> None:
        self.thread = threading.get_ident()
        self._units, self._traffic, self._reduces = units, traffic, reduces
        order = [unit for unit in reversed(units) if unit in reach]
        trains = [any(p.trained for p in unit.parameters) for unit in order]
        trained = [place for place, one in enumerate(trains) if one]
        self._order, self._end = order, trained[-1] + 1 if trained else 0
        self._place = {unit: place for place, unit in enumerate(order)}
        self._next = 0
        self._lowest = len(units)  # unit that had a gradient
        self._grads: dict[int, torch.Tensor] = {}
        self._seen: set[int] = set()  # parameters
        self._late: list[Chunk] = []
        self._sums: list[tuple[Done, list[torch.Tensor], Chunk]] = []
        self._chunks = [
            (unit, chunk)
            for unit in reversed(units)
            for chunk in unit.reduced
            if chunk.owed or (unit in reach and any(p.trained for p in chunk.parameters))
        ]
        self._begun = 0
        self._number = {id(chunk): number for number, (_, chunk) in enumerate(self._chunks)}
        self._awaited = {
            id(chunk): {id(p) for p in chunk.parameters if p.awaits_gradient()}
            for _, chunk in self._chunks
        }

    def need(self, unit: Unit) -> None:
        """Gather a unit, those after it in the model, and those ahead, if not yet.

        One that was freed comes again only when a weight is read: a module that hands its input on
        has the gradient of the module in front.
        """
        place = self._place.get(unit)
        if place is None:
            self._take(unit)
        else:
            self._gather(place + 1)
            self._gather(min(place + 1 + self._traffic.plan.prefetch, self._end))

    def _gather(self, end: int) -> None:
        while self._next < end:
            self._take(self._order[self._next])
            self._next += 1

    @staticmethod
    def _take(unit: Unit) -> None:
        unit.in_backward = True
        unit.gather()

    def accept(self, unit: Unit, parameter: Managed) -> None:
        """Take a gradient that is complete; begin the reductions that may begin."""
        if not self._reduces:
            return
        grad = parameter.take_grad()
        if grad is None:  # frozen after forward
            return
        chunk = unit.chunk_of[id(parameter)]
        held = self._grads.pop(id(parameter), None)
        self._grads[id(parameter)] = grad if held is None else held.add_(grad)
        self._seen.add(id(parameter))
        self._lowest = min(self._lowest, unit.number)
        if self._number.get(id(chunk), -1) < self._begun:
            if chunk not in self._late:
                self._late.append(chunk)
            return
        self._awaited[id(chunk)].discard(id(parameter))
        # Without overlap gathers are waited for where they begin, and ranks that run different
        # units come to gathers and reductions in different orders: so reductions come at the end.
        while (
            self._traffic.plan.overlap
            and self._begun < len(self._chunks)
            and self._complete(*self._chunks[self._begun])
        ):
            self._reduce_next()

    def _complete(self, unit: Unit, chunk: Chunk) -> bool:
        """Return whether no gradient of a chunk is to be expected any more.

        A checkpoint that re-enters autograd hides the parameters that it will reach. So zeros are
        assumed only when backward has reached an earlier unit.
        """
        if self._awaited[id(chunk)]:
            return False
        all_there = all(id(p) in self._seen or not p.trained for p in chunk.parameters)
        return all_there or self._lowest < unit.number

    def _reduce_next(self) -> None:
        unit, chunk = self._chunks[self._begun]
        self._begun += 1
        self._reduce(chunk)
        after = self._chunks[self._begun][0] if self._begun < len(self._chunks) else None
        plan, shares = self._traffic.plan, self._traffic.routes.memory is not None
        frozen = any(not p.trained for p in unit.parameters)
        done = after is not unit and unit.depth == 0
        # Weights without gradients may still be read, and those that a host shares stay.
        if done and plan.reshard_after_forward and not (shares or frozen):
            unit.in_backward = False
            unit.free()

    def _reduce(self, chunk: Chunk) -> None:
        chunk.owed = False
        plan = self._traffic.plan
        grads = [self._grads.pop(id(p), None) for p in chunk.parameters]
        for number, p in enumerate(chunk.parameters):  # of passes that did not reduce
            if grads[number] is None:
                grads[number] = p.take_grad()
                if grads[number] is not None:
                    self._seen.add(id(p))
        done, sums = chunk.start_reduce(self._traffic.routes, plan.reduce_dtype, grads)
        if not plan.overlap:
            self._traffic.guarded(done.wait)
        self._sums.append((done, sums, chunk))

    def finish(self) -> None:
        """Take part in the remaining reductions, wait, and give the shards their gradients."""
        try:
            self._gather(self._end)
            if not self._reduces:
                for _, chunk in self._chunks:
                    chunk.owed = True
            elif self._chunks or self._late:
                while self._begun < len(self._chunks):
                    self._reduce_next()
                self._store(self._agreed())
        finally:
            self.abandon()

    def _store(self, had_gradients: Collection[int]) -> None:
        for done, sums, chunk in self._sums:
            self._traffic.guarded(done.wait)
            parts = sums[0].split([p.share for p in chunk.parameters])
            for p, part in zip(chunk.parameters, parts, strict=True):
                if id(p) in had_gradients:
                    p.accumulate(part)

    def _agreed(self) -> set[int]:
        """Return the parameters that had a gradient on any rank; reduce late chunks again."""
        chunks = [chunk for unit in reversed(self._units) for chunk in unit.reduced]
        parameters = [p for chunk in chunks for p in chunk.parameters]
        words = [id(p) in self._seen for p in parameters] + [c in self._late for c in chunks]
        device = parameters[0].buffer.device
        values = torch.tensor(words, dtype=torch.float32, device=device)
        totals: list[torch.Tensor] = []
        routes = self._traffic.routes
        what = "agreement on who had gradients"
        self._traffic.guarded(lambda: totals.append(routes.average(what, values)))
        had = totals[0].gt(0).tolist()
        for chunk, late in zip(chunks, had[len(parameters) :], strict=True):
            if late:
                self._reduce(chunk)
        return {id(p) for p, any_rank in zip(parameters, had, strict=False) if any_rank}

    def abandon(self) -> None:
        """Free the weights; forget what a backward that has raised left behind."""
        for unit in self._units:
            unit.in_backward = False
            if unit.depth == 0:
                unit.free()
        self._grads.clear()
        self._sums.clear()

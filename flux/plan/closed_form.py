"""Closed forms of a step's time and memory, whatever the layers of its pipeline stages.

Operators of a layer run one after the other, or communication is hidden, under 1F1B: with P stages
and m micro-batches a step takes (m + P - 1) times as long as its longest stage. So a split is
best whose longest stage is shortest, with embedding, head and loss. Memory may forbid it: the first
stage holds P micro-batches, and the last one logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from flux.machine.cluster import Cluster
from flux.plan.fabric import Fabric
from flux.plan.model import TrainingStep
from flux.plan.sample import StepLayout, short_of


class Rating(NamedTuple):
    """A step, in ms: nothing hidden; all communication hidden; no bubbles. And its memory.

    Without bubbles a step still is as long as a micro-batch's way through all stages and back:
    gradients of weights alone wait.
    """

    serial_ms: float
    hidden_ms: float
    filled_ms: float
    memory_bytes: float


class StageForm(NamedTuple):
    """What a stage needs."""

    serial_ms: float = 0.0  # of a micro-batch, one operator after the other
    hidden_ms: float = 0.0  # likewise, without communication
    once_ms: float = 0.0  # of the end of the step
    once_hidden_ms: float = 0.0
    way_ms: float = 0.0  # of a micro-batch, without gradients of weights
    kept: float = 0.0  # bytes from a micro-batch's forward until its backward
    more: float = 0.0  # bytes beyond those of all micro-batches in flight

    def plus(self, other: StageForm, times: float = 1.0) -> StageForm:
        """Return the sum with so many times another one."""
        return StageForm(*(a + b * times for a, b in zip(self, other, strict=True)))


_Line = Callable[[int], float]


def _line(besides: float, each: float) -> _Line:
    return lambda layers: besides + each * layers


class ClosedForm:
    """Time and memory of a step from two layers of its first, second and last stage."""

    def __init__(self, step: TrainingStep, cluster: Cluster) -> None:
        self.step, self.pp = step, step.parallel.pp
        each = min(2, *step.stages)  # layers beside that of the embedding, or of the head
        few = self.pp if self.pp < 5 else 4 - self.pp % 2  # layers may be of two kinds by turns
        fewer = replace(step, split=(), parallel=replace(step.parallel, pp=few))
        short = replace(short_of(fewer, each, 1), dense_layers=0)
        layout = StepLayout(cluster, short)
        layout.cost.fabric = Fabric(cluster, step.parallel)
        forms = [self._form(layout, n, each) for n in range(few)]
        # What each stage needs for a layer, and besides.
        self.forms = [*forms[:1], *forms[1:2] * (self.pp - 2), *forms[-1:]][: self.pp]

    def _form(self, layout: StepLayout, stage: int, each: int) -> tuple[StageForm, StageForm]:
        """Return what a stage needs for each layer, and besides."""
        layer = outer = StageForm()
        now = most = held = 0.0  # bytes: at a time, at most, from forward until backward
        for op in layout.graph.ops:
            if op.stage != stage:
                continue
            time, grown = layout.cost.solo(op), op.allocates - op.frees
            if op.moves_weights and op.role == "wgrad":
                time /= self.step.reduce_every
            times, none = (time, 0.0 if op.is_collective else time), (0.0, 0.0)
            kept = grown if op.role == "fwd" else 0.0
            way = 0.0 if op.role in ("wgrad", "step") else time
            form = StageForm(
                *((*none, *times) if op.role == "step" else (*times, *none)), way, kept
            )
            if op.is_outer or op.kind == "send":
                outer = outer.plus(form)
            else:
                layer = layer.plus(form, 1 / each)
            most = max(most, now + op.allocates)
            now += grown
            held += kept
        return layer, outer._replace(more=most - held)

    def rating(self, stages: Sequence[int] = ()) -> Rating:
        """Return the times of the longest stage, and the memory of the fullest one.

        Of equal stages the earliest of those between first and last one holds most.
        """
        stages = stages or self.step.stages
        ratings, passes = [], self.step.micro_batches + self.pp - 1
        step = replace(self.step, split=tuple(stages))
        inner = {layers: n for n, layers in reversed([*enumerate(stages)][1:-1])}
        for stage in {0, *inner.values(), self.pp - 1}:
            layer, outer = self.forms[stage]
            form = outer.plus(layer, stages[stage])
            serial, hidden, once, once_hidden = form[:4]
            filled = serial * self.step.micro_batches + once
            memory = sum(step.resident(stage).values()) + self._held(stage) * form.kept + form.more
            ratings.append(
                Rating(serial * passes + once, hidden * passes + once_hidden, filled, memory)
            )
        most = Rating(*map(max, zip(*ratings, strict=True)))
        ways = (b.plus(a, n).way_ms for n, (a, b) in zip(stages, self.forms, strict=True))
        return most._replace(filled_ms=max(most.filled_ms, sum(ways)))

    def _held(self, stage: int) -> int:
        """Return how many micro-batches a stage holds."""
        return min(self.pp - stage, self.step.micro_batches)

    def split(self, limit: float = inf, *, levels: bool = False) -> tuple[int, ...]:
        """Return layers of stages whose longest one is as short as it can be; (): none fits.

        ``levels``: one whose fullest stage needs less. ``limit``: bytes of a device.
        """
        times, needs = self._lines()
        counts, stages = [1] * self.pp, range(self.pp)
        for _ in range(self.step.layers - self.pp):
            free = [n for n in stages if needs[n](counts[n] + 1) <= limit]
            if not free:
                return ()
            counts[min(free, key=lambda n: times[n](counts[n] + 1))] += 1
        for stage in reversed(stages) if levels else ():
            self._level(counts, stage, times, needs)
        return tuple(counts) if all(needs[n](counts[n]) <= limit for n in stages) else ()

    def _level(
        self, counts: list[int], stage: int, times: Sequence[_Line], needs: Sequence[_Line]
    ) -> None:
        """Give a stage layers of those that need more memory, while it is not the longest."""
        longest = max(line(n) for line, n in zip(times, counts, strict=True)) * (1 + 1e-9)
        while times[stage](counts[stage] + 1) <= longest:
            full = [line(n) if n > 1 else 0.0 for line, n in zip(needs, counts, strict=True)]
            if needs[stage](counts[stage] + 1) >= max(full):
                break
            counts[full.index(max(full))] -= 1
            counts[stage] += 1

    def _lines(self) -> tuple[list[_Line], list[_Line]]:
        """Return the time of a micro-batch and the bytes of stages, as they grow with layers."""
        resident = [sum(self.step.resident(stage).values()) for stage in range(self.pp)]
        inner, times, needs = min(1, self.pp - 1), [], []
        weights = resident[inner] / self.step.stages[inner]  # of a layer
        for stage, layers in enumerate(self.step.stages):
            layer, outer = self.forms[stage]
            held, tables = self._held(stage), resident[stage] - layers * weights
            times.append(_line(outer.serial_ms, layer.serial_ms))
            needs.append(
                _line(tables + held * outer.kept + outer.more, weights + held * layer.kept)
            )
        return times, needs

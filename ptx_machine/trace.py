"""What warps did and when: as text, and for Perfetto."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptx_machine._machine import Module
from ptx_machine.counters import Counters

_EVENT = struct.Struct("<QIiiIIxxxx")  # struct Event of src/trace.h


@dataclass(frozen=True)
class Event:
    """One statement of a warp, or the first of its tries to execute it.

    Attributes:
        time: statements that all warps had executed before.
        block: its number in the order of their start.
        warp: its number in the block.
        statement: its number in the kernel.
        lanes: a bit for each thread.
        waits: it was not executed, because it had to wait.
    """

    time: int
    block: int
    warp: int
    statement: int
    lanes: int
    waits: bool


@dataclass(frozen=True)
class Span:
    """A time in which a warp executed statements of one source line, or waited at one."""

    block: int
    warp: int
    begin: int
    end: int
    file: str
    line: int
    ptx: str
    waits: bool


class Trace:
    """What each warp of a kernel executed.

    Attributes:
        counters: what it executed, in sum.
        events: in the order of their time.
        blocks: the index of each block, in the order of their start.
        dropped: events that were not recorded, because there were too many.
    """

    def __init__(self, module: Module, kernel: str, record: dict[str, Any]) -> None:
        self.counters = Counters(module, kernel, record)
        self.events = [
            Event(time, block, warp, statement, lanes, bool(waits))
            for time, block, warp, statement, lanes, waits in _EVENT.iter_unpack(record["events"])
        ]
        self.blocks: list[tuple[int, int, int]] = record["blocks_started"]
        self.dropped: int = record["dropped"]
        self._statements = module.statements(kernel)
        self._lines = module.lines

    def text(self, block: int, warp: int) -> Iterator[str]:
        """Return a line for each statement of one warp: time, lanes, PTX, source line."""
        for event in self.events:
            if (event.block, event.warp) != (block, warp):
                continue
            file, line, ptx = self._place(event.statement)
            what = "waits at " if event.waits else ""
            where = f"  // {Path(file).name}:{line}" if line > 0 else ""
            yield f"{event.time:>10}  {event.lanes:08x}  {what}{ptx}{where}"

    def spans(self) -> list[Span]:
        """Return what each warp did, line by line of the source.

        Groups of a warp that has diverged follow each other in the span of the warp.
        """
        spans: list[Span] = []
        current: dict[tuple[int, int], Event] = {}  # by block and warp: where its span began
        for event in self.events:
            key = (event.block, event.warp)
            before = current.get(key)
            if before is None:
                current[key] = event
            elif self._differs(before, event):
                spans.append(self._span(before, event.time))
                current[key] = event
        last = {(event.block, event.warp): event.time + 1 for event in self.events}
        spans += [self._span(event, last[key]) for key, event in current.items()]
        return spans

    def chrome(self) -> dict[str, Any]:
        """Return the JSON that Perfetto and Chrome read. A unit of time is a statement."""
        rows: list[dict[str, Any]] = []
        for number, (x, y, z) in enumerate(self.blocks):
            rows.append(_named("process_name", number, 0, f"block ({x}, {y}, {z})"))
        for block, warp in sorted({(event.block, event.warp) for event in self.events}):
            rows.append(_named("thread_name", block, warp, f"warp {warp}"))
        for span in self.spans():
            place = f"{Path(span.file).name}:{span.line}" if span.line > 0 else span.ptx
            rows.append(
                {
                    "ph": "X",
                    "pid": span.block,
                    "tid": span.warp,
                    "ts": span.begin,
                    "dur": max(1, span.end - span.begin),
                    "name": f"waits: {span.ptx}" if span.waits else place,
                    "cat": "wait" if span.waits else "line",
                    "cname": "bad" if span.waits else "good",
                    "args": {"source": place, "ptx": span.ptx},
                }
            )
        return {"traceEvents": rows, "otherData": {"dropped": self.dropped}}

    def _differs(self, a: Event, b: Event) -> bool:
        if a.waits != b.waits:
            return True
        file, line, _ = self._place(a.statement)
        if line == 0:  # there are no source lines
            return a.statement != b.statement
        return (file, line) != self._place(b.statement)[:2]

    def _span(self, event: Event, end: int) -> Span:
        file, line, ptx = self._place(event.statement)
        return Span(event.block, event.warp, event.time, end, file, line, ptx, event.waits)

    def _place(self, statement: int) -> tuple[str, int, str]:
        _, ptx_line, file, line = self._statements[statement]
        return file, line, self._lines[ptx_line - 1].strip()


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

"""From a recording to a program: threads of steps over cells of memory.

A *cell* is a run of bytes that all operations treat alike. It holds a *symbol*: which bytes of
which rank's x, partial or result of which call these are. A kernel is a set of blocks, which run at
the same time as each other and take the kernel's tiles in turn.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from model.records import MASK, WORD, Content, Kind, Record, Recording, Region, What

Symbol = tuple[What, int, int, int, int]  # what, op, source, epoch, byte
NOTHING: Symbol = (What.nothing, 0, 0, 0, 0)
_VERBS = {Kind.raise_: "raises", Kind.await_: "waits for", Kind.reset: "resets"}
POISON: Symbol = (What.nothing, 0, 0, 0, 1)


@dataclass
class Step:
    """One operation of a thread: an access to cells, or a word or event that is raised or awaited.

    Attributes:
        expects: what cells should hold when they are read.
        puts: what is written; ``moves`` are copies, from cell to cell.
        number: among the steps of its program.
    """

    kind: Kind
    stream: int
    rank: int
    call: int
    tile: int
    text: str
    expects: dict[int, Symbol] = field(default_factory=dict)
    puts: dict[int, Symbol] = field(default_factory=dict)
    moves: tuple[tuple[int, int], ...] = ()
    word: int = -1
    value: int = 0
    event: int = 0
    number: int = -1

    @property
    def is_access(self) -> bool:
        return self.kind in (Kind.copy, Kind.fill, Kind.read)

    @property
    def reads(self) -> set[int]:
        return set(self.expects) | {source for source, _ in self.moves}

    @property
    def writes(self) -> set[int]:
        return set(self.puts) | {target for _, target in self.moves}


Blocks = list[list[Step]]
Item = Step | Blocks  # of a stream: an operation, or a kernel


def blocks_of(item: Item) -> Blocks:
    """Threads that run at the same time: of a single operation there is one."""
    return [[item]] if isinstance(item, Step) else item


@dataclass
class Program:
    """What the ranks of a scenario do: a list of items for every stream."""

    recording: Recording
    streams: list[list[Item]]
    names: list[str]  # of streams
    cells: list[str]
    words: list[str]
    results: dict[int, Symbol]  # what cells should hold in the end

    def steps(self) -> Iterator[Step]:
        for items in self.streams:
            for item in items:
                for block in blocks_of(item):
                    yield from block

    def number(self) -> list[Step]:
        """All steps, each of which learns its index."""
        numbered = list(self.steps())
        for number, step in enumerate(numbered):
            step.number = number
        return numbered

    def describe(self, step: Step) -> str:
        """A step in plain words."""
        tile = f", tile {step.tile}" if step.tile >= 0 else ""
        call = f", call {step.call + 1}" if step.call >= 0 else ""
        return f"{self.names[step.stream]}{call}{tile}: {step.text}"

    def name(self, symbol: Symbol) -> str:
        """A symbol in plain words."""
        what, op, source, epoch, byte = symbol
        if what is What.nothing:
            return "NaN of the poison" if symbol == POISON else "nothing yet"
        of = f" of op {op}" if len(self.recording.scenario.ops) > 1 else ""
        return f"{what.name} of rank {source}{of}, epoch {epoch}, from byte {byte} on"


class _Memory:
    """Cells, as the accesses of a recording cut them."""

    def __init__(self, recording: Recording) -> None:
        self.regions = recording.regions
        ranges: list[tuple[int, int]] = [(c.at, c.bytes) for c in recording.results]
        copies: list[tuple[int, int, int]] = []
        for r in recording.records:
            if r.kind in (Kind.fill, Kind.read, Kind.write, Kind.copy):
                ranges.append((r.at, r.bytes))
            if r.kind is Kind.copy:
                ranges.append((r.from_, r.bytes))
                copies.append((r.at, r.from_, r.bytes))
        edges = {edge for at, size in ranges for edge in (at, at + size)}
        # A cut in what is copied is a cut in the copy, and the other way round.
        while True:
            before = len(edges)
            for at, from_, size in copies:
                for one, other in ((at, from_), (from_, at)):
                    inside = [e for e in edges if one < e < one + size]
                    edges.update(e - one + other for e in inside)
            if len(edges) == before:
                break
        self.edges = sorted(edges)
        self.index: dict[int, int] = {}

    def cells(self, at: int, size: int) -> list[tuple[int, int]]:
        """(cell, its first byte relative to ``at``) of a range."""
        low = bisect.bisect_left(self.edges, at)
        high = bisect.bisect_left(self.edges, at + size)
        return [
            (self.index.setdefault(edge, len(self.index)), edge - at)
            for edge in self.edges[low:high]
        ]

    def _region(self, at: int) -> Region | None:
        return next((r for r in self.regions if r.at <= at < r.at + r.bytes), None)

    def is_pad(self, at: int) -> bool:
        region = self._region(at)
        return region is not None and region.is_pad

    def same_region(self, at: int, size: int, behind: int) -> bool:
        """Whether a range goes on with what is at ``behind``."""
        return at + size == behind and self._region(at) is self._region(behind)

    def name(self, at: int, size: int) -> str:
        """A range in plain words."""
        region = self._region(at)
        if region is None:
            return "local memory"
        first = (at - region.at) // region.unit
        last = (at + size - 1 - region.at) // region.unit
        rows = str(first) if first == last else f"{first}-{last}"
        return f"{region.name} {rows} at rank {region.rank}"

    def word(self, at: int) -> str:
        return self.name(at, WORD)

    def names(self) -> list[str]:
        by_number = sorted(self.index.items(), key=lambda pair: pair[1])
        return [self.name(at, 1) for at, _ in by_number]


def symbols(memory: _Memory, content: Content) -> dict[int, Symbol]:
    """What each cell of a content holds."""
    c = content
    return {
        cell: (c.what, c.op, c.source, c.epoch, c.offset + byte)
        for cell, byte in memory.cells(c.at, c.bytes)
    }


class _Builder:
    def __init__(self, recording: Recording, blocks: int | None) -> None:
        self.recording, self.blocks = recording, blocks
        self.memory = _Memory(recording)
        self.handles = list(recording.streams)
        self.words: dict[int, int] = {}
        self.event_streams = {r.value: r.stream for r in recording.records if r.kind is Kind.event}
        self.items: list[list[Item]] = [[] for _ in self.handles]

    def build(self) -> Program:
        kernels: dict[int, list[Record]] = {}
        for record in self.recording.records:
            stream = self.handles.index(record.stream)
            if record.tile >= 0:
                kernels[stream].append(record)
                continue
            self._end_kernel(stream, kernels)
            if record.kind is Kind.launch:
                kernels[stream] = []
            elif record.kind is Kind.fill and self.memory.is_pad(record.at):
                self.items[stream] += self._fill_words(record)
            else:
                self.items[stream].append(self._step(record))
        for stream in list(kernels):
            self._end_kernel(stream, kernels)
        results: dict[int, Symbol] = {}
        for content in self.recording.results:
            results.update(symbols(self.memory, content))
        names = [self._stream(handle) for handle in self.handles]
        words = [self.memory.word(at) for at in self.words]
        return Program(self.recording, self.items, names, self.memory.names(), words, results)

    def _end_kernel(self, stream: int, kernels: dict[int, list[Record]]) -> None:
        records = kernels.pop(stream, None)
        if not records:
            return
        tiles: dict[int, list[Record]] = {}
        for record in records:
            tiles.setdefault(record.tile, []).append(record)
        count = min(self.blocks or len(tiles), len(tiles))
        blocks: Blocks = [[] for _ in range(count)]
        for turn, tile in enumerate(tiles.values()):
            blocks[turn % count] += self._tile(tile)
        self.items[stream].append(blocks)

    def _tile(self, records: Sequence[Record]) -> Iterator[Step]:
        """Reads and writes with no wait between them are under way at the same time."""
        touched: list[Record] = []
        for record in records:
            if record.kind in (Kind.read, Kind.write):
                touched.append(record)
                continue
            if touched:
                yield self._touch(touched)
                touched = []
            yield self._step(record)
        if touched:
            yield self._touch(touched)

    def _touch(self, records: Sequence[Record]) -> Step:
        expects: dict[int, Symbol] = {}
        puts: dict[int, Symbol] = {}
        for record in records:
            assert record.content is not None
            into = expects if record.kind is Kind.read else puts
            into.update(symbols(self.memory, record.content))
        texts = []
        for kind, verb in ((Kind.read, "reads"), (Kind.write, "writes")):
            of_kind = [r for r in records if r.kind is kind]
            if of_kind:
                texts.append(f"{verb} {self._names(of_kind)}")
        step = self._bare(Kind.read, records[0], " and ".join(texts))
        step.expects, step.puts = expects, puts
        return step

    def _names(self, records: Iterable[Record]) -> str:
        merged: list[tuple[int, int]] = []  # neighbours made one
        for at, size in sorted((r.at, r.bytes) for r in records):
            if merged and self.memory.same_region(*merged[-1], at):
                merged[-1] = (merged[-1][0], at + size - merged[-1][0])
            else:
                merged.append((at, size))
        return ", ".join(self.memory.name(at, size) for at, size in merged)

    def _fill_words(self, record: Record) -> Iterator[Step]:
        for at in range(record.at, record.at + record.bytes, WORD):
            yield self._step(replace(record, kind=Kind.raise_, at=at, bytes=0))

    def _bare(self, kind: Kind, record: Record, text: str) -> Step:
        stream = self.handles.index(record.stream)
        rank = self.recording.streams[record.stream][0]
        return Step(kind, stream, rank, record.call, record.tile, text)

    def _step(self, record: Record) -> Step:
        memory, kind = self.memory, record.kind
        step = self._bare(kind, record, "")
        if kind is Kind.copy:
            pairs = zip(
                memory.cells(record.from_, record.bytes),
                memory.cells(record.at, record.bytes),
                strict=True,
            )
            step.moves = tuple((source, target) for (source, _), (target, _) in pairs)
            source = memory.name(record.from_, record.bytes)
            step.text = f"copies {source} to {memory.name(record.at, record.bytes)}"
        elif kind is Kind.fill and record.content is not None:
            step.puts = symbols(memory, record.content)
            step.text = "the caller writes x anew"
        elif kind is Kind.fill:
            step.puts = {cell: POISON for cell, _ in memory.cells(record.at, record.bytes)}
            step.text = "fills the rank's buffers with NaN"
        elif kind in _VERBS:
            step.word = self.words.setdefault(record.at, len(self.words))
            step.value = record.value
            step.text = f"{_VERBS[kind]} {memory.word(record.at)}, epoch {record.value & MASK}"
        else:
            step.event = record.value
            if kind is Kind.event:
                step.text = f"records event {record.value}"
            else:
                step.text = f"waits for {self._stream(self.event_streams[record.value])}"
        return step

    def _stream(self, handle: int) -> str:
        rank, name = self.recording.streams[handle]
        return name if rank < 0 else f"rank {rank}, {name}"


def program_of(recording: Recording, blocks: int | None = None) -> Program:
    """The program of a recording; kernels run ``blocks`` tiles at once, by default all."""
    return _Builder(recording, blocks).build()

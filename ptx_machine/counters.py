"""What a kernel executed: by statement, by source line, and by role of its warps."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from ptx_machine._machine import CudaDevice, Module

_TALLY = struct.Struct("<4Q")  # struct Tally of src/machine.h

_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_TYPE = re.compile(r"(?:[busf]|bf)(8|16|32|64|128)(x2)?")
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")


@dataclass
class Work:
    """What warps did. Bytes and operations are of all their threads.

    Attributes:
        statements: executed by warps, or by parts of them that had diverged.
        instructions: executed by threads.
        global_loads, global_stores: bytes of ``ld`` and ``st``; so for ``shared_``, ``local_`` and,
            where the statement does not name a space, ``generic_``. ``ldmatrix`` and ``stmatrix``
            are of shared memory.
        copies: bytes of ``cp.async``.
        bulk_copies: bytes of ``cp.async.bulk``, ``st.async`` and ``red.async``.
        tensor_loads, tensor_stores: bytes of boxes that TMA copies or reduces; to each block of a
            multicast.
        multimem: bytes of ``multimem``, of one member.
        matrix_operations: ``mma.sync``, of a warp; ``wgmma``: of one of the four warps.
        flop: of these, two for a product and its sum.
        atomics, fences: of threads.
        barriers, mbarrier_waits: executed by warps; ``mbarrier_arrivals`` by threads.
        waiting: turns in which a warp could not go on.
    """

    statements: int = 0
    instructions: int = 0
    global_loads: int = 0
    global_stores: int = 0
    shared_loads: int = 0
    shared_stores: int = 0
    local_loads: int = 0
    local_stores: int = 0
    generic_loads: int = 0
    generic_stores: int = 0
    copies: int = 0
    bulk_copies: int = 0
    tensor_loads: int = 0
    tensor_stores: int = 0
    multimem: int = 0
    mma: int = 0
    wgmma: int = 0
    flop: int = 0
    atomics: int = 0
    fences: int = 0
    barriers: int = 0
    mbarrier_waits: int = 0
    mbarrier_arrivals: int = 0
    waiting: int = 0

    def __iadd__(self, other: Work) -> Work:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        return self

    def nonzero(self) -> dict[str, int]:
        """Return what is not zero, by name."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name))}


@dataclass
class Tally:
    """How often warps executed one statement: struct Tally of src/machine.h."""

    executed: int = 0
    threads: int = 0
    tries: int = 0
    bytes: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        self.executed += other.executed
        self.threads += other.threads
        self.tries += other.tries
        self.bytes += other.bytes
        return self


@dataclass
class Role:
    """Warps of a block that do the same kinds of things.

    Attributes:
        warps: their numbers in a block.
        does: what tells them from others, as in "tensor loads, mbarrier waits".
        work: of all of them, in all blocks.
    """

    warps: list[int]
    does: str
    work: Work

    @property
    def name(self) -> str:
        """Return "warp 0", "warps 0-3" or "warps 0, 2-3"."""
        return ("warp " if len(self.warps) == 1 else "warps ") + _ranges(self.warps)


@dataclass
class LineWork:
    """What was executed for one line of the source, or of the PTX where it has no source lines."""

    file: str
    line: int
    work: Work = field(default_factory=Work)


class Counters:
    """What a kernel executed.

    Attributes:
        module: what holds the kernel.
        kernel: its name.
        statements: executed by warps.
        instructions: executed by threads.
        blocks: that have run.
        launches: how many launches are counted together.
    """

    def __init__(self, module: Module, kernel: str, record: dict[str, Any]) -> None:
        self.module = module
        self.kernel = kernel
        self.statements: int = record["statements"]
        self.instructions: int = record["instructions"]
        self.blocks: int = record["blocks"]
        self.launches: int = record.get("launches", 1)
        self._warps: list[bytes] = record["warps"]

    @cached_property
    def tallies(self) -> list[list[Tally]]:
        """Return tallies by number of a warp in its block, and by statement of the kernel."""
        return [[Tally(*row) for row in _TALLY.iter_unpack(warp)] for warp in self._warps]

    @cached_property
    def _statements(self) -> list[tuple[str, int, str, int]]:
        return self.module.statements(self.kernel)

    def of_warp(self, number: int) -> Work:
        """Return what warps of this number in their blocks did."""
        total = Work()
        for (opcode, *_), tally in zip(self._statements, self.tallies[number], strict=True):
            if tally.executed or tally.tries:
                total += work_of(opcode, tally)
        return total

    @cached_property
    def work(self) -> Work:
        """Return what all warps did."""
        total = Work()
        for number in range(len(self._warps)):
            total += self.of_warp(number)
        return total

    @cached_property
    def roles(self) -> list[Role]:
        """Return warps by what they do: those that use the same units are one role."""
        roles: dict[tuple[str, ...], Role] = {}
        for number in range(len(self._warps)):
            work = self.of_warp(number)
            kinds = _kinds(work)
            if kinds not in roles:
                roles[kinds] = Role([], ", ".join(kinds) or "nothing but arithmetic", Work())
            roles[kinds].warps.append(number)
            roles[kinds].work += work
        return list(roles.values())

    def lines(self) -> list[LineWork]:
        """Return the work of each source line, most instructions first."""
        rows: dict[tuple[str, int], LineWork] = {}
        for number, (opcode, ptx_line, file, line) in enumerate(self._statements):
            total = Tally()
            for warp in self.tallies:
                total += warp[number]
            if not total.executed and not total.tries:
                continue
            key = (file, line) if line > 0 else ("", ptx_line)
            row = rows.setdefault(key, LineWork(*key))
            row.work += work_of(opcode, total)
        return sorted(rows.values(), key=lambda row: -row.work.instructions)

    def __repr__(self) -> str:
        return (
            f"Counters({self.kernel}: {self.statements} statements, "
            f"{self.instructions} instructions, {self.blocks} blocks)"
        )


def kernel_counters(device: CudaDevice) -> list[Counters]:
    """Return what each kernel executed that was launched since ``device.clear()``."""
    return [Counters(record["module"], record["kernel"], record) for record in device.records()]


def work_of(opcode: str, tally: Tally) -> Work:
    """Return what a statement did, by its opcode with all modifiers."""
    work = Work(statements=tally.executed, instructions=tally.threads, waiting=tally.tries)
    parts = opcode.split(".")
    name = parts[0]
    if "async" in parts and name in ("cp", "st", "red"):
        _add_copies(work, parts, tally)
    elif name in ("ld", "ldu", "st"):
        _add_access(work, parts, tally)
    elif name in ("ldmatrix", "stmatrix"):
        count = next(int(part[1]) for part in parts if part in ("x1", "x2", "x4"))
        side = "shared_loads" if name == "ldmatrix" else "shared_stores"
        setattr(work, side, 128 * count * tally.executed)
    elif name in ("mma", "wgmma"):
        _add_product(work, opcode, tally)
    elif name == "multimem":
        work.multimem = tally.threads * _width(parts)
    elif name in ("atom", "red"):
        work.atomics = tally.threads
    elif name in ("fence", "membar"):
        work.fences = tally.threads
    elif name in ("bar", "barrier") and "warp" not in parts:
        work.barriers = tally.executed
    elif name == "mbarrier" and parts[1] in ("try_wait", "test_wait"):
        work.mbarrier_waits = tally.executed
    elif name == "mbarrier" and parts[1] in ("arrive", "arrive_drop"):
        work.mbarrier_arrivals = tally.threads
    return work


def _add_copies(work: Work, parts: list[str], tally: Tally) -> None:
    if "tensor" in parts:
        # cp.async.bulk.tensor.2d.<target>.<source>; .prefetch copies nothing.
        first = next(part for part in parts if part == "global" or part.startswith("shared"))
        if first == "global":
            work.tensor_stores = tally.bytes
        else:
            work.tensor_loads = tally.bytes
    elif "bulk" in parts or parts[0] != "cp":
        work.bulk_copies = tally.bytes
    elif "mbarrier" in parts:
        work.mbarrier_arrivals = tally.threads
    else:
        work.copies = tally.bytes


def _add_access(work: Work, parts: list[str], tally: Tally) -> None:
    spaces = {"global": "global", "const": "", "param": "", "local": "local"}
    space = "generic"
    for part in parts[1:]:
        if part in spaces:
            space = spaces[part]
        elif part.startswith("shared"):
            space = "shared"
    if space:
        side = "stores" if parts[0] == "st" else "loads"
        setattr(work, f"{space}_{side}", tally.threads * _width(parts))


def _add_product(work: Work, opcode: str, tally: Tally) -> None:
    shape = _SHAPE.search(opcode)
    if shape is None:
        return  # wgmma.fence and the like
    m, n, k = (int(size) for size in shape.groups())
    if opcode.startswith("wgmma"):
        work.wgmma = tally.executed
        m //= 4  # rows of one warp
    else:
        work.mma = tally.executed
    work.flop = 2 * m * n * k * tally.executed


def _width(parts: Iterable[str]) -> int:
    """Return the bytes that a thread accesses."""
    width, count = 0, 1
    for part in parts:
        kind = _TYPE.fullmatch(part)
        if kind is not None:
            width = _WIDTHS[kind[1]] * (2 if kind[2] else 1)
        elif part in ("v2", "v4", "v8"):
            count = int(part[1])
    return width * count


_SHOWN = {
    "tensor_loads": "TMA loads",
    "tensor_stores": "TMA stores",
    "bulk_copies": "bulk copies",
    "copies": "cp.async",
    "wgmma": "wgmma",
    "mma": "mma.sync",
    "multimem": "multimem",
    "global_stores": "global stores",
    "atomics": "atomics",
    "mbarrier_waits": "mbarrier waits",
}


def _kinds(work: Work) -> tuple[str, ...]:
    return tuple(shown for name, shown in _SHOWN.items() if getattr(work, name))


def _ranges(numbers: list[int]) -> str:
    """Return "0, 2-3" for 0, 2 and 3."""
    rows: list[list[int]] = []
    for number in numbers:
        if rows and rows[-1][1] == number - 1:
            rows[-1][1] = number
        else:
            rows.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in rows)

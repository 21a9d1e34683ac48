"""A bug in the PTX of one of flux's kernels (seeded_bugs.py lists them)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flux import Knobs

KERNELS = {"gemm_ar": "gemm_rs", "dispatch": "ag_grouped_gemm", "combine": "grouped_gemm_rs"}
"""Kernels of ops, where they have another name."""


def _name(part: str) -> str:
    """Return the name of the kernel that a part of PTX begins with; empty: none."""
    entry = re.search(r"\.entry (\w+)", part)
    return "" if entry is None else entry.group(1)


@dataclass(frozen=True)
class Bug:
    """An edit of one kernel.

    Attributes:
        arch: of the kernels.
        op: that is called.
        kernel: a part of its name.
        pattern, change: a regular expression of the PTX text, and what comes in its place.
        error: what the message says.
        at: the statement that fails, its begin; of a deadlock, one that waits, and what for.
        number: which match is changed; None: all.
        rows: of the calls that each rank makes, one behind the other.
        captured: whether the calls are replays of a graph.
        reduce: the knob of the op.
        switch: whether ranks are behind an NVLink switch.
        crowded: whether kernels have more blocks than find room at once.
        puts: whether each rank is a node, which libflux_nvshmem connects.
        path: the knob of the op.
        tile_scheduler: the knob of the op.
        idle: whether kernels wait for what never comes: their own timeouts are not waited for.
    """

    arch: str
    op: str
    kernel: str
    pattern: str
    change: str
    error: str
    at: str
    number: int | None = None
    rows: tuple[int, ...] = (256,)
    captured: bool = False
    reduce: str = "local"
    switch: bool = False
    crowded: bool = False
    puts: bool = False
    idle: bool = False
    path: str = "fused"
    tile_scheduler: str = "static"

    @property
    def knobs(self) -> Knobs:
        """The knobs of the op."""
        if self.op == "ag_gemm":
            return Knobs(path=self.path, tile_scheduler=self.tile_scheduler)
        return Knobs(path=self.path, reduce=self.reduce, tile_scheduler=self.tile_scheduler)

    def edit(self, text: str) -> str:
        """Return the text with the bug, where it has the kernel."""
        parts = re.split(r"(?=^\.(?:visible|weak|entry))", text, flags=re.M)
        named = [part for part in parts if self.kernel in _name(part)]
        # A library may have kernels of several ops.
        kernel = f"flux_{KERNELS.get(self.op, self.op)}_sm"
        own = [part for part in named if kernel in _name(part)] or named
        return "".join(self._edit(part) if part in own else part for part in parts)

    def _edit(self, part: str) -> str:
        matches = list(re.finditer(self.pattern, part))
        assert matches, f"{self.kernel} has no {self.pattern}"
        chosen = matches if self.number is None else [matches[self.number]]
        for match in reversed(chosen):
            part = part[: match.start()] + match.expand(self.change) + part[match.end() :]
        return part

"""A bug in the PTX of one of flux's kernels (seeded_bugs.py lists them)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flux import Knobs


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
        return "".join(self._edit(part) if self._is_in(part) else part for part in parts)

    def _is_in(self, part: str) -> bool:
        name = re.search(r"\.entry (\w+)", part)
        return name is not None and self.kernel in name.group(1)

    def _edit(self, part: str) -> str:
        matches = list(re.finditer(self.pattern, part))
        assert matches, f"{self.kernel} has no {self.pattern}"
        chosen = matches if self.number is None else [matches[self.number]]
        for match in reversed(chosen):
            part = part[: match.start()] + match.expand(self.change) + part[match.end() :]
        return part

"""Count the pass's rewrites in this process, and log them in "flux.compile"."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

logger = logging.getLogger("flux.compile")


@dataclass
class Report:
    """Counts of collectives in the graphs that the pass has seen.

    A graph from PyTorch's cache of compiled code was rewritten when it was compiled, and is not
    counted again.

    Attributes:
        graphs: number of graphs; a training step has one forward and one backward.
        found: number of collectives, by collective ("all_gather", ...).
        fused: number of collectives that became ops of flux, by kind ("all_gather -> matmul", ...).
        left: number of collectives that were not rewritten, by collective and reason.
    """

    graphs: int = 0
    found: Counter[str] = field(default_factory=Counter)
    fused: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        total = sum(self.found.values())
        lines = [f"{self.graphs} graph(s), {total} collective(s), {sum(self.fused.values())} fused"]
        for title, counts in (("fused", self.fused), ("left", self.left)):
            lines += [f"  {title} {number:4d}  {what}" for what, number in counts.most_common()]
        return "\n".join(lines)


_report = Report()
_said: set[str] = set()


def report() -> Report:
    """Return the counts since the process began, or since ``clear_report()``."""
    return _report


def clear_report() -> None:
    """Reset the counts to zero."""
    global _report
    _report = Report()


def note_found(collective: str) -> None:
    """Count a collective of a graph."""
    _report.found[collective] += 1


def note_fused(kind: str) -> None:
    """Count a collective that has become part of an op."""
    _report.fused[kind] += 1


def note_left(collective: str, reason: str) -> None:
    """Count a collective that is not rewritten; log each reason once."""
    text = f"{collective}: {reason}"
    _report.left[text] += 1
    if text not in _said:
        _said.add(text)
        logger.info("not fused: %s", text)


def note_graph(fused: int, found: int) -> None:
    """Count a graph, and log its result."""
    _report.graphs += 1
    if found:
        logger.info("%d of %d collectives of a graph fused", fused, found)

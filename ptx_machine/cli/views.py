"""What the command prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from ptx_machine.counters import Counters, Work

PLAIN: dict[str, Any] = {
    "highlight": False,
    "soft_wrap": True,
    "markup": False,
}  # one line stays one

_BYTES = (
    "global_loads",
    "global_stores",
    "shared_loads",
    "shared_stores",
    "local_loads",
    "local_stores",
    "generic_loads",
    "generic_stores",
    "copies",
    "bulk_copies",
    "tensor_loads",
    "tensor_stores",
    "multimem",
)


def complain(message: str) -> None:
    """Print an error to stderr."""
    console = Console(stderr=True)
    console.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)


def show_tensor(console: Console, name: str, tensor: Any) -> None:
    """Print type, shape and values of a tensor."""
    values = str(tensor).replace("\n", "\n  ")
    kind = str(tensor.dtype).removeprefix("torch.")
    console.print(f"{name}: {kind}{list(tensor.shape)}\n  {values}", **PLAIN)


def show_counters(console: Console, counters: Counters, lines: int) -> None:
    """Print a table by role of warps, and one of the source lines with the most instructions."""
    launches = f", {counters.launches} launches" if counters.launches > 1 else ""
    console.print(
        f"{counters.kernel}\n{counters.blocks} blocks{launches}, {counters.statements:,} statements"
        f" of warps, {counters.instructions:,} instructions of threads",
        **PLAIN,
    )
    roles = counters.roles
    table = Table(title="What warps did", title_justify="left")
    table.add_column("")
    for role in roles:
        table.add_column(f"{role.name}\n{role.does}", justify="right")
    names: dict[str, None] = {}
    for role in roles:
        names |= dict.fromkeys(role.work.nonzero())
    total = counters.work.nonzero()
    for name in (name for name in total if name in names):
        unit = ", bytes" if name in _BYTES else ""
        row = [f"{getattr(role.work, name):,}" for role in roles]
        table.add_row(name.replace("_", " ") + unit, *row)
    console.print(table)
    hot = counters.lines()[:lines]
    if not hot:
        return
    table = Table(title="Lines with the most instructions", title_justify="left")
    for column in ("line", "instructions", "share", "waiting"):
        table.add_column(column, justify="left" if column == "line" else "right")
    for line in hot:
        place = f"{Path(line.file).name}:{line.line}" if line.file else f"PTX:{line.line}"
        count = line.work.instructions
        share = f"{count / max(1, counters.instructions):.1%}"
        table.add_row(place, f"{count:,}", share, f"{line.work.waiting:,}")
    console.print(table)


def as_json(counters: Counters) -> dict[str, Any]:
    """Return counters as JSON: in sum, by role, by source line."""

    def plain(work: Work) -> dict[str, int]:
        return work.nonzero()

    return {
        "kernel": counters.kernel,
        "launches": counters.launches,
        "blocks": counters.blocks,
        "statements": counters.statements,
        "instructions": counters.instructions,
        "roles": [
            {"warps": role.warps, "does": role.does, "work": plain(role.work)}
            for role in counters.roles
        ],
        "lines": [
            {"file": row.file, "line": row.line, "work": plain(row.work)}
            for row in counters.lines()
        ],
    }

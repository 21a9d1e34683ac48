"""What files of profiles and schedules say about an operator, checked as it is read."""

from __future__ import annotations

from flux.core.datafile import Table
from flux.plan.graph import COLLECTIVES, COMPUTE, FUSED, GROUPS
from flux.plan.mesh import parse_group

_SIZES = {"gemm": 3, "attention": 5, **dict.fromkeys(FUSED, 3)}
"""Numbers in the shape of a compute operator; others have 3, collectives 2 (``graph.Op``)."""


def read_kind(table: Table) -> str:
    """Return the kind of an operator."""
    return table.text("kind", choices=(*COMPUTE, *COLLECTIVES))


def read_shape(table: Table, kind: str) -> tuple[int, ...]:
    """Return the shape of an operator of this kind; fail if it has another number of sizes."""
    shape = table.integers("shape")
    count = 2 if kind in COLLECTIVES else _SIZES.get(kind, 3)
    if len(shape) != count:
        table.fail("shape", f"expected {count} sizes of {kind}, got {list(shape)}")
    return shape


def read_group(table: Table, kind: str) -> str:
    """Return the group of a collective or fused op, or a part of one; others have none: ``""``."""
    group = table.text("group")
    if kind in COLLECTIVES or kind in FUSED:
        try:
            base = parse_group(group).base
        except ValueError as error:
            table.fail("group", str(error))
        if base not in GROUPS:
            table.fail("group", f"expected one of {', '.join(GROUPS)}, got {group!r}")
    elif group:
        table.fail("group", f"{kind} has none, got {group!r}")
    return group

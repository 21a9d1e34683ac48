"""Pieces of a collective in Centauri, by group and by chunk (ASPLOS 2024, section 3.1)."""

from __future__ import annotations

from typing import NamedTuple


def meshes(size: int, per_host: int) -> list[tuple[int, ...]]:
    """Return the meshes [hosts, ranks of a host] of a group whose sub-groups have equal links.

    A finer mesh inside a host, or between hosts, breaks the rings that a library has laid there, so
    there is one at most (section 3.1.2).
    """
    if per_host < 1 or size % per_host or per_host in (1, size):
        return []
    return [(size // per_host, per_host)]


class CommPiece(NamedTuple):
    """One of the collectives that take the place of one.

    Attributes:
        where: ``whole`` group, or its ``inter`` or ``intra`` sub-groups.
        volume: size of its whole tensor, as a fraction of the collective's.
        behind: numbers of pieces that it needs.
        brings: fraction of the result that is there with it. Of a ReduceScatter: fraction of the
            input that it needs.
    """

    where: str
    volume: float
    behind: tuple[int, ...] = ()
    brings: float = 0.0


WHOLE = (CommPiece("whole", 1.0, (), 1.0),)


def even(chunks: int) -> tuple[CommPiece, ...]:
    """Return equal chunks of a collective, which do not depend on each other."""
    return tuple(CommPiece("whole", 1 / chunks, (), 1 / chunks) for _ in range(chunks))


def even_by_group(kind: str, chunks: int, intra: int) -> tuple[CommPiece, ...]:
    """Return equal chunks, each a collective between hosts and one inside.

    Between hosts each rank has 1 / intra of the volume. AllGather goes between hosts first, and
    ReduceScatter inside first, so that nothing crosses twice.
    """
    pieces: list[CommPiece] = []
    inter, whole = 1 / (chunks * intra), 1 / chunks
    for chunk in range(chunks):
        first = (2 * chunk,)
        if kind == "all_gather":
            pieces += [CommPiece("inter", inter), CommPiece("intra", whole, first, whole)]
        else:
            pieces += [CommPiece("intra", whole, (), whole), CommPiece("inter", inter, first)]
    return tuple(pieces)


def uneven_by_group(
    fractions: int, inter_first: bool, inter: int, intra: int
) -> tuple[CommPiece, ...]:
    """Return an AllGather by groups in 2 or 3 unequal parts, as Algorithm 1 has them."""
    world = inter * intra
    if inter_first:
        return (
            CommPiece("inter", 1 / intra, (), inter / world),
            CommPiece("intra", 1.0, (0,), 1 - inter / world),
        )
    own = CommPiece("intra", 1 / inter, (), intra / world)
    if fractions == 2:  # hosts exchange what they have gathered: intra times the volume
        return own, CommPiece("inter", 1.0, (0,), 1 - intra / world)
    return (
        own,
        CommPiece("inter", 1 / intra, (), (inter - 1) / world),
        CommPiece("intra", (inter - 1) / inter, (1,), 1 - (inter + intra - 1) / world),
    )

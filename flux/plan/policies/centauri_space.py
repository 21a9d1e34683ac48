"""Centauri's partition space (C. Chen et al., ASPLOS 2024, section 3.1).

Three dimensions, in this order: primitives that take the place of a collective, sub-groups of its
ranks, and chunks of its workload together with the operators that depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

_SCALABLE = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "reduce_scatter": ("reduces",),
    "all_gather": ("broadcasts",),
}
"""Primitives that together do what a collective does, of Table 2 those in which no root sends or
receives everything; ``reduces`` and ``broadcasts`` are those of all roots."""


def substitutions(kind: str, price: Callable[[str], float]) -> list[tuple[str, ...]]:
    """Return the primitives that may take the place of a collective, itself included.

    Those that do not scale, and those that take longer than the collective, are left out (section
    3.1.1). What the library does badly is among these: gloo's ReduceScatter is an AllReduce inside.

    ``price`` returns the time of a primitive of the same tensor among the same ranks.
    """
    primitives = _SCALABLE.get(kind, ())
    pays = primitives and sum(map(price, primitives)) <= price(kind) * (1 + 1e-9)
    return [(kind,), primitives] if pays else [(kind,)]


def meshes(size: int, per_host: int) -> list[tuple[int, ...]]:
    """Return the meshes [hosts, ranks of a host] of a group whose sub-groups have equal links.

    A finer mesh inside a host, or between hosts, breaks the rings that a library has laid there, so
    there is one at most (section 3.1.2).
    """
    if per_host < 1 or size % per_host or per_host in (1, size):
        return []
    return [(size // per_host, per_host)]


# -- workload --------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """A way to cut an operator (Table 3).

    Attributes:
        name: A, B or C: of a matrix product [A, B] x [B, C], or of an operator on [A, B].
        takes: which dimension of the input a piece needs; None: all of it.
        gives: which dimension of the output a piece makes; None: a part of a sum over all of it.
    """

    name: str
    takes: int | None
    gives: int | None


AXES: dict[str, tuple[Axis, ...]] = {
    "matmul": (Axis("A", 0, 0), Axis("B", 1, None), Axis("C", None, 1)),
    "elementwise": (Axis("A", 0, 0), Axis("B", 1, 1)),
    "rowwise": (Axis("A", 0, 0),),
}
"""``rowwise``: SwiGLU, softmax and LayerNorm, which need whole rows."""


class Chain(NamedTuple):
    """Dependent operators that are cut alike.

    Attributes:
        axes: how each is cut, from the first one on.
        cost: of all of them.
        reduces: whether the last one leaves partial sums, which must be added.
    """

    axes: tuple[str, ...]
    cost: float
    reduces: bool


def chains(kinds: Sequence[str], costs: Sequence[float], arrives: int | None = 0) -> list[Chain]:
    """Return all chains from the first operator on whose cuts are compatible.

    An operator's piece must need no more than pieces before it have made. A product that is cut
    along its contraction leaves sums, so the chain ends there.

    ``kinds`` are keys of AXES, each operator the next one's input. ``arrives`` is the dimension of
    the first one's input that a chunk of the collective brings: 0 rows. None: it brings weights, so
    the first one must be cut along C.
    """
    if len(kinds) != len(costs):
        raise ValueError(f"{len(kinds)} operators have {len(costs)} costs")
    for kind in kinds:
        if kind not in AXES:
            raise ValueError(f"kind must be one of {', '.join(AXES)}, got {kind!r}")
    candidates: list[Chain] = []
    open_chains: list[tuple[tuple[str, ...], int | None]] = [((), arrives)]
    cost = 0.0
    for kind, own in zip(kinds, costs, strict=True):
        cost += own
        grown: list[tuple[tuple[str, ...], int | None]] = []
        for names, has in open_chains:
            for axis in AXES[kind]:
                if axis.takes != has:
                    continue
                chain = (*names, axis.name)
                candidates.append(Chain(chain, cost, axis.gives is None))
                if axis.gives is not None:
                    grown.append((chain, axis.gives))
        open_chains = grown
    return candidates


def choose_chain(candidates: Sequence[Chain], comm: float, independent: float) -> Chain | None:
    """Return the shortest chain that hides a collective, or else the longest one.

    A chain hides it if its cost, and that of independent operators, are not less than the
    collective's. Of equally long ones, one without partial sums is preferred (section 3.1.3).
    """
    if not candidates:
        return None
    enough = [chain for chain in candidates if chain.cost + independent >= comm]
    if enough:
        return min(enough, key=lambda chain: (len(chain.axes), chain.reduces))
    return min(candidates, key=lambda chain: (-len(chain.axes), chain.reduces))


# -- pieces of a collective ------------------------------------------------------------------------


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
    for chunk in range(chunks):
        inter, intra_piece = 1 / (chunks * intra), 1 / chunks
        if kind == "all_gather":
            pieces.append(CommPiece("inter", inter))
            pieces.append(CommPiece("intra", intra_piece, (2 * chunk,), 1 / chunks))
        else:
            pieces.append(CommPiece("intra", intra_piece, (), 1 / chunks))
            pieces.append(CommPiece("inter", inter, (2 * chunk,)))
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

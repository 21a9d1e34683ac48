"""Sub-groups of a group of ranks: the group as a mesh of d dimensions.

C. Chen et al., Centauri (ASPLOS 2024), section 3.1.2. With a mesh [N1, ..., Nd] rank r of a group
has the index (r // (N_{k+1} * ... * N_d)) % N_k in dimension k. Its sub-group along a dimension
holds the ranks that differ from it in that dimension alone:

    mesh [2, 4]     dimension 0: 0 4 | 1 5 | 2 6 | 3 7        dimension 1: 0 1 2 3 | 4 5 6 7

In plans a sub-group is named by its group, the mesh and the dimension: ``dp:2x4.1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import NamedTuple

from flux.core.problem import checked_integer


class SubGroup(NamedTuple):
    """A group of a plan, or a part of one.

    Attributes:
        base: the group, as in ``dp``.
        mesh: its sizes; empty: the whole group.
        dim: the dimension in which the ranks of the part differ.
    """

    base: str
    mesh: tuple[int, ...] = ()
    dim: int = 0

    @property
    def name(self) -> str:
        """The name in plans."""
        return f"{self.base}:{'x'.join(map(str, self.mesh))}.{self.dim}" if self.mesh else self.base

    @property
    def size(self) -> int:
        """Ranks of the part; 0 of a whole group, whose size a name does not say."""
        return self.mesh[self.dim] if self.mesh else 0

    @property
    def stride(self) -> int:
        """From a rank of the part to the next one, in numbers of the group."""
        return prod(self.mesh[self.dim + 1 :])

    def split(self, sizes: Sequence[int]) -> list[SubGroup]:
        """Return the parts along each of ``sizes``, the slowest first."""
        if not self.mesh:
            return [SubGroup(self.base, tuple(sizes), dim) for dim in range(len(sizes))]
        if prod(sizes) != self.size:
            raise ValueError(f"{self.name}: {list(sizes)} is no mesh of {self.size} ranks")
        mesh = (*self.mesh[: self.dim], *sizes, *self.mesh[self.dim + 1 :])
        return [SubGroup(self.base, mesh, self.dim + number) for number in range(len(sizes))]


@cache
def parse_group(name: str) -> SubGroup:
    """Return what the name of a group in a plan says."""
    base, colon, rest = name.partition(":")
    if not colon:
        return SubGroup(base)
    sizes, dot, dim = rest.partition(".")
    parts = sizes.split("x")
    if not dot or not all(text.isascii() and text.isdigit() for text in (*parts, dim)):
        raise ValueError(f"a part of a group must look like dp:2x4.1, got {name!r}")
    group = SubGroup(base, tuple(map(int, parts)), int(dim))
    if min(group.mesh) < 1 or group.dim >= len(group.mesh):
        raise ValueError(f"a part of a group must look like dp:2x4.1, got {name!r}")
    return group


def group_partition(mesh: Sequence[int], rank: int) -> list[list[int]]:
    """Return a rank's sub-groups, one for each dimension of the mesh.

    Returns:
        For each dimension the ranks that differ from ``rank`` in it alone, ascending.
    """
    sizes = [checked_integer("each size of a mesh", size, 1) for size in mesh]
    if not sizes:
        raise ValueError("mesh must be integers of at least 1, got []")
    rank = checked_integer(f"rank in mesh {sizes}", rank, 0, prod(sizes))
    groups = []
    for dim, size in enumerate(sizes):
        stride = prod(sizes[dim + 1 :])
        first = rank - (rank // stride % size) * stride
        groups.append([first + place * stride for place in range(size)])
    return groups

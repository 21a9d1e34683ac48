"""One op at one M: its sizes and the shapes of its tensors. Needs only the standard library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flux.core.datafile import MOST_SIZE
from flux.core.dtypes import DTYPES
from flux.core.integers import ceil_div
from flux.core.knobs import Op

if TYPE_CHECKING:
    import torch

MOST_WORLD = 65_536
"""Ranks of a group; more take too long to plan for."""
ACTIVATIONS = ("none", "gelu", "silu")
SCALINGS = ("none", "tensor", "row")
"""Factors of float8 operands: one per tensor, or one per row of x and of the weight's [N, K]."""


@dataclass(frozen=True)
class Problem:
    """One op at one global shape, as it is modelled, tuned and measured.

    ``flux.core.spec.OpSpec`` is what an op is constructed with, for all M up to a largest one;
    ``flux.kernels.legality.GemmProblem`` is the GEMM of one rank.

    The shapes of x, weight and result are those of one rank:

    op       x            weight     result
    ag_gemm  [own, K]     [N/W, K]   [M, N/W]
    gemm_rs  [M, K/W]     [N, K/W]   [own, N]
    gemm_ar  [M, K/W]     [N, K/W]   [M, N]

    Every extent S that is divided by W is divided as rows are: rank r has [r*ceil(S/W), min(S,
    (r+1)*ceil(S/W))).

    Attributes:
        op: the fused op.
        m: global rows.
        n: global columns, of all weights together.
        k: global depth, in elements.
        dtype: of x and the weight, as torch names it.
        world: number of ranks.
        nodes: number of hosts of the ranks.
        itemsize: bytes of an element of the communicated matrix.
        row_elements: elements of a communicated row: of the input (AllGather) or of the result.
        row_bytes: bytes of a communicated row, without scales.
        chunk: rows of the largest shard, ceil(M/W).
        local: columns and depth of the largest local GEMM: that of rank 0.
    """

    op: Op
    m: int
    n: int
    k: int
    dtype: str
    world: int
    nodes: int = 1
    itemsize: int = field(init=False, repr=False, compare=False)
    row_elements: int = field(init=False, repr=False, compare=False)
    row_bytes: int = field(init=False, repr=False, compare=False)
    chunk: int = field(init=False, repr=False, compare=False)
    local: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "world", "nodes"):
            value, most = (
                getattr(self, name),
                MOST_WORLD if name in ("world", "nodes") else MOST_SIZE,
            )
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
            if value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        n, k, world, dtype = self.n, self.k, self.world, DTYPES[self.dtype]
        if self.op.gathers:
            itemsize, elements, local = dtype.itemsize, k, (ceil_div(n, world), k)
        else:
            itemsize, elements, local = dtype.of_result.itemsize, n, (n, ceil_div(k, world))
        vars(self).update(
            itemsize=itemsize,
            row_elements=elements,
            row_bytes=itemsize * elements,
            chunk=ceil_div(self.m, world),
            local=local,
        )

    def as_dict(self) -> dict[str, object]:
        """Return op, sizes, dtype and world, for JSON."""
        names = ("m", "n", "k", "dtype", "world")
        return {"op": self.op.name, **{name: getattr(self, name) for name in names}}

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return DTYPES[self.dtype].torch

    def share(self, size: int, rank: int) -> tuple[int, int]:
        """Return [begin, end) of ``size`` that belongs to ``rank``; may be empty."""
        chunk = ceil_div(size, self.world)
        begin = min(size, rank * chunk)
        return begin, min(size, begin + chunk)

    def rows(self, rank: int) -> tuple[int, int]:
        """Return the rows [begin, end) that ``rank`` owns; may be empty."""
        return self.share(self.m, rank)

    def x_shape(self, rank: int) -> tuple[int, int]:
        """Return the shape of x on ``rank``."""
        if self.op.gathers:
            begin, end = self.rows(rank)
            return (end - begin, self.k)
        begin, end = self.share(self.k, rank)
        return (self.m, end - begin)

    def weight_shape(self, rank: int) -> tuple[int, int]:
        """Return the shape of the weight on ``rank``: columns and depth of its GEMM."""
        if self.op.gathers:
            begin, end = self.share(self.n, rank)
            return (end - begin, self.k)
        begin, end = self.share(self.k, rank)
        return (self.n, end - begin)

    def result_shape(self, rank: int) -> tuple[int, int]:
        """Return the shape of the result on ``rank``."""
        begin, end = self.rows(rank)
        rows = end - begin if self.op.scatters else self.m
        return (rows, self.weight_shape(rank)[0])

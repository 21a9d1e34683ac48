"""One op at one M: its sizes, the shapes of its tensors, and the table of element types.

This module uses only the standard library, so that builds, which have no torch, can import it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flux.core.datafile import MOST_SIZE
from flux.core.knobs import Op

if TYPE_CHECKING:
    import torch

MOST_WORLD = 65_536
"""Ranks of a group; more take too long to plan for."""
ACTIVATIONS = ("none", "gelu", "silu")
SCALINGS = ("none", "tensor", "row")
"""Factors of float8 operands: one per tensor, or one per row of x and of the weight's [N, K]."""


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer not below a / b, for positive b."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below a."""
    return ceil_div(a, multiple) * multiple


def checked_integer(name: str, value: Any, least: int, end: int | None = None) -> int:
    """Return an argument as an int. Integers of numpy and torch are integers, booleans are not.

    Args:
        name: of the argument, for the message.
        value: the argument.
        least: smallest value.
        end: smallest value that is too large.

    Raises:
        ValueError: it is no integer, or out of range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (end is not None and number >= end):
        wanted = f"of at least {least}" if end is None else f"in [{least}, {end})"
        raise ValueError(f"{name} must be an integer {wanted}, got {value!r}")
    return number


def check_choice(name: str, value: object, known: Iterable[str]) -> None:
    """Raise ValueError unless an argument is one of the known names."""
    names = list(known)
    if value not in names:
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {value!r}")


@dataclass(frozen=True)
class Dtype:
    """One element type.

    Attributes:
        name: as torch names it.
        short: name in kernels, and on the command line.
        itemsize: bytes of an element.
        result: dtype of results, partials and biases of an op with these operands.
        native: code in csrc/cpu/reduce.h; None if the CPU backend cannot sum it.
        in_kernels: whether CUDA kernels multiply it.
    """

    name: str
    short: str
    itemsize: int
    result: str
    native: int | None = None
    in_kernels: bool = False

    @property
    def torch(self) -> torch.dtype:
        """The dtype as torch's."""
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("float64", "fp64", 8, "float64", native=0),
        Dtype("float32", "fp32", 4, "float32", native=1),
        Dtype("bfloat16", "bf16", 2, "bfloat16", native=2, in_kernels=True),
        Dtype("float16", "fp16", 2, "float16", native=3, in_kernels=True),
        Dtype("float8_e4m3fn", "e4m3", 1, "bfloat16", in_kernels=True),
    )
}
"""All dtypes of operands, by name."""

ACTIVATION_DTYPES = tuple(dtype.name for dtype in DTYPES.values() if dtype.native is not None)
"""Dtypes of a model's activations: of float8 are operands of GEMMs only, with scales."""

SCALED = "float8_e4m3fn"
"""The dtype of operands that have scales."""
SCALE_SIZES = ("scaling", "fast_accum")

BY_SHORT = {dtype.short: dtype for dtype in DTYPES.values()}


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


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
        experts: weights, of which each multiplies an equal share of the rows.
        topk: rows of a token, of which each has another expert: m counts all of them, and one
            travels: the token, or the sum of its rows.
        scaling: of float8: ``tensor`` (also if open) or ``row``; "" of other dtypes.
        fast_accum: of float8, as ``flux.AGGemm`` takes it.
        travels: share of the rows that go to another host, or on one host to another rank.
        itemsize: bytes of an element of the communicated matrix.
        row_elements: elements of a communicated row: of the input (AllGather) or of the result.
        row_bytes: bytes that travel for a row, without its scale, on average.
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
    experts: int = 1
    topk: int = 1
    scaling: str = ""
    fast_accum: bool = False
    travels: float = field(default=1.0, repr=False)
    itemsize: int = field(init=False, repr=False, compare=False)
    row_elements: int = field(init=False, repr=False, compare=False)
    row_bytes: float = field(init=False, repr=False, compare=False)
    chunk: int = field(init=False, repr=False, compare=False)
    local: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "world", "nodes", "experts", "topk"):
            value, most = (
                getattr(self, name),
                MOST_WORLD if name in ("world", "nodes") else MOST_SIZE,
            )
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
            if value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")
        if self.topk > self.experts or self.m % self.topk:
            raise ValueError(
                f"topk must be at most experts = {self.experts} and divide m = {self.m}, got "
                f"{self.topk}"
            )
        check_choice("dtype", self.dtype, DTYPES)
        self._settle_scaling()
        n, k, world, dtype = self.n, self.k, self.world, DTYPES[self.dtype]
        if self.op.gathers:
            itemsize, elements, local = dtype.itemsize, k, (ceil_div(n, world), k)
        else:
            itemsize, elements, local = DTYPES[dtype.result].itemsize, n, (n, ceil_div(k, world))
        share = self.travels / self.topk
        vars(self).update(
            itemsize=itemsize,
            row_elements=elements,
            row_bytes=itemsize * elements * share if share < 1 else itemsize * elements,
            chunk=ceil_div(self.m, world),
            local=local,
        )

    def _settle_scaling(self) -> None:
        """Set ``scaling`` if it is open; raise ValueError if the dtype does not have it."""
        scaled = self.dtype == SCALED
        scaling = self.scaling or ("tensor" if scaled else "none")
        if scaling not in (SCALINGS[1:] if scaled else SCALINGS[:1]):
            choices = ", ".join(SCALINGS[1:]) if scaled else "none"
            raise ValueError(f"scaling of {self.dtype} must be {choices}, got {scaling!r}")
        vars(self).update(scaling=scaling if scaled else "")
        if type(self.fast_accum) is not bool or (self.fast_accum and not scaled):
            raise ValueError(
                f"fast_accum is for {SCALED}, and must be true or false; got {self.fast_accum!r} "
                f"with {self.dtype}"
            )

    def as_dict(self) -> dict[str, object]:
        """Return op, sizes, dtype and world, for JSON."""
        names = ["m", "n", "k", "dtype", "world"] + ["experts", "topk"] * (self.experts > 1)
        return {"op": self.name, **{name: getattr(self, name) for name in names}, **self.scales}

    @property
    def name(self) -> str:
        """Name of the op."""
        return self.op.name

    @property
    def lanes(self) -> int:
        """Ranks of a host."""
        return ceil_div(self.world, self.nodes)

    @property
    def sparse(self) -> bool:
        """Whether this is an op of experts or heads: a ``SparseProblem``."""
        return False

    @property
    def scales(self) -> dict[str, Any]:
        """The constructor's arguments about scales; of float8 only."""
        fast = {"fast_accum": True} if self.fast_accum else {}
        return {} if not self.scaling else {"scaling": self.scaling, **fast}

    @property
    def variant(self) -> str:
        """What distinguishes winners beside n, k and dtype: ``row`` or ``row-fast`` of float8."""
        fast = "-fast" if self.fast_accum else ""
        return "" if not self.scaling else f"{self.scaling}{fast}"

    @property
    def sizes(self) -> dict[str, Any]:
        """What ``make_problem`` takes beside m, n, k and dtype."""
        return self.scales

    @property
    def dense(self) -> Problem:
        """The op that cost models take: see ``SparseProblem``."""
        return self

    @property
    def scheduled(self) -> Problem:
        """The op that schedules are made for: see ``SparseProblem``."""
        return self

    @property
    def weight_elements(self) -> int:
        """Elements of the weights of all ranks."""
        return self.n * self.k

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return DTYPES[self.dtype].torch

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of results and partials, as torch's."""
        return DTYPES[DTYPES[self.dtype].result].torch

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

"""The part of an op's construction that all ranks must agree on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flux import _C
from flux.core.knobs import Knobs, Op, OpRow
from flux.core.problem import ACTIVATIONS, SCALINGS, ceil_div
from flux.core.problem import DTYPES as DTYPES_BY_NAME

DTYPES = {dtype.torch: dtype for dtype in DTYPES_BY_NAME.values()}
"""The table of element types, by torch's dtype."""
_RESULTS = {dtype: getattr(torch, row.result) for dtype, row in DTYPES.items()}

FP8 = torch.float8_e4m3fn

GROUPED_LABELS: dict[OpRow, tuple[str, ...]] = {
    Op.ag_gemm: ("AGGroupedGemm", "DispatchGroupedGemm"),
    Op.gemm_rs: ("GroupedGemmRS", "GroupedGemmCombine"),
    Op.gemm_ar: ("GroupedGemmAR",),
}
"""Class names of the ops of a mixture of experts, the second one if it ``dispatches``."""

SCALE_BYTES = torch.float32.itemsize
MAX_SIZE = 2**30
"""Largest M, N or K. Twice as much must fit the 32-bit integers of csrc/core."""


@dataclass(frozen=True)
class OpSpec:
    """What an op is constructed with, for all M up to ``max_m``; ranks must agree on it.

    ``flux.core.problem.Problem`` is one op at one M, with the number of ranks.

    ``n`` and ``k`` are global sizes, in elements. ``dtype`` is that of x and the weights:
    float8_e4m3fn with a ``scaling`` other than ``none``.

    A mixture of experts has ``experts`` (None: one dense weight), of which each token chooses
    ``topk``; groups of W/``ep`` ranks have equal parts of them, and divide n or k. ``gated``: the
    activation of one half of a product's columns multiplies the other half. ``dispatches``: tokens
    travel only to, or from, ranks with one of their experts.

    All-to-all: ``heads`` of ``head_dim`` elements, one number for each tensor whose heads are
    packed into n or k (queries, keys, values), which the ranks share. ``heads_first``: tensors are
    [batch, heads, sequence, head_dim], else [batch, sequence, heads, head_dim].

    Attributes that follow from the arguments:
        label: the class name, for messages.
        plain: whether results are just the product (and a bias) in the dtype of the operands.
        out_dtype: dtype of results, partials and biases.
        row_elements: elements of a communicated row: of the input (AllGather) or of the result.
        itemsize: bytes of an element of the communicated matrix.
        scales_travel: whether a row of x is sent with its float32 scale.
        travelling_row: elements and dtype of a communicated row as the transport sees it: bytes if
            its scale travels with it.
    """

    op: OpRow
    max_m: int
    n: tuple[int, ...]
    k: int
    dtype: torch.dtype
    transpose_weight: bool
    reduce: str
    activation: str = "none"
    scaling: str = "none"
    fast_accum: bool = False
    experts: int | None = None
    topk: int = 0
    ep: int = 1
    gated: bool = False
    heads: tuple[int, ...] = ()
    head_dim: int = 0
    heads_first: bool = True
    dispatches: bool = False
    label: str = field(init=False, repr=False, compare=False)
    plain: bool = field(init=False, repr=False, compare=False)
    out_dtype: torch.dtype = field(init=False, repr=False, compare=False)
    row_elements: int = field(init=False, repr=False, compare=False)
    itemsize: int = field(init=False, repr=False, compare=False)
    scales_travel: bool = field(init=False, repr=False, compare=False)
    travelling_row: tuple[int, torch.dtype] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        labels = (self.op.label,) if self.experts is None else GROUPED_LABELS[self.op]
        vars(self).update(label=labels[self.dispatches])
        if self.dtype not in DTYPES:
            names = ", ".join(DTYPES_BY_NAME)
            raise TypeError(f"{self.label}: dtype must be one of {names}, got {self.dtype}")
        for name, choices in (("activation", ACTIVATIONS), ("scaling", SCALINGS)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"{self.label}: {name} must be one of {', '.join(choices)}, got {value!r}"
                )
        if (self.dtype == FP8) != (self.scaling != "none"):
            raise ValueError(
                f"{self.label}: float8_e4m3fn needs scaling = tensor or row, and other dtypes "
                f"none; got {self.dtype} with scaling = {self.scaling}"
            )
        if type(self.fast_accum) is not bool or (self.fast_accum and self.dtype != FP8):
            raise ValueError(
                f"{self.label}: fast_accum is for float8_e4m3fn, and must be True or False; "
                f"got {self.fast_accum!r} with {self.dtype}"
            )
        if self.op.exchanges:
            self._check_heads()
        sizes = {"max_m": (self.max_m,), "n": self.n, "k": (self.k,)}
        for name, values in sizes.items():
            if not values or not all(type(v) is int and 1 <= v <= MAX_SIZE for v in values):
                raise ValueError(
                    f"{self.label}: {name} must be a positive integer up to {MAX_SIZE}, "
                    f"got {values if len(values) != 1 else values[0]!r}"
                )
        if (not self.op.gathers or self.experts is not None) and len(self.n) != 1:
            raise ValueError(f"{self.label}: n must be one size, got {self.n}")
        if self.experts is not None:
            self._check_experts()
        if self.reduce not in ("sum", "avg"):
            raise ValueError(f"{self.label}: reduce must be 'sum' or 'avg', got {self.reduce!r}")
        out_dtype = _RESULTS[self.dtype]
        travels, elements = (self.dtype, self.k) if self.op.gathers else (out_dtype, self.n[0])
        row = (elements, travels)
        if scales_travel := self.op.gathers and self.scaling == "row":
            row = (elements * travels.itemsize + SCALE_BYTES, torch.uint8)
        vars(self).update(
            plain=self.scaling == "none" and self.activation == "none" and not self.gated,
            out_dtype=out_dtype,
            row_elements=elements,
            itemsize=travels.itemsize,
            scales_travel=scales_travel,
            travelling_row=row,
        )

    def _check_experts(self) -> None:
        """Raise for sizes of a mixture of experts that no group of ranks can serve."""
        for name in ("experts", "topk", "ep"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_SIZE:
                raise ValueError(
                    f"{self.label}: {name} must be a positive integer up to {MAX_SIZE}, got "
                    f"{value!r}"
                )
        assert self.experts is not None
        if self.activation != "none" and not self.op.gathers:
            raise ValueError(
                f"{self.label}: activation and gated are for ops that gather; got "
                f"activation = {self.activation}"
            )
        if self.topk > self.experts or self.ep > self.experts:
            raise ValueError(
                f"{self.label}: topk and ep must be at most experts = {self.experts}, got "
                f"topk = {self.topk}, ep = {self.ep}"
            )
        if type(self.gated) is not bool or (self.gated and self.activation == "none"):
            raise ValueError(
                f"{self.label}: gated must be True or False, and needs an activation; got "
                f"{self.gated!r} with activation = {self.activation}"
            )

    def _check_heads(self) -> None:
        """Raise for heads that do not make up the packed dimension."""
        valid = all(type(v) is int and 1 <= v <= MAX_SIZE for v in (*self.heads, self.head_dim))
        if not self.heads or not valid:
            raise ValueError(
                f"{self.label}: heads and head_dim must be positive integers, got {self.heads} and "
                f"{self.head_dim!r}"
            )
        packed = sum(self.heads) * self.head_dim
        name, size = ("n", self.n[0]) if self.op.name == "gemm_all_to_all" else ("k", self.k)
        if size != packed:
            raise ValueError(
                f"{self.label}: {name} must be heads * head_dim = {packed}, got {size}"
            )
        if self.dtype == FP8:
            raise ValueError(f"{self.label}: float8 is not supported, got {self.dtype}")

    def reason_not_shared(self, world: int) -> str | None:
        """Return why this many ranks cannot share the heads of an all-to-all, or None.

        Ranks of a group of queries each get the key and value head that they need, so these may be
        fewer than ranks.
        """
        for number, heads in enumerate(self.heads):
            if heads % world and (number == 0 or world % heads):
                least = "" if number == 0 else ", or divide it"
                return f"heads must be a multiple of the world of {world}{least}, got {heads}"
        return None

    def reason_not_on_gpus(self, knobs: Knobs, nodes: int) -> str | None:
        """Return why kernels of experts cannot run with these knobs; None if they can.

        ``nodes``: of the ranks. Rows of other nodes come by copies, as those of dense ops.
        """
        if self.experts is None:
            return None
        indirect = knobs.direction == "pull" or knobs.order not in (None, "direct")
        if self.dispatches and self.op.gathers and indirect and nodes == 1:
            return (
                "on GPUs kernels send rows where their experts are: direction = push and "
                f"order = direct, got {knobs}"
            )
        if knobs.path not in (None, "fused", "unfused") or knobs.reduce not in (None, "local"):
            return f"experts on GPUs need path = fused or unfused and reduce = local, got {knobs}"
        return None

    def columns_of(self, world: int, rank: int) -> list[tuple[int, int]]:
        """Return the columns [begin, end) of the packed dimension that ``rank`` takes, by tensor.

        Ranks that share a head take it all: each of heads 0 and 1 goes to two of 4 ranks.
        """
        columns, base = [], 0
        for heads in self.heads:
            count = max(heads // world, 1)
            first = base + (rank * heads // world) * self.head_dim
            columns.append((first, first + count * self.head_dim))
            base += heads * self.head_dim
        return columns

    def travelling(self, world: int) -> tuple[int, torch.dtype]:
        """Return ``travelling_row``, which of an all-to-all depends on the number of ranks."""
        if not self.op.exchanges:
            return self.travelling_row
        return sum(end - begin for begin, end in self.columns_of(world, 0)), self.dtype

    @property
    def kernel(self) -> str:
        """Family of its kernels (``flux.kernels.config.OPS``)."""
        if self.experts is None:
            return self.op.kernel
        return "ag_grouped_gemm" if self.op.gathers else "grouped_gemm_rs"

    def local_n(self, world: int, rank: int) -> tuple[int, ...]:
        """Return the columns of each weight's result on ``rank``."""
        if self.op.exchanges:
            return self.n
        parts = world // self.ep
        return tuple(_C.core.local_n(self.op, n, parts, rank % parts) for n in self.n)

    def local_k(self, world: int, rank: int) -> int:
        """Return the depth of the GEMM on ``rank``."""
        if self.op.exchanges:
            return self.k
        parts = world // self.ep
        return _C.core.local_k(self.op, self.k, parts, rank % parts)

    def local_experts(self, world: int, rank: int) -> tuple[int, int]:
        """Return the experts of ``rank``: the first, and how many."""
        assert self.experts is not None
        group = rank // (world // self.ep)
        first = _C.core.row_begin(self.experts, self.ep, group)
        return first, _C.core.row_count(self.experts, self.ep, group)

    def scheduled_n(self, world: int) -> int:
        """Return the columns that schedules are made for, of all ranks.

        A mixture of experts has tiles of whole rows of columns, and every rank has some.
        """
        if not self.experts or self.op.reduces:
            return sum(self.n)
        return world * ceil_div(sum(self.n), world // self.ep)

    def digest(self, m: int, biased: bool) -> int:
        """Return a number that is equal on all ranks of a call that fits together."""
        return m if self.op.gathers else m * 2 + biased

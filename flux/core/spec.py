"""The part of an op's construction that all ranks must agree on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flux import _C
from flux.core import dtypes
from flux.core.knobs import Op
from flux.core.problem import ACTIVATIONS, SCALINGS

DTYPES = {dtype.torch: dtype for dtype in dtypes.DTYPES.values()}
"""The table of element types, by torch's dtype."""
_RESULTS = {dtype: row.of_result.torch for dtype, row in DTYPES.items()}

FP8 = torch.float8_e4m3fn

SCALE_BYTES = torch.float32.itemsize
MAX_SIZE = 2**30
"""Largest M, N or K. Twice as much must fit the 32-bit integers of csrc/core."""


@dataclass(frozen=True)
class OpSpec:
    """What an op is constructed with, for all M up to ``max_m``; ranks must agree on it.

    ``flux.core.problem.Problem`` is one op at one M, with the number of ranks.

    ``n`` and ``k`` are global sizes, in elements. ``dtype`` is that of x and the weights:
    float8_e4m3fn with a ``scaling`` other than ``none``.

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

    op: Op
    max_m: int
    n: tuple[int, ...]
    k: int
    dtype: torch.dtype
    transpose_weight: bool
    reduce: str
    activation: str = "none"
    scaling: str = "none"
    fast_accum: bool = False
    label: str = field(init=False, repr=False, compare=False)
    plain: bool = field(init=False, repr=False, compare=False)
    out_dtype: torch.dtype = field(init=False, repr=False, compare=False)
    row_elements: int = field(init=False, repr=False, compare=False)
    itemsize: int = field(init=False, repr=False, compare=False)
    scales_travel: bool = field(init=False, repr=False, compare=False)
    travelling_row: tuple[int, torch.dtype] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        vars(self).update(label=self.op.label)
        if self.dtype not in DTYPES:
            names = ", ".join(dtypes.DTYPES)
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
        sizes = {"max_m": (self.max_m,), "n": self.n, "k": (self.k,)}
        for name, values in sizes.items():
            if not values or not all(type(v) is int and 1 <= v <= MAX_SIZE for v in values):
                raise ValueError(
                    f"{self.label}: {name} must be a positive integer up to {MAX_SIZE}, "
                    f"got {values if len(values) != 1 else values[0]!r}"
                )
        if self.op.reduces and len(self.n) != 1:
            raise ValueError(f"{self.label}: n must be one size, got {self.n}")
        if self.reduce not in ("sum", "avg"):
            raise ValueError(f"{self.label}: reduce must be 'sum' or 'avg', got {self.reduce!r}")
        out_dtype = _RESULTS[self.dtype]
        travels, elements = (self.dtype, self.k) if self.op.gathers else (out_dtype, self.n[0])
        row = (elements, travels)
        if scales_travel := self.op.gathers and self.scaling == "row":
            row = (elements * travels.itemsize + SCALE_BYTES, torch.uint8)
        vars(self).update(
            plain=self.scaling == "none" and self.activation == "none",
            out_dtype=out_dtype,
            row_elements=elements,
            itemsize=travels.itemsize,
            scales_travel=scales_travel,
            travelling_row=row,
        )

    def local_n(self, world: int, rank: int) -> tuple[int, ...]:
        """Return the columns of each weight on ``rank``."""
        return tuple(_C.core.local_n(self.op, n, world, rank) for n in self.n)

    def local_k(self, world: int, rank: int) -> int:
        """Return the depth of the GEMM on ``rank``."""
        return _C.core.local_k(self.op, self.k, world, rank)

    def digest(self, m: int, biased: bool) -> int:
        """Return a number that is equal on all ranks of a call that fits together."""
        return m if self.op.gathers else m * 2 + biased

"""The part of an op's construction that all ranks must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from flux import _C
from flux.core import dtypes
from flux.core.knobs import Op
from flux.core.problem import ACTIVATIONS, SCALINGS

DTYPES = {dtype.torch: dtype for dtype in dtypes.DTYPES.values()}
"""The table of element types, by torch's dtype."""

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

    def __post_init__(self) -> None:
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

    @property
    def label(self) -> str:
        """The class name, for messages."""
        return self.op.label

    @cached_property
    def out_dtype(self) -> torch.dtype:
        """Dtype of results, partials and biases."""
        return DTYPES[self.dtype].of_result.torch

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element of the communicated matrix."""
        return (self.dtype if self.op.gathers else self.out_dtype).itemsize

    @property  # no cached one: torch.compile traces this
    def plain(self) -> bool:
        """Whether results are just the product (and a bias) in the dtype of the operands."""
        return self.scaling == "none" and self.activation == "none"

    def local_n(self, world: int, rank: int) -> tuple[int, ...]:
        """Return the columns of each weight on ``rank``."""
        return tuple(_C.core.local_n(self.op, n, world, rank) for n in self.n)

    def local_k(self, world: int, rank: int) -> int:
        """Return the depth of the GEMM on ``rank``."""
        return _C.core.local_k(self.op, self.k, world, rank)

    @cached_property
    def scales_travel(self) -> bool:
        """Whether a row of x is sent with its float32 scale."""
        return self.op.gathers and self.scaling == "row"

    @property
    def travelling_row(self) -> tuple[int, torch.dtype]:
        """Elements and dtype of a communicated row as the transport sees it: bytes with a scale."""
        if self.scales_travel:
            return self.k * self.itemsize + SCALE_BYTES, torch.uint8
        return (self.k, self.dtype) if self.op.gathers else (self.n[0], self.out_dtype)

    def row_elements(self) -> int:
        """Return the elements of a communicated row: of the input (AllGather) or of the result."""
        return self.k if self.op.gathers else self.n[0]

    def digest(self, m: int, biased: bool) -> int:
        """Return a number that is equal on all ranks of a call that fits together."""
        return m if self.op.gathers else m * 2 + biased

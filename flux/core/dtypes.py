"""The table of element types: names, sizes, and their codes in native code.

This module uses only the standard library, so that builds, which have no torch, can import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dtype:
    """One element type.

    Attributes:
        name: as torch names it.
        short: name in kernels, and on the command line.
        itemsize: bytes of an element.
        native: code in csrc/cpu/reduce.h; None if the CPU backend cannot sum it.
        in_kernels: whether CUDA kernels multiply it.
    """

    name: str
    short: str
    itemsize: int
    native: int | None = None
    in_kernels: bool = False

    @property
    def of_result(self) -> Dtype:
        """Dtype of results, partials and biases of an op with these operands."""
        return DTYPES["bfloat16"] if self.name == "float8_e4m3fn" else self

    @property
    def torch(self) -> torch.dtype:
        """The dtype as torch's."""
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("float64", "fp64", 8, native=0),
        Dtype("float32", "fp32", 4, native=1),
        Dtype("bfloat16", "bf16", 2, native=2, in_kernels=True),
        Dtype("float16", "fp16", 2, native=3, in_kernels=True),
        Dtype("float8_e4m3fn", "e4m3", 1, in_kernels=True),
    )
}
"""All dtypes of operands, by name."""

MEASURED_DTYPES = tuple(dtype.name for dtype in DTYPES.values() if dtype.native is not None)
"""Dtypes that benchmarks measure: float8 needs scales, which their inputs do not have."""

BY_SHORT = {dtype.short: dtype for dtype in DTYPES.values()}


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")

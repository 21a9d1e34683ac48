"""One tile of a GEMM on the CPU: the product, and what the GPU kernels' epilogue does to it.

    y = activation(scale_x[row] * scale_weight[column] * (x @ weight) + bias)

Operands of float8 are multiplied in float32, which holds every product of two of them, and rounded
once, to bfloat16, when all is done. Without scaling the product and bias are ATen's.

Scales of rows travel with their rows: on the wire a row of float8 is K bytes and 4 of its scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional

from flux.core.call import Call, Gemm, check_product
from flux.core.spec import OpSpec

ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "silu": functional.silu,
}


def spoil(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN (all bits set, in every dtype) and return the tensor."""
    tensor.view(torch.uint8).fill_(255)
    return tensor


def pack(call: Call) -> torch.Tensor:
    """Return the rows of x as they travel with their scales: bytes [rows, K + 4]."""
    assert call.scale_x is not None
    scales = call.scale_x.contiguous().view(-1, 1).view(torch.uint8)
    return torch.cat([call.x.view(torch.uint8), scales], dim=1)


def unpack(spec: OpSpec, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """X [rows, K] and the scales [rows] of rows that have travelled (None: x has none of its own).

    ``rows``: as ``pack`` makes them.
    """
    if not spec.scales_travel:
        return rows, None
    scale = rows[:, spec.k :].clone(memory_format=torch.contiguous_format)  # aligned, too
    return rows[:, : spec.k].view(spec.dtype), scale.view(torch.float32).view(-1)


def scale_of_rows(call: Call, begin: int, end: int) -> torch.Tensor | None:
    """Return the scale of each of these rows of x, or one for all; None without scaling."""
    scale = call.scale_x
    return scale if scale is None or scale.shape[0] == 1 else scale[begin:end]


_K_STEP = 32  # elements of bfloat16 along K that one AMX tile holds


@cache
def _mm_reads_beyond_rows() -> bool:
    """Return whether a product of bfloat16 depends on what lies behind the rows of x.

    oneDNN 3.12 rounds K up to whole AMX tiles: it multiplies the elements behind a row by zero, and
    NaN times zero is NaN (github.com/uxlfoundation/oneDNN/issues/5717). Rows of a view are hurt by
    memory that is no part of it, rows of a dense matrix by the next row.
    """
    rows, k = 2 * _K_STEP, _K_STEP + 1
    memory = torch.full((rows, 2 * k), float("nan"), dtype=torch.bfloat16, device="cpu")
    x = memory[:, :k].fill_(1)
    return bool(torch.mm(x, x.new_ones(k, rows)).isnan().any())


def apart(x: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 rows [rows, K], or a copy with zeros behind each if a product reads there."""
    rows, k = x.shape
    if k % _K_STEP == 0 or x.device.type != "cpu" or not _mm_reads_beyond_rows():
        return x
    copy = x.new_zeros(rows, -(-k // _K_STEP) * _K_STEP)[:, :k]
    return copy.copy_(x)


class Multiplier:
    """The multiplications of one call. float8 weights are converted once."""

    __slots__ = ("_call", "_spec", "_weights", "_wholes")

    def __init__(self, spec: OpSpec, call: Call) -> None:
        self._spec = spec
        self._call = call
        self._weights = [w if spec.transpose_weight else w.t() for w in call.weights]  # [K, N]
        if spec.scaling != "none":
            self._weights = [w.float() for w in self._weights]
        self._wholes: dict[tuple[int, int], torch.Tensor] = {}  # see _supplied

    def __call__(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        weight: int = 0,
        columns: slice | None = None,
        scale_x: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        first: int = 0,
    ) -> None:
        """Compute ``out`` [rows, columns] of rows ``x`` and those columns of a weight.

        With a mixture of experts, see ``GroupedProduct``: ``first`` is the first token.

        Args:
            x: [rows, K].
            out: [rows, columns] of the result.
            weight: which of the call's weights.
            columns: of the weight; None: all.
            scale_x: [rows] or [1]; with scaling only.
            bias: [N] of all columns, or None.
            first: of the rows, in the [M, ...] matrix.
        """
        grouped = self._call.grouped
        if grouped is not None:
            tokens = x if self._spec.op.gathers else out
            grouped(x, first, first + tokens.shape[0], out, columns, scale_x)
            return
        if self._call.gemm is not None:
            out.copy_(self._supplied(self._call.gemm, x, columns))
            return
        b = self._weights[weight]
        if columns is not None:
            b = b[:, columns]
            bias = None if bias is None else bias[columns]
        if scale_x is None:
            if x.dtype is torch.bfloat16:
                x = apart(x)
            if bias is None:
                torch.mm(x, b, out=out)
            else:
                torch.addmm(bias, x, b, out=out)
            if self._spec.activation != "none":
                out.copy_(ACTIVATE[self._spec.activation](out))
            return
        product = torch.mm(x.float(), b)
        product *= scale_x.view(-1, 1)
        scale = self._call.scale_weights[weight]
        of_columns = self._spec.scaling == "row" and columns is not None
        product *= scale[columns] if of_columns else scale
        if bias is not None:
            product += bias
        if self._spec.activation != "none":
            product = ACTIVATE[self._spec.activation](product)
        out.copy_(product)

    def _supplied(self, gemm: Gemm, x: torch.Tensor, columns: slice | None) -> torch.Tensor:
        """Return those columns of what the caller's product makes of the rows ``x``.

        The product makes whole rows. Where a schedule cuts columns it is called once for its rows,
        and what it returned is copied: it may use that memory again.
        """
        if columns is None:
            return check_product(self._spec, gemm(x), x.shape[0])
        key = (int(x.storage_offset()), x.shape[0])
        whole = self._wholes.get(key)
        if whole is None:
            whole = self._wholes[key] = check_product(self._spec, gemm(x), x.shape[0]).clone()
        return whole[:, columns]

"""One tile of a GEMM on the CPU: the product, and what the GPU kernels' epilogue does to it.

    y = activation(scale_x[row] * scale_weight[column] * (x @ weight) + bias)

On CPUs operands of float8 are multiplied in float32, which holds every product of two of them, and
rounded once, to bfloat16, when all is done. On GPUs the library path has ``torch._scaled_mm``.
Without scaling the product and bias are ATen's.

Scales of rows travel with their rows: on the wire a row of float8 is K bytes and 4 of its scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional

from flux.core.call import Call, Gemm, check_product
from flux.core.spec import OpSpec
from flux.core.tensors import address_of

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
    dense = call.scale_x.clone(memory_format=torch.contiguous_format)  # of one row, too
    scales = dense.view(-1, 1).view(torch.uint8)
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


SCALED_ON = ("cuda",)
"""Devices on which ``torch._scaled_mm`` is faster than a product in float32. On CPUs it is not."""
_SCALED_UNIT = 16  # bytes, of addresses and rows; elements, of K and N


@cache
def _has_scaled_mm(device: torch.device, by_row: bool) -> bool:
    if device.type not in SCALED_ON:
        return False
    least = (9, 0) if by_row else (8, 9)
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= least


def scaled_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    fast: bool = False,
) -> torch.Tensor | None:
    """Return ``torch._scaled_mm``, bfloat16 [rows, N]; None if it does not take these operands.

    Args:
        x: float8 [rows, K].
        weight: float8 [K, N].
        scale_x: [rows] or [1].
        scale_weight: [N] or [1].
        bias: [N] or None.
        fast: sums stay in the tensor cores' own precision.
    """
    (rows, k), n = x.shape, weight.shape[1]
    by_row = scale_x.numel() != 1 or scale_weight.numel() != 1
    if not rows or k % _SCALED_UNIT or n % _SCALED_UNIT or not _has_scaled_mm(x.device, by_row):
        return None

    def in_rows(tensor: torch.Tensor) -> torch.Tensor:
        fits = tensor.stride(1) == 1 and not tensor.stride(0) % _SCALED_UNIT
        if fits and not address_of(tensor) % _SCALED_UNIT:
            return tensor
        return tensor.clone(memory_format=torch.contiguous_format)

    if by_row:
        scale_x = scale_x.view(-1, 1).expand(rows, 1).contiguous()
        scale_weight = scale_weight.view(1, -1).expand(1, n).contiguous()
    product: torch.Tensor = torch._scaled_mm(
        in_rows(x),
        in_rows(weight.t()).t(),
        scale_x,
        scale_weight,
        bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return product


def product_in_float32(x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Return the product of float8 rows [rows, K] with a weight [K, N] that is float32 by now.

    Autocast, which makes operands of products bfloat16, does not change one with an ``out``.
    """
    out = x.new_empty(x.shape[0], wide.shape[1], dtype=torch.float32)
    return torch.mm(x.float(), wide, out=out)


class Multiplier:
    """The multiplications of one call. float8 weights are converted to float32 once, if at all."""

    __slots__ = ("_call", "_spec", "_weights", "_wholes", "_wide")

    def __init__(self, spec: OpSpec, call: Call) -> None:
        self._spec = spec
        self._call = call
        self._weights = [w if spec.transpose_weight else w.t() for w in call.weights]  # [K, N]
        self._wide: dict[int, torch.Tensor] = {}
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
        needed: torch.Tensor | None = None,
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
            needed: the tokens that there are rows of; None: all from ``first``.
        """
        grouped = self._call.grouped
        if grouped is not None:
            tokens = x if self._spec.op.gathers else out
            last = self._call.m if needed is not None else first + tokens.shape[0]
            grouped(x, first, last, out, columns, scale_x, needed)
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
        scale = self._call.scale_weights[weight]
        if self._spec.scaling == "row" and columns is not None:
            scale = scale[columns]
        if self._spec.activation == "none":
            scaled = scaled_mm(x, b, scale_x, scale, bias, self._spec.fast_accum)
            if scaled is not None:
                out.copy_(scaled)
                return
        if weight not in self._wide:
            self._wide[weight] = self._weights[weight].float()
        wide = self._wide[weight]
        product = product_in_float32(x, wide if columns is None else wide[:, columns])
        product *= scale_x.view(-1, 1)
        product *= scale
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

"""Recognise a call that repeats an earlier one, so that its arguments need no second check.

In a loop over layers every op meets the same weight and bias, and an x of the same shape, again and
again. What the checks of such a call would find, and what the native call is given, is known.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import cast

import torch

from flux.core.call import Call
from flux.core.schedule import TileSchedule
from flux.core.tensors import address_of, bytes_needed, memory_of

MAX_CALLS = 1024
"""Calls that an op remembers: more than a model has layers."""


@dataclass(slots=True)
class CachedCall:
    """A call with one weight, or the caller's product, that has been checked and made.

    Weight, product and bias are not kept alive.
    """

    m: int
    world: int  # that m is divided by where x has a shard of the rows, else 1
    schedule: TileSchedule
    x_shape: torch.Size
    x_stride: tuple[int, ...]
    x_dtype: torch.dtype
    x_device: torch.device
    x_bytes: int  # from its first element to its end
    x_unit: int  # bytes that its address must be a multiple of
    weight: weakref.ref[torch.Tensor]  # or of the product
    weight_memory: tuple[object, ...]
    weight_ld: int
    bias: weakref.ref[torch.Tensor] | None
    bias_memory: tuple[object, ...]
    out_rows: int
    columns: int
    bias_ptr: int

    @staticmethod
    def of(
        schedule: TileSchedule, call: Call, shard_of: int, out_rows: int, x_unit: int
    ) -> CachedCall:
        """Remember a call.

        Args:
            schedule: of the call.
            call: its checked arguments.
            shard_of: ranks that x is a shard of, else 1.
            out_rows: rows of the result.
            x_unit: bytes that the address of x must be a multiple of.
        """
        x, bias = call.x, call.biases[0]
        weight = call.weights[0] if call.gemm is None else None
        return CachedCall(
            call.m,
            shard_of,
            schedule,
            x.shape,
            x.stride(),
            x.dtype,
            x.device,
            bytes_needed(x),
            x_unit,
            weakref.ref(cast(torch.Tensor, call.gemm if weight is None else weight)),
            () if weight is None else memory_of(weight),
            0 if weight is None else weight.stride(0),
            None if bias is None else weakref.ref(bias),
            () if bias is None else memory_of(bias),
            out_rows,
            call.columns[0],
            0 if bias is None else address_of(bias),
        )

    def is_like(self, x: torch.Tensor, weight: object, bias: object, m: int | None) -> bool:
        """Return whether a call with these arguments differs only in the contents of tensors.

        Args:
            x: a plain tensor, like ``weight`` and ``bias`` if those are the same objects as before.
            weight: of the call, or the caller's product.
            bias: of the call.
            m: global rows, or None.
        """
        if self.weight() is not weight or weight is None:  # which a weight that is gone gives
            return False
        if (bias is None) != (self.bias is None):  # a freed bias differs from None
            return False
        if self.bias is not None and self.bias() is not bias:
            return False
        return (
            x.dtype is self.x_dtype
            and x.device == self.x_device
            and x.layout is torch.strided
            and not x.is_nested  # has no shape
            and x.shape == self.x_shape
            and x.stride() == self.x_stride
            and not x.is_neg()
            and (at := x.data_ptr()) % self.x_unit == 0
            and (at != 0 or self.x_bytes == 0)
            and x.untyped_storage().nbytes() - x.storage_offset() * x.itemsize >= self.x_bytes
            and (m if m is not None else x.shape[0] * self.world) == self.m
            and (not isinstance(weight, torch.Tensor) or memory_of(weight) == self.weight_memory)
            and (not isinstance(bias, torch.Tensor) or memory_of(bias) == self.bias_memory)
        )


class CachedCalls:
    """The last call of an op with each weight: layers of one shape share an op."""

    def __init__(self) -> None:
        self._calls: dict[int, CachedCall] = {}  # by the id of the weight or product

    def keep(self, call: CachedCall) -> None:
        """Remember a call in place of the last one with its weight."""
        if len(self._calls) >= MAX_CALLS:
            self._calls.clear()
        self._calls[id(call.weight())] = call

    def find(
        self, x: torch.Tensor, weight: object, bias: object, m: int | None
    ) -> CachedCall | None:
        """Return the call that differs in contents only: see ``CachedCall.is_like``."""
        call = self._calls.get(id(weight))
        return call if call is not None and call.is_like(x, weight, bias, m) else None

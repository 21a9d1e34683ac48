"""The arguments of one call: checked before any communication, or known to repeat an earlier call.

In a loop over layers every op meets the same weight and bias, and an x of the same shape, again and
again. Such a call needs no second check.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from flux import _C
from flux.core.schedule import TileSchedule
from flux.core.sparse_call import Blocks, GroupedProduct, NeededTokens
from flux.core.spec import OpSpec
from flux.core.tensors import (
    address_of,
    bytes_needed,
    memory_of,
    reason_without_memory,
    settled,
)

Gemm = Callable[[torch.Tensor], torch.Tensor]
"""A product that the caller supplies: rows of x, [rows, K/W], to rows of the result, [rows, N]."""


@dataclass(slots=True)
class Call:
    """Checked arguments of one call on one rank.

    Attributes:
        m: global rows.
        x: own rows [own, K] (AllGather) or [M, K/W]; unit stride in its last dimension.
        weights: each as the user keeps it, [columns, K] or (transpose_weight) [K, columns].
            Neither these nor x, biases and scales are lazy. Empty with ``gemm``.
        columns: columns of each weight.
        biases: one per weight, or None.
        scale_x: float32, [rows of x] or [1] (scaling = row | tensor); None without scaling.
        scale_weights: one per weight, [columns] or [1]; empty without scaling.
        gemm: the caller's product, in place of a weight.
        grouped: the product of a mixture of experts, in place of a weight.
        blocks: the operands of an all-to-all, in place of a weight.
        needed: the tokens that travel; None: all, to or from every rank.
        digest: equal on all ranks of a call that fits together.
    """

    m: int
    x: torch.Tensor
    weights: Sequence[torch.Tensor]
    columns: tuple[int, ...]
    biases: tuple[torch.Tensor | None, ...]
    scale_x: torch.Tensor | None = None
    scale_weights: tuple[torch.Tensor, ...] = ()
    gemm: Gemm | None = None
    grouped: GroupedProduct | None = None
    blocks: Blocks | None = None
    needed: NeededTokens | None = None
    digest: int = 0

    @property
    def out_rows(self) -> int:
        """Rows of an AllGather's results."""
        return self.m if self.grouped is None else self.grouped.rows

    def rows_of_x(self, rows: slice | None) -> torch.Tensor:
        """Return these rows of x, None: all; a mixture of experts finds its own rows."""
        return self.x if rows is None or self.grouped is not None else self.x[rows]


_CPU = torch.device("cpu")
MAX_TRIED = 1024  # products that an op remembers: as many as a model has layers


def check_product(spec: OpSpec, product: object, rows: int) -> torch.Tensor:
    """Return what a product of the caller's returned for some rows, if it is a result.

    Raises:
        TypeError: it is no tensor, or has the wrong dtype.
        ValueError: its shape or device is wrong, it is not in memory, or autograd follows it.
    """
    label, n = f"{spec.label}: gemm= must return", sum(spec.n)
    if type(product) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"{label} a plain tensor, got {type(product).__name__}")
    assert isinstance(product, torch.Tensor)
    if product.dtype != spec.out_dtype:
        raise TypeError(f"{label} {spec.out_dtype}, got {product.dtype}")
    if product.shape != (rows, n):
        raise ValueError(f"{label} [{rows}, {n}] for {rows} rows, got {list(product.shape)}")
    if product.device != _CPU:
        raise ValueError(f"{label} a tensor on the CPU, got {product.device}")
    if product.requires_grad:
        raise ValueError(f"{label} a tensor without gradient: it has no backward; use no_grad")
    reason = reason_without_memory(product)
    if reason is not None:
        raise ValueError(f"{label} a dense tensor in memory, but {reason}")
    return product


class CallChecker:
    """Checks the calls of one op on one rank; computes once what is the same for all calls.

    ``compares_scales``: whether the host reads them: it does not wait for those of a GPU.
    """

    compares_scales = True

    def __init__(self, spec: OpSpec, world: int, rank: int, device: torch.device = _CPU) -> None:
        self.spec = spec
        self.device = device
        self.world = world
        self.rank = rank
        self.k = spec.local_k(world, rank)
        self.columns = spec.local_n(world, rank)
        self.shapes = [(self.k, n) if spec.transpose_weight else (n, self.k) for n in self.columns]
        self._tried: dict[int, weakref.ref[Gemm]] = {}  # products that passed their trial, by id

    @property
    def where(self) -> str:
        """The device that tensors must be on, for messages."""
        return "the CPU" if self.device == _CPU else str(self.device)

    def check(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor] | Gemm,
        biases: Sequence[torch.Tensor | None],
        m: int | None,
        scales: Sequence[torch.Tensor] = (),
    ) -> Call:
        """Check a call's arguments against the op's specification.

        Args:
            x: the input, as the user passed it.
            weights: one or more weights, or the caller's product.
            biases: one per weight, or None.
            m: global rows; None: derived from x.
            scales: of x, then of each weight; empty without scaling.

        Raises:
            TypeError: a wrong dtype, or an argument that is not a tensor.
            ValueError: a wrong shape or device, or M out of range; the message says what was
                expected.
        """
        spec = self.spec
        x = self._tensor("x", x, spec.dtype)
        if x.dim() != 2 or x.shape[1] != self.k:
            raise ValueError(f"{spec.label}: x must be [rows, {self.k}], got {list(x.shape)}")
        m, rows = rows_of_call(spec, self.world, self.rank, x.shape[0], m)
        if callable(weights):
            return self._with_gemm(weights, m, x, biases)
        if len(weights) != len(self.columns) or len(biases) != len(self.columns):
            raise ValueError(
                f"{spec.label}: expected {len(self.columns)} weight(s) and bias(es), "
                f"got {len(weights)} and {len(biases)}"
            )
        ready, dense = [], []
        for weight, bias, expected, n in zip(
            weights, biases, self.shapes, self.columns, strict=True
        ):
            weight = self._tensor("weight", weight, spec.dtype)
            if weight.shape != expected:
                raise ValueError(
                    f"{spec.label}: weight must be {list(expected)}"
                    f"{' (transpose_weight)' if spec.transpose_weight else ''}, "
                    f"got {list(weight.shape)}"
                )
            ready.append(weight)
            dense.append(None if bias is None else self._bias(bias, n))
        digest = spec.digest(m, dense[0] is not None)
        call = Call(m, x, ready, self.columns, tuple(dense), digest=digest)
        if spec.scaling != "none" or scales:
            scale_x, *of_weights = self._scales(scales, x.shape[0])
            call.scale_x = scale_x[:rows] if spec.scaling == "row" else scale_x
            call.digest = self._with_shared_scale(call.digest, scale_x)
            call.scale_weights = tuple(of_weights)
        if rows != x.shape[0]:
            call.x = x = x[:rows]
        if x.stride(1) != 1 and x.numel() > 0:
            call.x = x.contiguous()
        return call

    def _with_gemm(
        self, gemm: Gemm, m: int, x: torch.Tensor, biases: Sequence[torch.Tensor | None]
    ) -> Call:
        """Return the call of a product that the caller supplies, after a trial with one row.

        A product that fails for every input is refused here, before any communication.
        """
        if self.device != _CPU:
            raise ValueError(f"{self.spec.label}: gemm= needs the CPU backend, got {self.device}")
        (bias,), (columns,) = biases, self.columns
        bias = None if bias is None else self._bias(bias, columns)
        x = x if x.stride(1) == 1 or x.numel() == 0 else x.contiguous()
        known = self._tried.get(id(gemm))
        if known is None or known() is not gemm:
            try:
                product = gemm(x[:1])
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise ValueError(f"{self.spec.label}: gemm= failed with one row: {what}") from error
            check_product(self.spec, product, 1)
            if len(self._tried) >= MAX_TRIED:
                self._tried.clear()
            self._tried[id(gemm)] = weakref.ref(gemm)
        digest = self.spec.digest(m, bias is not None)
        return Call(m, x, (), self.columns, (bias,), gemm=gemm, digest=digest)

    def _scales(self, scales: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        """Return the scales of x and of each weight, each contiguous and of shape [length]."""
        spec = self.spec
        wanted = 0 if spec.scaling == "none" else 1 + len(self.columns)
        if len(scales) != wanted:
            raise ValueError(
                f"{spec.label}: scaling = {spec.scaling} takes {wanted} scales (of x and of each "
                f"weight), got {len(scales)}"
            )
        dense = []
        names = ["scale_x", *["scale_weight"] * len(self.columns)]
        for name, scale, length in zip(names, scales, (rows, *self.columns), strict=True):
            scale = self._tensor(name, scale, torch.float32)
            length = length if spec.scaling == "row" else 1
            in_line = scale.dim() <= 2 and max(scale.shape, default=1) == max(length, 1)
            if scale.numel() != length or (length > 0 and not in_line):
                raise ValueError(
                    f"{spec.label}: with scaling = {spec.scaling}, {name} must have {length} "
                    f"value(s) in one row or column, got {list(scale.shape)}"
                )
            dense.append(scale.reshape(length))
        return dense

    def _with_shared_scale(self, digest: int, scale_x: torch.Tensor) -> int:
        """Return a digest that has the one scale of all rows that ranks gather, too, in 31 bits.

        Ranks that quantise their rows each by its own largest element would get wrong results.
        """
        if not self.compares_scales or self.spec.scaling != "tensor" or not self.spec.op.gathers:
            return digest
        return (digest * 0x9E3779B1 ^ int(scale_x.view(torch.int32))) % 0x7FFFFFFF

    def _tensor(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose memory native code may read."""
        spec = self.spec
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{spec.label}: {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != dtype:
            raise TypeError(f"{spec.label}: {name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != self.device:
            raise ValueError(f"{spec.label}: {name} must be on {self.where}, got {tensor.device}")
        reason = reason_without_memory(tensor)
        if reason is not None:
            raise ValueError(f"{spec.label}: {name} must be a dense tensor in memory, but {reason}")
        return settled(tensor) if tensor.is_neg() or tensor._is_zerotensor() else tensor

    def _bias(self, bias: torch.Tensor, n: int) -> torch.Tensor:
        bias = self._tensor("bias", bias, self.spec.out_dtype)
        if bias.shape != (n,):
            raise ValueError(f"{self.spec.label}: bias must be [{n}], got {list(bias.shape)}")
        return bias.contiguous()


def rows_of_call(
    spec: OpSpec, world: int, rank: int, x_rows: int, m: int | None
) -> tuple[int, int]:
    """Return (global rows, rows of x that are not padding)."""
    gathers = spec.op.gathers
    if m is None:
        m = x_rows * world if gathers else x_rows
        if gathers and m == 0:
            raise ValueError(f"{spec.label}: x has no rows; pass m when M is not rows * world")
    if not 1 <= m <= spec.max_m:
        how = f" (x has {x_rows} rows, world is {world})" if gathers else ""
        raise ValueError(f"{spec.label}: M must be in [1, max_m = {spec.max_m}], got {m}{how}")
    if not gathers:
        return m, x_rows
    own = _C.core.row_count(m, world, rank)
    if x_rows != own and x_rows != (chunk := _C.core.chunk_rows(m, world)):
        raise ValueError(
            f"{spec.label}: with M = {m}, rank {rank} of {world} owns {own} rows; x must have "
            f"{own} rows, or {chunk} with padding at the end, got {x_rows}"
        )
    return m, own


# -- calls that repeat an earlier one --------------------------------------------------------------

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
    digest: int

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


@dataclass(slots=True)
class CachedCalls:
    """The last call of an op with each weight: layers of one shape share an op."""

    _calls: dict[int, CachedCall] = field(default_factory=dict)  # by the id of weight or product

    def keep(
        self, schedule: TileSchedule, call: Call, shard_of: int, out_rows: int, x_unit: int
    ) -> None:
        """Remember a call that has been made, in place of the last one with its weight.

        Args:
            schedule: of the call.
            call: its checked arguments.
            shard_of: ranks that x is a shard of, else 1.
            out_rows: rows of the result.
            x_unit: bytes that the address of x must be a multiple of.
        """
        x, bias = call.x, call.biases[0]
        weight = call.weights[0] if call.gemm is None else None
        key = call.gemm if weight is None else weight
        if len(self._calls) >= MAX_CALLS:
            self._calls.clear()
        self._calls[id(key)] = CachedCall(
            call.m,
            shard_of,
            schedule,
            x.shape,
            x.stride(),
            x.dtype,
            x.device,
            bytes_needed(x),
            x_unit,
            weakref.ref(cast(torch.Tensor, key)),
            () if weight is None else memory_of(weight),
            0 if weight is None else weight.stride(0),
            None if bias is None else weakref.ref(bias),
            () if bias is None else memory_of(bias),
            out_rows,
            call.columns[0],
            0 if bias is None else address_of(bias),
            call.digest,
        )

    def find(
        self, x: torch.Tensor, weight: object, bias: object, m: int | None
    ) -> CachedCall | None:
        """Return the call that differs in contents only: see ``CachedCall.is_like``."""
        call = self._calls.get(id(weight))
        return call if call is not None and call.is_like(x, weight, bias, m) else None

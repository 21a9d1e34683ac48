"""The arguments of one call, checked before anything is communicated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flux import _C
from flux.knobs import Op
from flux.ops.spec import OpSpec


@dataclass(slots=True)
class Call:
    """Checked arguments of one call on one rank.

    Attributes:
        m: global rows.
        x: own rows [own, K] (AllGather) or [M, K/W]; unit stride in its last dimension.
        weights: each as [K, columns], whatever layout the user keeps it in.
        biases: one per weight, or None.
    """

    m: int
    x: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]


_CPU = torch.device("cpu")


class CallChecker:
    """Checks the calls of one op on one rank; what is the same for all is worked out once."""

    def __init__(self, spec: OpSpec, world: int, rank: int, device: torch.device = _CPU) -> None:
        self.spec = spec
        self.device = device
        self.world = world
        self.rank = rank
        self.k = spec.local_k(world, rank)
        self.columns = spec.local_n(world, rank)
        self.shapes = [(self.k, n) if spec.transpose_weight else (n, self.k) for n in self.columns]

    def check(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        m: int | None,
    ) -> Call:
        """Check a call's arguments against the op's specification.

        Raises:
            TypeError: a wrong dtype, or something that is not a tensor.
            ValueError: a wrong shape or device, or M out of range; the message says what was
                expected.
        """
        spec = self.spec
        self._tensor("x", x)
        if x.dim() != 2 or x.shape[1] != self.k:
            raise ValueError(f"{spec.label}: x must be [rows, {self.k}], got {list(x.shape)}")
        m, rows = _rows(spec, self.world, self.rank, x.shape[0], m)
        if len(weights) != len(self.columns) or len(biases) != len(self.columns):
            raise ValueError(
                f"{spec.label}: expected {len(self.columns)} weight(s) and bias(es), "
                f"got {len(weights)} and {len(biases)}"
            )
        views = []
        for weight, expected in zip(weights, self.shapes, strict=True):
            self._tensor("weight", weight)
            if weight.shape != expected:
                raise ValueError(
                    f"{spec.label}: weight must be {list(expected)}"
                    f"{' (transpose_weight)' if spec.transpose_weight else ''}, "
                    f"got {list(weight.shape)}"
                )
            views.append(weight if spec.transpose_weight else weight.t())
        dense = [self._bias(bias, n) for bias, n in zip(biases, self.columns, strict=True)]
        if rows != x.shape[0]:
            x = x[:rows]
        if x.stride(1) != 1 and x.numel() > 0:
            x = x.contiguous()
        return Call(m, x, tuple(views), tuple(dense))

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        spec = self.spec
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{spec.label}: {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != spec.dtype:
            raise TypeError(f"{spec.label}: {name} must be {spec.dtype}, got {tensor.dtype}")
        if tensor.device != self.device:
            where = "the CPU" if self.device == _CPU else self.device
            raise ValueError(f"{spec.label}: {name} must be on {where}, got {tensor.device}")
        if tensor.layout != torch.strided:
            raise ValueError(f"{spec.label}: {name} must be a dense tensor, got {tensor.layout}")

    def _bias(self, bias: torch.Tensor | None, n: int) -> torch.Tensor | None:
        if bias is None:
            return None
        self._tensor("bias", bias)
        if bias.shape != (n,):
            raise ValueError(f"{self.spec.label}: bias must be [{n}], got {list(bias.shape)}")
        return bias.contiguous()


def _rows(spec: OpSpec, world: int, rank: int, given: int, m: int | None) -> tuple[int, int]:
    """(global rows, rows of x that count)."""
    gathers = spec.op is Op.ag_gemm
    if m is None:
        m = given * world if gathers else given
        if gathers and m == 0:
            raise ValueError(f"{spec.label}: x has no rows; pass m when M is not rows * world")
    if not 1 <= m <= spec.max_m:
        how = f" (x has {given} rows, world is {world})" if gathers else ""
        raise ValueError(f"{spec.label}: M must be in [1, max_m = {spec.max_m}], got {m}{how}")
    if not gathers:
        return m, given
    own, chunk = _C.core.row_count(m, world, rank), _C.core.chunk_rows(m, world)
    if given not in (own, chunk):
        raise ValueError(
            f"{spec.label}: with M = {m}, rank {rank} of {world} owns {own} rows; x must have "
            f"{own} rows, or {chunk} with padding at the end, got {given}"
        )
    return m, own

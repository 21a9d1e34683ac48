"""The arguments of one call, checked before anything is communicated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flux import _C
from flux.knobs import Op
from flux.ops.spec import OpSpec


@dataclass(frozen=True)
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


def check_call(
    spec: OpSpec,
    world: int,
    rank: int,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    m: int | None,
) -> Call:
    """Check a call's arguments against the op's specification.

    Raises:
        TypeError: a wrong dtype, or something that is not a tensor.
        ValueError: a wrong shape, device, or M out of range; the message says what was expected.
    """
    k = spec.local_k(world, rank)
    _check_tensor(spec, "x", x)
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"{spec.label}: x must be [rows, {k}], got {list(x.shape)}")
    m, rows = _rows(spec, world, rank, x.shape[0], m)
    columns = spec.local_n(world, rank)
    if len(weights) != len(columns) or len(biases) != len(columns):
        raise ValueError(
            f"{spec.label}: expected {len(columns)} weight(s) and bias(es), "
            f"got {len(weights)} and {len(biases)}"
        )
    views = []
    for weight, n in zip(weights, columns, strict=True):
        _check_tensor(spec, "weight", weight)
        expected = (k, n) if spec.transpose_weight else (n, k)
        if tuple(weight.shape) != expected:
            raise ValueError(
                f"{spec.label}: weight must be {list(expected)}"
                f"{' (transpose_weight)' if spec.transpose_weight else ''}, "
                f"got {list(weight.shape)}"
            )
        views.append(weight if spec.transpose_weight else weight.t())
    for bias, n in zip(biases, columns, strict=True):
        if bias is None:
            continue
        _check_tensor(spec, "bias", bias)
        if tuple(bias.shape) != (n,):
            raise ValueError(f"{spec.label}: bias must be [{n}], got {list(bias.shape)}")
    x = x[:rows]
    if x.stride(1) != 1 and x.numel() > 0:
        x = x.contiguous()
    return Call(m, x, tuple(views), tuple(None if b is None else b.contiguous() for b in biases))


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


def _check_tensor(spec: OpSpec, name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{spec.label}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != spec.dtype:
        raise TypeError(f"{spec.label}: {name} must be {spec.dtype}, got {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{spec.label}: {name} must be on the CPU, got {tensor.device}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{spec.label}: {name} must be a dense tensor, got {tensor.layout}")

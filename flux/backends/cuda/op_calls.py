"""What the calls of ops of experts and of heads are made with on GPUs."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from flux import _C
from flux.backends.cuda.operands import Fit
from flux.backends.cuda.workspaces import Workspaces
from flux.core.spec import OpSpec
from flux.core.tensors import address_of
from flux.transport.device import Device


class Empty(Protocol):
    """Allocates a tensor that a call uses: ``CudaBackend._empty``."""

    def __call__(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor [rows, columns]; the op's result dtype by default."""
        ...


class OpParts(NamedTuple):
    """What the calls of one op share.

    Attributes:
        spec: the op.
        device: the GPU.
        native: the op's calls.
        workspaces: of its kernels.
        fit: what its kernels can load.
    """

    spec: OpSpec
    device: Device
    native: _C.CudaOp
    workspaces: Workspaces
    fit: Fit


class OpCalls:
    """Puts calls of one op on streams."""

    def __init__(self, parts: OpParts) -> None:
        self._spec, self._device, self._native, self._workspaces, self._fit = parts

    def _address(self, tensor: torch.Tensor) -> int:
        self._device.keep(tensor)
        return address_of(tensor)

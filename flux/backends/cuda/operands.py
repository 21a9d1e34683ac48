"""Tensors as kernels on a GPU load them.

Memory of torch's caching allocator is handed out again in the order of the stream that it was
allocated on. So a tensor may be dropped as soon as a call has returned, and nothing needs
``record_stream``: x, weights, biases, scales and results are used on the caller's stream, and x and
its scales, by the copy stream, between two points of it (``forked_`` and ``joined_`` in
csrc/cuda_host/cuda_op.cpp). Peers use symmetric memory alone, and workspaces belong to one stream
each. Two things follow:

- What is made within a call must live until all of the call is on streams, or what is made next
  takes its place before a kernel has read it. ``Fit.call`` gives copies the life of the call.
- Tensors that were allocated on another stream than the current one are the caller's to order and
  to record, as with any operator of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flux.core.call import Call
from flux.core.spec import OpSpec
from flux.core.tensors import address_of
from flux.kernels.config import TMA_BYTES
from flux.transport.device import Device


def row_step(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements from one row of [rows, columns] to the next.

    The stride of a single row may be anything, also what kernels cannot load: it has none.
    """
    return stride[0] if shape[0] > 1 else shape[1]


def of_zeros(spec: OpSpec, call: Call, device: Device) -> Call:
    """Return a call on zeros, for a rank without a part of K: TMA has no empty maps."""
    rows = max(call.m, spec.n[0])
    zeros = device.zeros(rows * TMA_BYTES, torch.uint8).view(spec.dtype).view(rows, -1)
    weight = zeros[: spec.n[0]]
    if spec.transpose_weight:
        weight = weight.t()
    return replace(call, x=zeros[: call.m], weights=(weight,))


@dataclass(frozen=True)
class Fit:
    """What the kernels of an op can load.

    Attributes:
        elements: of one load; rows begin at multiples of it.
    """

    elements: int

    def unit(self, tensor: torch.Tensor) -> int:
        """Bytes of one load."""
        return self.elements * tensor.itemsize

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether kernels can load the tensor as it is.

        Rows must have no gaps and begin at multiples of ``unit``, as far as their length allows:
        kernels are chosen for the sizes of an op, so that it does.
        """
        unit = self.unit(tensor)
        if tensor.is_contiguous():
            return address_of(tensor) % unit == 0
        row_bytes = tensor.stride(0) * tensor.itemsize
        return tensor.stride(-1) == 1 and (address_of(tensor) | row_bytes) % unit == 0

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy that fits."""
        if self.fits(tensor):
            return tensor
        return tensor.clone(memory_format=torch.contiguous_format)

    def call(self, call: Call, gathers: bool) -> Call:
        """Return the call with operands that fit; keep it until all of it is on streams."""
        # Rows that are gathered are copied anyhow, from anywhere, but as one piece.
        x = call.x.contiguous() if gathers else self.tensor(call.x)
        return replace(
            call,
            x=x,
            weights=[self.tensor(weight) for weight in call.weights],
            biases=tuple(None if bias is None else self.tensor(bias) for bias in call.biases),
            scale_x=None if call.scale_x is None else self.tensor(call.scale_x),
            scale_weights=tuple(self.tensor(scale) for scale in call.scale_weights),
        )

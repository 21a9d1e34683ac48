"""Memory that the kernels of an op use during a call, beside operands and symmetric memory."""

from __future__ import annotations

import torch

from flux import _C
from flux.core.schedule import TileSchedule
from flux.core.tensors import address_of
from flux.transport.device import Device

MAX_CHECKED = 4096  # pairs of stream and rows


class Workspaces:
    """The workspaces of one op: one per stream, and one in each captured call.

    Args:
        device: the GPU that the kernels run on.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._by_stream: dict[int, torch.Tensor] = {}
        self._checked: set[tuple[int, int]] = set()  # stream and rows of calls that have room

    def make_room(
        self,
        native: _C.CudaOp,
        schedule: TileSchedule,
        stream: int,
        operands: list[_C.Operand],
        k: int,
    ) -> None:
        """Allocate the workspace of a call's kernels, once per stream and number of rows.

        Args:
            native: the op, which is told where the workspace is.
            schedule: of the call.
            stream: of the call.
            operands: its weights.
            k: depth of its GEMM on this rank.
        """
        if self._device.driver.capture(stream):
            return self._make_room_in_graph(native, schedule, stream, operands, k)
        rows = schedule.rows[schedule.rank] if schedule.rows else schedule.shape[0]
        key = (stream, rows)
        if key in self._checked:
            return
        if len(self._checked) >= MAX_CHECKED:
            self._checked.clear()
        self._checked.add(key)
        size = native.workspace_bytes(schedule.native, operands, k)
        kept = self._by_stream.get(stream)
        if size and (kept is None or kept.numel() < size):
            # The old one stays in use until the stream has passed it: the allocator knows.
            kept = self._by_stream[stream] = self._device.zeros(size, torch.uint8)
            native.set_workspace(stream, address_of(kept), kept.numel())

    def _make_room_in_graph(
        self,
        native: _C.CudaOp,
        schedule: TileSchedule,
        stream: int,
        operands: list[_C.Operand],
        k: int,
    ) -> None:
        """Allocate the workspace of a captured call in the graph, which zeroes it in every replay.

        The graph's allocator reuses it in the order of the stream, so no reference is kept.
        """
        size = native.workspace_bytes(schedule.native, operands, k)
        room = self._device.zeros(size, torch.uint8) if size else None
        self._checked = {(of, m) for of, m in self._checked if of != stream}
        self._by_stream.pop(stream, None)
        if room is not None:
            self._device.keep(room)
        native.set_workspace(stream, address_of(room) if room is not None else 0, size)

"""Virtual ranks with an emulated GPU each, in one process."""

from __future__ import annotations

import torch

from emulated import EmulatedDevice
from flux.transport.base import Memory
from flux.transport.one_gpu import OneGpuRank
from flux.transport.virtual import VirtualWorld


class GpuEach(VirtualWorld):
    """Ranks whose streams have multiprocessors of their own, and memory that others write to late.

    Ops are built in the order of ranks: copy streams of an op are made when it is built.
    """

    def __init__(self, world: int, device: EmulatedDevice) -> None:
        self._emulated = device
        super().__init__(world, device)
        for stream in self.streams:
            device.driver.destroy_stream(stream)
            self._streams.remove(stream)
        self.streams = [self.new_stream_of(rank) for rank in range(world)]

    @property
    def sm_share(self) -> int:
        return self.device.sm_count

    def new_stream_of(self, rank: int) -> int:
        """A stream on the GPU of a rank, which lives as long as the world."""
        with self._emulated.on_gpu(rank):
            return self.new_stream()

    def rank(self, rank: int) -> OneGpuRank:
        self._emulated.library.emulator_use_gpu(rank)  # for the streams of its op
        return super().rank(rank)

    def close(self) -> None:
        self._emulated.library.emulator_use_gpu(0)
        super().close()

    def memory(self, number: int, words: int, data_bytes: int) -> Memory:
        new = self._ops[number].memory is None
        memory = super().memory(number, words, data_bytes)
        if new:
            for rank, data in enumerate(memory.data):
                self._declare(rank, data)
        return memory

    def _declare(self, rank: int, data: torch.Tensor) -> None:
        self._emulated.gpu_memory(data.data_ptr(), data.numel() * data.element_size(), rank)

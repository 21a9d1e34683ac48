"""A GPU for benchmarks that is emulated: what a Machine does with CUDA events there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from emulated import EmulatedDevice
from flux.bench.places import gpu

T = TypeVar("T")


class EmulatedMachine(gpu.GpuMachine):
    """The host's clock, when the streams are done."""

    device: EmulatedDevice
    name = "emulated"

    def synchronize(self) -> None:
        self.device.finish()

    def free_bytes(self) -> int:
        return 1 << 40

    def time(
        self,
        run: Callable[[], T],
        line_up: Callable[[], object] = lambda: None,
        wait: Callable[[], object] = lambda: None,
    ) -> tuple[T, float]:
        self.synchronize()
        line_up()
        begin = time.perf_counter()
        result = run()
        wait()
        self.synchronize()
        return result, (time.perf_counter() - begin) * 1e3


def use(device: EmulatedDevice, monkeypatch: Any) -> None:
    """Run benchmarks of this process on the emulated machine."""
    monkeypatch.setattr(gpu, "open_machine", lambda index: EmulatedMachine(device))
    monkeypatch.setattr(gpu, "open_shared_machine", lambda: EmulatedMachine(device))

"""Clocks, power and limits of a GPU, as its driver's library says: no package is needed."""

from __future__ import annotations

import ctypes

_READ = {
    "sm_mhz": ("nvmlDeviceGetClockInfo", 1, 1.0),
    "memory_mhz": ("nvmlDeviceGetClockInfo", 2, 1.0),
    "watts": ("nvmlDeviceGetPowerUsage", None, 1e-3),
    "celsius": ("nvmlDeviceGetTemperature", 0, 1.0),
}
_LIMITS = {
    "most_sm_mhz": ("nvmlDeviceGetMaxClockInfo", 1, 1.0),
    "most_memory_mhz": ("nvmlDeviceGetMaxClockInfo", 2, 1.0),
    "limit_watts": ("nvmlDeviceGetEnforcedPowerLimit", None, 1e-3),
    "default_limit_watts": ("nvmlDeviceGetPowerManagementDefaultLimit", None, 1e-3),
}
"""Function of NVML, what is asked for, and the unit of the answer."""


class GpuClocks:
    """Reads one GPU. ``problem`` says why nothing can be read, if so.

    Args:
        uuid: of the GPU, as torch has it.
    """

    def __init__(self, uuid: str) -> None:
        self.problem = ""
        self._handle = ctypes.c_void_p()
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            self.problem = f"NVML: {error}"
            return
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        status = self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetHandleByUUID(
            ctypes.c_char_p(name), ctypes.byref(self._handle)
        )
        if status:
            self.problem = f"NVML: status {status} for {name.decode()}"

    def now(self) -> dict[str, float]:
        """Return clocks, watts and temperature; {} if they cannot be read."""
        return self._values(_READ)

    def limits(self) -> dict[str, float]:
        """Return the highest clocks and the limits of power; {} if they cannot be read."""
        return self._values(_LIMITS)

    def _values(self, asked: dict[str, tuple[str, int | None, float]]) -> dict[str, float]:
        if self.problem:
            return {}
        values, read = {}, ctypes.c_uint()
        for name, (function, what, unit) in asked.items():
            words = [] if what is None else [ctypes.c_uint(what)]
            if getattr(self._nvml, function)(self._handle, *words, ctypes.byref(read)) == 0:
                values[name] = round(read.value * unit, 1)
        return values

"""Detect this host's hardware: devices, links, NUMA domains, PCIe trees, network ports.

    torch              devices, multiprocessors, capability, memory
    NVML (nvidia-ml-py) NVLink and NVSwitch, PCIe generation and lanes
    /sys               NUMA domains, PCIe trees, network ports
    /proc/cpuinfo      the CPU, if there is no GPU

``detect`` measures nothing, so it takes milliseconds and gives the same result in every process.
"""

from __future__ import annotations

import contextlib
import platform
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from flux.machine.cluster import Cluster, DeviceSpec, Link, NetworkSpec
from flux.machine.host import system_text

# GB/s of one NVLink in one direction, by NVLink version as NVML reports it (NVIDIA's data sheets of
# V100, A100, H100 and B200: 50 GB/s for both directions together, 100 from the fifth generation
# on).
_NVLINK_GBS = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
_MAX_NVLINKS = 18
# GB/s of one PCIe lane in one direction, nominal, as in "16 GB/s for Gen3 x16".
_LANE_GBS = {1: 0.25, 2: 0.5, 3: 1.0, 4: 2.0, 5: 4.0, 6: 8.0}
# Floating-point operations (two per multiply-add) of one multiprocessor per clock, dense, by
# capability (NVIDIA's architecture white papers): fp16 and bf16, fp8, fp32 (tf32 off), fp64.
_SM_FLOPS = {
    (8, 0): {"bfloat16": 2048, "float16": 2048, "float32": 128, "float64": 128},
    (8, 6): {"bfloat16": 1024, "float16": 1024, "float32": 256, "float64": 4},
    (8, 9): {"bfloat16": 1024, "float16": 1024, "float8_e4m3fn": 2048, "float32": 256},
    (9, 0): {"bfloat16": 4096, "float16": 4096, "float8_e4m3fn": 8192, "float32": 256},
}
# Per core and clock: two 256-bit (AVX2) or 512-bit units, each doing multiply-adds.
_CORE_FLOPS = {"AVX512": 64.0, "AVX2": 32.0}
_PRODUCT = 256, 768  # rows, and columns and depth, of the product that is measured
_CPU_GHZ = 2.5  # if the machine does not report it
_CPU_MEMORY_GBS = 20.0  # per core: what one thread gets from DDR4 and DDR5 alike

LATENCY_US = {"nvswitch": 3.0, "nvlink": 3.0, "pcie": 8.0, "memory": 20.0}
NETWORK_LATENCY_US = {"infiniband": 5.0, "ethernet": 50.0, "unknown": 50.0}


@dataclass(frozen=True)
class GpuLinks:
    """The links of one GPU, as NVML reports them.

    Attributes:
        nvlinks: version of each NVLink that is up.
        switched: whether they lead to switches instead of GPUs.
        pcie: (generation, lanes), the most that card and slot support together.
        bus: PCI address, as /sys writes it.
    """

    nvlinks: tuple[int, ...]
    switched: bool
    pcie: tuple[int, int]
    bus: str

    @property
    def link(self) -> Link:
        """The link to the other GPUs of the host."""
        if self.nvlinks:
            kind = "nvswitch" if self.switched else "nvlink"
            gbs = sum(_NVLINK_GBS.get(version, 25.0) for version in self.nvlinks)
            return Link(kind, gbs, LATENCY_US[kind])
        generation, lanes = self.pcie
        return Link("pcie", _LANE_GBS.get(generation, 0.0) * lanes, LATENCY_US["pcie"])


class LinkReader(Protocol):
    """Reads the links of GPUs; tests substitute their own."""

    def gpus(self) -> list[GpuLinks]:
        """Return the links of each GPU, in the driver's numbering."""
        ...


class Nvml:
    """NVML, through nvidia-ml-py."""

    def __init__(self, module: Any = None) -> None:
        """Load the module, unless one is given.

        Raises:
            ImportError: nvidia-ml-py is not installed.
        """
        if module is None:
            import pynvml as module  # type: ignore[import-not-found,no-redef,unused-ignore]
        self._nvml = module

    def gpus(self) -> list[GpuLinks]:
        """Return the links of each GPU.

        Raises:
            OSError: there is no driver, or it does not answer.
        """
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            try:
                count = nvml.nvmlDeviceGetCount()
                return [self._gpu(nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)]
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def _gpu(self, handle: Any) -> GpuLinks:
        nvml = self._nvml
        versions, switched = [], False
        for link in range(_MAX_NVLINKS):
            try:
                if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                    continue
                versions.append(int(nvml.nvmlDeviceGetNvLinkVersion(handle, link)))
            except nvml.NVMLError:
                break  # no such link
            with contextlib.suppress(nvml.NVMLError, AttributeError):
                remote = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
                switched |= remote == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        pcie = (0, 0)
        with contextlib.suppress(nvml.NVMLError):
            generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
            pcie = (int(generation), int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)))
        bus = nvml.nvmlDeviceGetPciInfo(handle).busId
        bus = bus.decode() if isinstance(bus, bytes) else str(bus)
        # NVML writes the domain with eight digits, /sys with four.
        domain, _, rest = bus.lower().partition(":")
        return GpuLinks(tuple(versions), switched, pcie, f"{domain[-4:]}:{rest}")


def _number(text: str) -> float:
    """Return a number from a kernel file; 0 if it holds none or a negative one, such as -1."""
    return float(text) if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,15})?", text) else 0.0


@dataclass(frozen=True)
class System:
    """The files in /sys and /proc; tests use a tree of their own under ``root``."""

    root: Path = Path("/")

    def numa_domains(self) -> int:
        """Return the number of NUMA domains with memory or cores, at least one."""
        nodes = (self.root / "sys/devices/system/node").glob("node[0-9]*")
        return len(list(nodes)) or 1

    def tree(self, bus: str) -> str:
        """Return the PCIe root complex of a device, ``pci0000:3a``; empty if unknown."""
        path = (self.root / "sys/bus/pci/devices" / bus).resolve()
        return next((part for part in path.parts if re.fullmatch(r"pci[0-9a-f:]+", part)), "")

    def network(self) -> NetworkSpec:
        """Return the ports that are up, of the fastest kind: InfiniBand, else Ethernet cards."""
        rates = sorted(self._infiniband(), reverse=True)
        kind = "infiniband"
        if not rates:
            rates, kind = sorted(self._ethernet(), reverse=True), "ethernet"
        if not rates:
            return NetworkSpec("none")
        # Slower ports next to fast ones are for management.
        fast = [rate for rate in rates if rate == rates[0]]
        if rates[0] == 0:
            return NetworkSpec("unknown", len(fast), 0.0, NETWORK_LATENCY_US["unknown"])
        return NetworkSpec(kind, len(fast), rates[0], NETWORK_LATENCY_US[kind])

    def _infiniband(self) -> Iterator[float]:
        for port in (self.root / "sys/class/infiniband").glob("*/ports/*"):
            rate, unit, _ = system_text(port / "rate").partition(" Gb/sec")
            if unit and "ACTIVE" in system_text(port / "state"):
                yield _number(rate)

    def _ethernet(self) -> Iterator[float]:
        for card in (self.root / "sys/class/net").glob("*"):
            # Network cards have a `device` entry; bridges, tunnels and loopback have none.
            if not (card / "device").exists() or system_text(card / "operstate") == "down":
                continue
            speed = system_text(card / "speed")  # Mbit/s; -1 if the card does not report it
            yield _number(speed) / 1000

    def cpu(self) -> tuple[str, float]:
        """Return vendor, family and model of the CPU, and its clock in GHz."""
        lines = [
            line.partition(":") for line in system_text(self.root / "proc/cpuinfo").splitlines()
        ]
        of_first = {name.strip(): value.strip() for name, _, value in reversed(lines)}
        stated = [of_first.get(name, "") for name in ("vendor_id", "cpu family", "model")]
        clock = "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"
        limit = system_text(self.root / clock)  # kHz
        ghz = _number(limit) / 1e6 or _number(of_first.get("cpu MHz", "")) / 1000
        return "/".join(part for part in stated if part), ghz or _CPU_GHZ


def detect(kind: str | None = None, threads: int | None = None) -> Cluster:
    """Return this host as a rank sees it. Cached.

    Args:
        kind: kind of device that ranks compute with: ``cuda`` | ``cpu``; by default a GPU if there
            is one.
        threads: threads of a rank's GEMM on a CPU; by default torch's.
    """
    if kind is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        return _detect_cuda(torch.cuda.current_device())
    instructions = torch.backends.cpu.get_cpu_capability()
    return cpu_cluster(System(), threads or torch.get_num_threads(), instructions)


@lru_cache(maxsize=16)
def cpu_cluster(system: System, threads: int, instructions: str) -> Cluster:
    """Return a host whose ranks compute on the CPU with ``threads`` threads each. Cached."""
    model, ghz = system.cpu()
    per_core = _CORE_FLOPS.get(instructions.upper(), 8.0) * ghz * 1e-3
    peak = per_core * threads
    device = DeviceSpec(
        kind="cpu",
        arch=" ".join(part for part in (platform.machine(), instructions, model) if part),
        units=threads,
        memory_gbs=_CPU_MEMORY_GBS * threads,
        # CPUs without native 16-bit instructions widen 16-bit types first.
        tflops={"float64": peak / 2, "float32": peak, "bfloat16": peak / 2, "float16": peak / 2},
        name=f"{threads} thread{'s' if threads != 1 else ''} of a CPU",
    )
    return Cluster(
        name="this host",
        device=device,
        devices=1,
        hosts=1,
        numa_domains=system.numa_domains(),
        link=Link("memory", _CPU_MEMORY_GBS / 2, LATENCY_US["memory"]),
        network=system.network(),
    )


@lru_cache(maxsize=16)
def product_tflops(dtype: torch.dtype, threads: int) -> float:
    """Measure how fast the CPU multiplies, in 1e12 operations a second. Cached; some 20 ms.

    The peak says little: a core of a Sapphire Rapids reaches half of it in float32, and with its
    tile registers two to four times as much as is detected in bfloat16. Time is the calling
    thread's, so ranks that share cores are measured alike.

    In a thread of its own, which has no autocast, no default device, and no mode that counts what
    the caller runs.

    Args:
        dtype: of the operands.
        threads: of a product, as torch has them now.
    """
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(_measured_tflops, dtype, threads).result()


def _measured_tflops(dtype: torch.dtype, threads: int) -> float:
    rows, size = _PRODUCT[0] * min(threads, 8), _PRODUCT[1]
    weights = [torch.ones(size, size, dtype=dtype, device="cpu") for _ in range(4)]
    x = torch.ones(rows, size, dtype=dtype, device="cpu")
    times: list[float] = []
    began = time.thread_time()
    while len(times) < 3 or (len(times) < 16 and time.thread_time() - began < 0.02):
        begin = time.thread_time()
        torch.mm(x, weights[len(times) % 4].t())
        times.append(time.thread_time() - begin)
    warm = sorted(times[1:])
    return 2e-12 * rows * size * size / max(warm[len(warm) // 4], 1e-6)


@lru_cache(maxsize=16)
def _detect_cuda(index: int) -> Cluster:
    reader: LinkReader | None = None
    with contextlib.suppress(ImportError):
        reader = Nvml()
    properties = torch.cuda.get_device_properties(index)
    return cuda_cluster(System(), reader, properties, torch.cuda.device_count())


def cuda_cluster(
    system: System, reader: LinkReader | None, properties: Any, devices: int
) -> Cluster:
    """Return a host with ``devices`` GPUs; ``properties`` are torch's, of one of them."""
    capability = (properties.major, properties.minor)
    links: list[GpuLinks] = []
    if reader is not None:
        with contextlib.suppress(OSError):
            links = reader.gpus()
    ghz = getattr(properties, "clock_rate", 0) / 1e6 or 1.5  # kHz
    flops = _SM_FLOPS.get(capability, _SM_FLOPS[(8, 0)])
    units = properties.multi_processor_count
    # Two transfers per clock (double data rate). torch reports kHz and bits, if it reports them.
    bits, clock = (
        getattr(properties, name, 0) for name in ("memory_bus_width", "memory_clock_rate")
    )
    device = DeviceSpec(
        kind="cuda",
        arch=f"sm_{properties.major}{properties.minor}",
        units=units,
        memory_gb=properties.total_memory / 1e9,
        memory_gbs=2 * clock * bits / 8 / 1e6 or 1000.0,
        tflops={dtype: count * units * ghz * 1e-3 for dtype, count in flops.items()},
        name=properties.name,
    )
    if devices == 1:
        link = Link("none")
    else:
        # A group is as fast as its slowest member, so the slowest link counts.
        link = min((gpu.link for gpu in links), key=lambda link: link.gbs, default=Link("unknown"))
    trees = {system.tree(gpu.bus) for gpu in links} - {""}
    return Cluster(
        name="this host",
        device=device,
        devices=devices,
        hosts=1,
        numa_domains=system.numa_domains(),
        link=link,
        network=system.network(),
        trees=len(trees),
    )

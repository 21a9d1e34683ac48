"""`flux doctor`: show what was detected, what will be used, and why other parts are not.

Cheap features are tested rather than looked up: a shared-memory segment is created and removed, and
a process group of one rank reduces a number.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import flux
from flux import _C
from flux.cli.terminal import printable
from flux.core import env
from flux.doctor.ranks import verdicts
from flux.integrations import symm_mem
from flux.kernels import runtime
from flux.kernels.build import MissingToolError
from flux.kernels.registry import Registry, cache_root, default_roots
from flux.machine import host, toolchain
from flux.machine.cluster import Cluster, load_cluster, shipped_clusters, world_shape
from flux.machine.detection import detect
from flux.select.cache import default_caches
from flux.transport import shm
from flux.transport.placement import RankPlace

OK, ABSENT, WARNING, BROKEN = "ok", "absent", "warning", "broken"
_STYLE = {OK: "green", ABSENT: "dim", WARNING: "yellow", BROKEN: "bold red"}
_MARK = {OK: "+", ABSENT: "-", WARNING: "!", BROKEN: "x"}

_OLDEST_TORCH = (2, 9)
_SMALL_SHM = 256 << 20


@dataclass(frozen=True)
class Item:
    """One line: `status` is ok | absent (optional, missing) | warning | broken (essential)."""

    name: str
    value: str
    status: str = OK
    note: str = ""


@dataclass
class Findings:
    """All findings, by section, in display order."""

    sections: dict[str, list[Item]] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """False if something that every op needs is broken."""
        return all(item.status != BROKEN for items in self.sections.values() for item in items)

    def as_dict(self) -> dict[str, Any]:
        """Return the findings, for JSON."""
        sections = {
            title: [asdict(item) for item in items] for title, items in self.sections.items()
        }
        return {"usable": self.usable, "sections": sections}


def examine(places: Sequence[RankPlace] = ()) -> Findings:
    """Examine this machine. Takes a second or two, leaves nothing in place.

    Args:
        places: placement of the ranks that torchrun has started, to show the transports between
            them.
    """
    parts: dict[str, Callable[[], list[Item]]] = {
        "will be used": _choices,
        "software": _software,
        "cpu": _cpu,
        "shared memory": _shared_memory,
        "torch.distributed": _distributed,
        "cuda": _cuda,
        "topology": _topology,
        "kernel toolchain": _toolchain,
        "kernels": _kernels,
        "tuning": _tuning,
        "environment": _environment,
    }
    if places:
        parts["between ranks"] = lambda: rank_pairs(places)
    return Findings({title: _examined(part) for title, part in parts.items()})


def _examined(part: Callable[[], list[Item]]) -> list[Item]:
    """Return the items of a section; one, if a variable that it needs has a bad value."""
    try:
        return part()
    except env.VariableError as error:
        return [Item("environment", "a bad value", BROKEN, str(error))]


def _software() -> list[Item]:
    version = str(torch.__version__)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    old = numbers < _OLDEST_TORCH
    wanted = ".".join(map(str, _OLDEST_TORCH))
    return [
        Item("flux", flux.__version__, note=str(Path(flux.__file__).parent)),
        Item("native module", "loaded", note=str(_C.__file__)),
        Item("python", platform.python_version(), note=platform.platform()),
        Item("torch", version, BROKEN if old else OK, f"needs {wanted} or newer" if old else ""),
    ]


def _cpu() -> list[Item]:
    usable, present = host.available_cores(), os.cpu_count() or 1
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    limited = f"this process may use {usable} of {present}" if usable != present else ""
    return [
        Item("model", host.cpu_model()),
        Item("cores", str(usable), note=limited),
        Item("NUMA nodes", str(nodes)),
        Item("instruction set of torch", torch.backends.cpu.get_cpu_capability()),
        Item(
            "threads of torch", str(torch.get_num_threads()), note="per rank, unless it sets them"
        ),
    ]


def _shared_memory() -> list[Item]:
    items = []
    try:
        usage = shutil.disk_usage("/dev/shm")
        small = usage.free < _SMALL_SHM
        note = "an op needs its whole workspace here; in a container, raise --shm-size"
        items.append(Item("size of /dev/shm", _bytes(usage.total)))
        items.append(
            Item("free", _bytes(usage.free), WARNING if small else OK, note if small else "")
        )
    except OSError as error:
        items.append(Item("/dev/shm", "not there", WARNING, str(error)))
    try:
        _try_segment()
        items.append(Item("segment", "created, written and mapped again, as peers do"))
    except OSError as error:
        items.append(Item("segment", "cannot be created", BROKEN, str(error)))
    return items


def _try_segment() -> None:
    segment = shm.create(1 << 20)
    try:
        memoryview(shm.attach(segment, 1 << 20))[-1] = 42
        if memoryview(shm.attach(segment, 1 << 20))[-1] != 42:
            raise OSError("a second mapping does not see what the first one wrote")
    finally:
        os.close(segment.descriptor)


def _distributed() -> list[Item]:
    if not dist.is_available():
        return [Item("torch.distributed", "not in this torch", BROKEN, "ranks cannot find peers")]
    has_gloo = dist.is_gloo_available()
    items = [Item("gloo", *(_try_gloo() if has_gloo else ("not in this torch", BROKEN)))]
    others = (("nccl", dist.is_nccl_available), ("mpi", dist.is_mpi_available))
    for name, available in others:
        there = available()
        items.append(
            Item(name, "built in" if there else "not in this torch", OK if there else ABSENT)
        )
    return [*items, _async_tp()]


def _async_tp() -> Item:
    """Return whether torch.ops.symm_mem has kernels of flux, in this process or if enabled."""
    name = "torch.ops.symm_mem by flux"
    reason = symm_mem.reason_unsupported()
    if reason is not None:
        return Item(name, "not possible", ABSENT, reason)
    devices = symm_mem.enabled()
    note = "flux.integrations.symm_mem.enable() turns it on, in the process that calls it"
    return Item(name, f"on for {', '.join(devices)}" if devices else "off", OK, note)


def _try_gloo() -> tuple[str, str, str]:
    if dist.is_initialized():
        return "built in", OK, "a process group exists already: not tried"
    try:
        limit = timedelta(seconds=20)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        try:
            dist.all_reduce(torch.zeros(1))
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        return "does not work", BROKEN, str(error).splitlines()[0]
    return "works", OK, "tried with one rank"


def _cuda() -> list[Item]:
    built_for = torch.version.cuda
    if torch.cuda.is_available():
        items = [Item("CUDA of torch", str(built_for))]
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            items.append(
                Item(
                    f"device {index}",
                    f"{device.name}, sm_{device.major}{device.minor}",
                    note=f"{_bytes(device.total_memory)}, {device.multi_processor_count} SMs",
                )
            )
        return [*items, module_loading(os.environ.get("CUDA_MODULE_LOADING"))]
    driver = _driver()
    torch_side = Item("CUDA of torch", built_for) if built_for else _no_cuda_build()
    return [torch_side, driver, Item("devices", "none", ABSENT, _reason_no_devices(driver))]


def module_loading(value: str | None) -> Item:
    """Return when CUDA loads kernels; ``value``: of CUDA_MODULE_LOADING."""
    if value == "EAGER":
        return Item("CUDA_MODULE_LOADING", value)
    advice = "set it to EAGER: a kernel that is loaded while another one waits for a peer may hang"
    return Item("CUDA_MODULE_LOADING", value or "unset", WARNING, advice)


def _no_cuda_build() -> Item:
    return Item("CUDA of torch", "none", ABSENT, "torch is built without CUDA")


def _driver() -> Item:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
        version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
        return Item("NVIDIA driver", version.group() if version else text)
    except (OSError, IndexError):
        library = ctypes.util.find_library("cuda")
        if library:
            return Item("NVIDIA driver", library, WARNING, "library without a loaded kernel module")
        return Item("NVIDIA driver", "none", ABSENT)


def _reason_no_devices(driver: Item) -> str:
    reasons = [] if torch.version.cuda else ["torch is built without CUDA"]
    if driver.status != OK:
        reasons.append("no NVIDIA driver is loaded")
    return " and ".join(reasons) or "the driver shows none to this process"


def _topology() -> list[Item]:
    return topology_items(detect())


def topology_items(cluster: Cluster) -> list[Item]:
    """Return a cluster's parts, the fingerprint of a full host, and shipped clusters that match."""
    device, link, network = cluster.device, cluster.link, cluster.network
    ranks = max(cluster.devices, 2)
    shape = world_shape(["here"] * ranks)
    fingerprint = cluster.fingerprint(shape)
    like = [
        name for name in shipped_clusters() if load_cluster(name).fingerprint(shape) == fingerprint
    ]
    units = "threads of a rank" if device.kind == "cpu" else "SMs"
    domains = str(cluster.numa_domains)
    note = "described in tuning/clusters as: " + (", ".join(like) or "none of them")
    speed = f"{link.gbs:g} GB/s of a device in one direction, nominal" if link.gbs else ""
    if link.kind == "unknown":
        speed = "NVML was not to be asked: pip install nvidia-ml-py"
    items = [
        Item("device", f"{device.kind}, {device.arch}", note=f"{device.units} {units}"),
        Item("links between devices", link.kind, WARNING if link.kind == "unknown" else OK, speed),
        Item("NUMA domains of the host", domains),
    ]
    if cluster.trees:
        items.append(Item("PCIe trees with devices", str(cluster.trees)))
    rates = (
        f"{network.gbits:g} Gbit/s each" if network.gbits else "speed not stated, so ops measure it"
    )
    ports = f"{network.nics} x {network.kind}" if network.nics else "none"
    items.append(
        Item("network ports", ports, OK if network.nics else ABSENT, rates * (network.nics > 0))
    )
    return [*items, Item(f"fingerprint of {ranks} ranks", fingerprint, note=note)]


def _toolchain() -> list[Item]:
    packages = " or ".join(toolchain.NVSHMEM_PACKAGES)
    return [
        _tool("nvcc", toolchain.nvcc(), "not in CUDA_HOME, PATH or the nvidia-cuda-nvcc package"),
        _tool("CUTLASS", toolchain.cutlass(), "the nvidia-cutlass package is not installed"),
        _tool("NVSHMEM", toolchain.nvshmem(), f"no package {packages}"),
        _runtime(),
    ]


def _runtime() -> Item:
    """Return the library for ranks on several nodes."""
    try:
        library = runtime.usable(default_roots())
    except MissingToolError as error:
        return Item(runtime.NAME, "none", ABSENT, str(error))
    archs = ", ".join(f"sm_{arch}" for arch in library.archs)
    built_for = f"{archs}, {library.package} {library.nvshmem}: {library.path}"
    return Item(runtime.NAME, "built", note=built_for)


def _tool(name: str, tool: toolchain.Tool | None, otherwise: str) -> Item:
    if tool is None:
        return Item(name, "none", ABSENT, otherwise)
    return Item(name, tool.version or "?", WARNING if tool.problem else OK, tool.describe())


def _kernels() -> list[Item]:
    built = Registry.load()
    items = [Item("cache", str(cache_root()), note="FLUX_KERNEL_CACHE names another")]
    counts = Counter((kernel.config.op, kernel.config.arch) for kernel in built.kernels.values())
    if counts:
        items.append(Item("libraries", str(len(built.libraries)), note=_roots_of(built)))
    else:
        items.append(Item("libraries", "none", ABSENT, "run flux compile"))
    for (op, arch), count in sorted(counts.items()):
        items.append(Item(f"{op} sm_{arch}", f"{count} config{'s' if count > 1 else ''}"))
    if built.traced:
        note = "for flux trace"
        items.append(Item("trace builds", f"{len(built.traced)} configs", note=note))
    if built.stale:
        note = "built from other sources, not used; run flux compile"
        items.append(Item("stale libraries", str(len(built.stale)), WARNING, note))
    if built.damaged:
        note = "set aside, not used; can be deleted: " + ", ".join(map(str, built.damaged))
        items.append(Item("damaged libraries", str(len(built.damaged)), WARNING, note))
    for path, reason in built.refused:
        note = f"{reason}: not used; chown or chmod go-w it, or name another in FLUX_KERNEL_CACHE"
        items.append(Item("refused", str(path), WARNING, note))
    return items


def _tuning() -> list[Item]:
    own, *shipped = default_caches()
    entries = list(own.entries())
    winners = sum(len(entry.winners) for entry in entries)
    note = (
        f"for {len(entries)} ops"
        if winners
        else "the cost model chooses knobs; run flux tune for faster ones"
    )
    items = [
        Item("cache", str(own.root), note="FLUX_TUNE_CACHE names another"),
        Item("winners", str(winners), OK if winners else ABSENT, note),
    ]
    came = sum(len(entry.winners) for cache in shipped for entry in cache.entries())
    items.append(Item("winners shipped with flux", str(came), OK if came else ABSENT))
    if own.damaged():
        note = "set aside, not used; can be deleted: " + ", ".join(map(str, own.damaged()))
        items.append(Item("damaged files", str(len(own.damaged())), WARNING, note))
    return items


def _roots_of(built: Registry) -> str:
    directories = Counter(library.directory.parent for library in built.libraries)
    return ", ".join(f"{count} in {directory}" for directory, count in directories.items())


def _environment() -> list[Item]:
    items = []
    for variable in env.VARIABLES:
        text = os.environ.get(variable.name, "")
        value = repr(text) if text else "unset"
        try:
            variable.get()
            items.append(Item(variable.name, value, OK if text else ABSENT, variable.help))
        except ValueError as error:
            items.append(Item(variable.name, value, BROKEN, str(error)))
    return items


def _choices() -> list[Item]:
    cpu = [
        Item("backend", "cpu", note="one process per rank, GEMM tiles by torch"),
        Item("transport", "shm", note="shared memory between the ranks of one host"),
        Item("transport between hosts", "send_recv", note="torch.distributed, point to point"),
    ]
    if not torch.cuda.is_available():
        return [*cpu, Item("not backend cuda", "not used", ABSENT, _reason_no_devices(_driver()))]
    built = bool(Registry.load().kernels)
    note = "" if built else "no kernels are built; run flux compile"
    groups = Item("of groups with a CUDA backend", "cuda", OK if built else WARNING, note)
    return [*cpu, groups, *gpu_pairs(torch.cuda.device_count(), torch.cuda.can_device_access_peer)]


def gpu_pairs(count: int, reaches: Callable[[int, int], bool]) -> list[Item]:
    """Return the transport between each pair of ``count`` GPUs of this host, and why.

    ``reaches(a, b)``: whether a can address the memory of b.
    """
    if count == 1:
        note = "one GPU: all ranks on it with flux.transport.virtual, or behind PCIe with loopback"
        return [Item("between GPUs", "nothing", ABSENT, note)]
    items = []
    for a in range(count):
        for b in range(a + 1, count):
            missing = [f"{x} cannot address {y}" for x, y in ((a, b), (b, a)) if not reaches(x, y)]
            items.append(
                Item(
                    f"GPU {a} - GPU {b}",
                    "send_recv",
                    WARNING,
                    f"{', '.join(missing)}: no P2P, so NCCL",
                )
                if missing
                else Item(f"GPU {a} - GPU {b}", "symm_mem", note="each addresses the other (P2P)")
            )
    return items


def rank_pairs(places: Sequence[RankPlace]) -> list[Item]:
    """Return the transport between each pair of ranks, and why; equal pairs in one line."""
    if len(places) == 1:
        return [Item("ranks", "1", note="nothing is moved")]
    items = []
    for verdict, pairs in verdicts(places).items():
        name = ", ".join(f"{a}-{b}" for a, b in pairs)
        status = WARNING if verdict.slow else OK
        items.append(Item(verdict.transport, f"ranks {name}", status, verdict.why))
    return items


def _bytes(count: int) -> str:
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    return f"{count / (1 << 20):.0f} MiB"


def show(findings: Findings, console: Console) -> None:
    """Print one panel per section, and a verdict. Unset variables are left out."""
    for title, items in findings.sections.items():
        if title == "environment":
            items = [item for item in items if item.status != ABSENT]
            if not items:
                continue
        rows = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
        rows.add_column(no_wrap=True)
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column(overflow="fold")
        rows.add_column(style="dim", overflow="fold")
        for item in items:
            style = _STYLE[item.status]
            name, value, note = map(printable, (item.name, item.value, item.note))
            rows.add_row(
                Text(_MARK[item.status], style), Text(name), Text(value, style), Text(note)
            )
        console.print(Panel(rows, title=title, title_align="left", box=box.ROUNDED))
    broken = [item for items in findings.sections.values() for item in items]
    broken = [item for item in broken if item.status == BROKEN]
    if not broken:
        console.print(Text("flux is ready to run.", "bold green"))
        return
    lines = [Text(printable(f"{i.name}: {i.value}. {i.note}"), "red") for i in broken]
    console.print(Group(Text("flux cannot run:", "bold red"), *lines))

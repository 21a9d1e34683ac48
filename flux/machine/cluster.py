"""The hardware of a cluster, read from `tuning/clusters/*.toml` or detected (detection.py).

``flux.core.knobs.Topology`` is the arrangement of one group's ranks. ``Cluster`` is the device
of each rank and the links between them, for the cost model and the cache of winners.

The *fingerprint* holds everything that the validity of a winner depends on: architecture and number
of multiprocessors, memory, kind and speed of the links, and the shape of the world. It does not
hold product names, which determine neither architecture nor multiprocessors: there are H100s of 114
and of 132. A cluster file and the detection of the same hardware give the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flux.core.datafile import Table, data_root, find

if TYPE_CHECKING:
    from flux.machine.calibration import Calibration

DEVICE_KINDS = ("cuda", "cpu")
LINK_KINDS = ("nvswitch", "nvlink", "pcie", "memory", "none", "unknown")
NETWORK_KINDS = ("infiniband", "ethernet", "none", "unknown")

_MEMORY_CLASS_GB = 16
"""Memory sizes are rounded to these steps. Drivers reserve a few hundred MB, depending on version;
devices that share architecture and multiprocessors (H100, H200) differ by 60 GB."""

_OF_DEVICE = ("kind", "arch", "units")
"""What the fingerprint says of every device."""


@dataclass(frozen=True)
class DeviceSpec:
    """The device of one rank.

    Attributes:
        kind: ``cuda`` | ``cpu``.
        arch: ``sm_90``; of a CPU its instruction set, vendor, family and model.
        units: multiprocessors; of a CPU the threads of a rank's GEMM.
        memory_gb: 1e9 bytes of its own memory; 0 on a CPU.
        memory_gbs: GB/s of that memory.
        tflops: dense peak by dtype, 1e12 operations per second of the whole device.
        name: for display.
        gemm_share: share of the peak that large GEMMs reach, if measured; 0: not measured.
        attention_share: likewise of attention.
        memory_share: share of the memory's speed that elementwise kernels reach, likewise.
        measured: times by size, which plans use in place of these shares.
        crowding: threads of ranks on each core of a machine, at least 1. The speeds are what is
            left to one of them.
    """

    kind: str
    arch: str
    units: int
    memory_gb: float = 0.0
    memory_gbs: float = 0.0
    tflops: Mapping[str, float] = field(default_factory=dict)
    name: str = ""
    gemm_share: float = 0.0
    attention_share: float = 0.0
    memory_share: float = 0.0
    measured: Calibration | None = field(default=None, repr=False)
    crowding: float = 1.0


@dataclass(frozen=True)
class Link:
    """The link between the devices of a host.

    Attributes:
        kind: ``nvswitch`` | ``nvlink`` (device to device) | ``pcie`` | ``memory`` (ranks on a CPU)
            | ``none`` (one device) | ``unknown``.
        gbs: GB/s of one device in one direction, nominal.
        latency_us: latency of one transfer.
        numa_gbs: GB/s in one direction between two NUMA domains of a host, shared by all transfers
            that cross; 0: not known, or no limit.
        library_gbs: GB/s that a rank of a library's collective reaches inside a host, if measured;
            0: a share of ``gbs``.
    """

    kind: str
    gbs: float = 0.0
    latency_us: float = 0.0
    numa_gbs: float = 0.0
    library_gbs: float = 0.0


@dataclass(frozen=True)
class NetworkSpec:
    """The network between hosts.

    Attributes:
        kind: ``infiniband`` | ``ethernet`` | ``none`` | ``unknown``.
        nics: ports of a host that are up.
        gbits: Gbit/s of one port in one direction; 0 if unknown.
        latency_us: latency of one message.
        gbs: GB/s of a host in one direction.
    """

    kind: str
    nics: int = 0
    gbits: float = 0.0
    latency_us: float = 0.0
    gbs: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        vars(self).update(gbs=self.nics * self.gbits / 8)


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal hosts.

    Attributes:
        name: for display.
        device: the device of each rank.
        devices: devices per host.
        hosts: number of hosts; 1 if detected, because detection sees only this host.
        numa_domains: NUMA domains per host.
        link: between the devices of a host.
        network: between hosts.
        trees: PCIe root complexes that the devices of a host are attached to; 0 if unknown.
        overlap: overlap effectiveness of computation beside a collective, by the least number of
            hosts that the collective is on; empty: the default of flux/select/hardware.py.
        source: the file, or "detected".
    """

    name: str
    device: DeviceSpec
    devices: int
    hosts: int
    numa_domains: int
    link: Link
    network: NetworkSpec
    trees: int = 0
    overlap: Mapping[int, float] = field(default_factory=dict)
    source: str = "detected"

    @property
    def switch_adds(self) -> bool:
        """Whether the switch between a host's devices adds up what they hold (NVLink SHARP)."""
        return self.link.kind == "nvswitch" and self.device.arch == "sm_90"

    def parts(self, shape: str) -> dict[str, Any]:
        """Return the inputs of the fingerprint, for a world of this shape (``world_shape``)."""
        device = self.device
        of_device: dict[str, Any] = {name: getattr(device, name) for name in _OF_DEVICE}
        if device.kind == "cuda":
            memory_gb = _MEMORY_CLASS_GB * round(device.memory_gb / _MEMORY_CLASS_GB)
            of_device["memory_gb"] = memory_gb
        parts: dict[str, Any] = {"device": of_device, "world": shape}
        if shape != "1x1":
            parts["link"] = self.link.kind
            # No source states the speed of a CPU's memory; the CPU model stands for it.
            if device.kind != "cpu":
                parts["link_gbs"] = _two_digits(self.link.gbs)
            # Only links through a CPU depend on the NUMA domain of its memory; links through
            # switches do not.
            if self.link.kind in ("pcie", "memory"):
                parts["numa_domains"] = self.numa_domains
        if not shape.startswith("1x"):
            network = self.network
            parts["network"] = {"nics": network.nics, "gbits": _two_digits(network.gbits)}
        return parts

    def crowded(self, threads: float) -> Cluster:
        """Return this host of CPU ranks with so many threads on each core, at least 1."""
        device = self.device
        slower = replace(
            device,
            tflops={dtype: speed / threads for dtype, speed in device.tflops.items()},
            memory_gbs=device.memory_gbs / threads,
            crowding=device.crowding * threads,
        )
        return replace(self, device=slower, link=replace(self.link, gbs=self.link.gbs / threads))

    def fingerprint(self, shape: str) -> str:
        """Return 16 hexadecimal digits that identify what a winner's validity depends on."""
        return digest(self.parts(shape))


def bytes_per_ms(gbs: float) -> float:
    """Return the speed of a link of this many GB/s; of 1 Gbit/s if its speed is unknown (0)."""
    return (gbs or 0.125) * 1e6


def digest(parts: Mapping[str, Any]) -> str:
    """Return the fingerprint of these parts."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def group_parts(clusters: Sequence[dict[str, object]]) -> dict[str, object]:
    """Return the inputs of a group's fingerprint: those of its ranks, each kind once."""
    first = clusters[0]
    if all(other == first for other in clusters):
        return first
    kinds = sorted({repr(sorted(other.items())) for other in clusters})
    return {**first, "mixed": kinds}


def world_shape(hosts: Sequence[Hashable]) -> str:
    """Return the shape of a world, given each rank's host: ``2x4`` (hosts x ranks) or ``3+1``."""
    counts = list(Counter(hosts).values())
    if len(set(counts)) == 1:
        return f"{len(counts)}x{counts[0]}"
    return "+".join(map(str, counts))


def _two_digits(value: float) -> float:
    """Round to two digits: sysfs and data sheets differ in the third digit of a nominal speed."""
    return float(f"{value:.2g}")


def load_cluster(
    name: str | Path, calibration: str | Path | None = None, hosts: int | None = None
) -> Cluster:
    """Return the cluster that a file describes: a path, or the name of one in `tuning/clusters`.

    ``calibration``: a file of `flux plan calibrate`, in place of the one that the cluster names.
    ``hosts``: to assume, in place of the file's.

    Raises:
        ValueError: no such file, or wrong contents; the message names file and key.
    """
    file = find("clusters", name)
    top = Table.load(file)
    table = top.table("device")
    speeds = table.table("tflops")
    device = DeviceSpec(
        kind=table.text("kind", choices=DEVICE_KINDS),
        arch=table.text("arch"),
        units=table.integer("units"),
        memory_gb=table.number("memory_gb", 0.0, most=1e6),  # more are bytes
        memory_gbs=table.number("memory_gbs", least=0.001, most=1e6),
        tflops={dtype: speeds.number(dtype, least=1e-6) for dtype in speeds.keys},
        name=table.text("name"),
        gemm_share=table.number("gemm_share", 0.0, most=1.0),
        attention_share=table.number("attention_share", 0.0, most=1.0),
        memory_share=table.number("memory_share", 0.0, most=1.0),
    )
    named = table.text("calibration", "")
    if calibration is None and named:
        calibration = file.parent / named
    described = ""
    if calibration is not None:
        device = calibrated(device, Path(calibration))
        described = f", {device.measured.kinds if device.measured else ''} of {calibration}"
    devices = table.integer("per_host")
    if not device.tflops:
        table.fail("tflops", "expected at least one dtype")
    if device.kind == "cuda" and not device.arch.startswith("sm_"):
        table.fail("arch", f"expected sm_<capability> of a cuda device, got {device.arch!r}")
    if device.kind == "cuda" and device.memory_gb < 1:
        table.fail("memory_gb", f"expected a number >= 1 of a cuda device, got {device.memory_gb}")
    table.done()
    table = top.table("link")
    kind = table.text("kind", choices=LINK_KINDS)
    speed = 0.0 if kind in ("none", "unknown") else 0.001
    link = Link(
        kind,
        table.number("gbs", least=speed),
        table.number("latency_us"),
        table.number("numa_gbs", 0.0),
        table.number("library_gbs", 0.0),
    )
    table.done()
    table = top.table("network")
    kind = table.text("kind", choices=NETWORK_KINDS)
    some = 0 if kind == "none" else 1
    network = NetworkSpec(
        kind,
        table.integer("nics", least=some),
        table.number("gbits", least=0.001 * some),
        table.number("latency_us"),
    )
    table.done()
    overlap = _overlap(top.table("overlap")) if "overlap" in top.keys else {}
    cluster = Cluster(
        name=top.text("name") + described,
        device=device,
        devices=devices,
        hosts=top.integer("hosts"),
        numa_domains=top.integer("numa_domains"),
        link=link,
        network=network,
        trees=top.integer("trees", 0, least=0),
        overlap=overlap,
        source=str(file),
    )
    top.text("described_in")
    top.done()
    if cluster.hosts > 1 and network.kind == "none":
        top.fail("network.kind", f"{cluster.hosts} hosts need a network, got 'none'")
    if hosts is None:
        return cluster
    if hosts < 1:
        raise ValueError(f"hosts must be at least 1, got {hosts}")
    return replace(cluster, hosts=hosts)


def _overlap(table: Table) -> dict[int, float]:
    """Return the overlap effectiveness that a file states, by the least number of hosts."""
    for key in table.keys:
        if not key.isdecimal() or key.startswith("0"):
            table.fail(key, "expected a number of hosts")
    if "1" not in table.keys:
        table.fail("1", "missing")
    return {int(key): table.number(key, most=1.0) for key in table.keys}


def calibrated(device: DeviceSpec, path: Path) -> DeviceSpec:
    """Return a device with measured times, and the shares of its peaks that they are.

    A GEMM that is faster than the peak raises it.

    Raises:
        ValueError: the file cannot be used, or is of another kind of device or GPU.
    """
    from flux.machine.calibration import read_calibration

    measured = read_calibration(path)
    if measured.kind != device.kind or (device.kind == "cuda" and measured.arch != device.arch):
        raise ValueError(f"{path} is of {measured.kind} {measured.arch}, not of {device.arch}")
    operations, nbytes = measured.most()
    peak = device.tflops.get(measured.dtype) or min(device.tflops.values())
    share = operations / (1e12 * peak)
    more = max(1.0, share)  # the file's peak is of a slower CPU
    return replace(
        device,
        measured=measured,
        tflops={dtype: speed * more for dtype, speed in device.tflops.items()},
        gemm_share=share / more,
        memory_share=nbytes / (1e9 * device.memory_gbs) or device.memory_share,
    )


def shipped_clusters() -> list[str]:
    """Return the names of the clusters that flux ships."""
    return sorted(file.stem for file in (data_root() / "clusters").glob("*.toml"))

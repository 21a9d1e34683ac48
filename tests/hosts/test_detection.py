"""Detection, on trees of files and drivers that stand for machines that are not here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flux.doctor.examine import topology_items
from flux.machine.cluster import load_cluster
from flux.machine.detection import GpuLinks, Nvml, System, cpu_cluster, cuda_cluster, detect


def write(root: Path, files: dict[str, str]) -> System:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return System(root)


def infiniband(ports: int, rate: str = "400 Gb/sec (4X NDR)") -> dict[str, str]:
    files = {}
    for number in range(ports):
        base = f"sys/class/infiniband/mlx5_{number}/ports/1"
        files |= {f"{base}/rate": rate + "\n", f"{base}/state": "4: ACTIVE\n"}
    return files


def numa(count: int) -> dict[str, str]:
    return {f"sys/devices/system/node/node{i}/cpulist": "0-7\n" for i in range(count)}


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """NVML of a host with GPUs that have ``links`` NVLinks of ``version``."""

    NVMLError = FakeNvmlError
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    def __init__(self, gpus: int, links: int, version: int, switched: bool, gen: int = 5) -> None:
        self.count, self.links, self.version, self.gen = gpus, links, version, gen
        self.remote = 2 if switched else 0
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self.links:
            raise FakeNvmlError("Not Supported")
        return 1

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        return self.version

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return self.remote

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self.gen

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{0x10 + handle:02X}:00.0".encode())


def gpu(major: int, minor: int, sms: int, memory: float, name: str = "some GPU") -> Any:
    return SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=sms,
        total_memory=int(memory),
        name=name,
        clock_rate=1_755_000,
    )


H100 = (9, 0, 132, 85.0e9)
A100 = (8, 0, 108, 85.1e9)
A40 = (8, 6, 84, 47.7e9)
H200 = (9, 0, 132, 150.1e9)


@pytest.mark.parametrize(
    ("like", "device", "links", "version", "gen", "network"),
    [
        ("dhelix-h100", H100, 18, 4, 5, infiniband(8)),
        ("flux-h800", H100, 8, 4, 5, infiniband(8)),
        ("h200", H200, 18, 4, 5, infiniband(8)),
        ("flux-a100-nvlink", A100, 12, 3, 4, infiniband(4, "200 Gb/sec (4X HDR)")),
        ("dhelix-a800", A100, 8, 3, 4, infiniband(4, "200 Gb/sec (4X HDR)")),
        ("flux-a100-pcie", A100, 0, 0, 4, infiniband(2, "100 Gb/sec (4X EDR)")),
        ("dhelix-a40", A40, 0, 0, 4, infiniband(1, "100 Gb/sec (4X EDR)")),
    ],
)
def test_hardware_has_the_fingerprint_of_the_file_that_describes_it(
    tmp_path: Path,
    like: str,
    device: tuple[int, int, int, float],
    links: int,
    version: int,
    gen: int,
    network: dict[str, str],
) -> None:
    system = write(tmp_path, numa(2) | network)
    reader = Nvml(FakeNvml(8, links, version, switched=True, gen=gen))
    found = cuda_cluster(system, reader, gpu(*device, name="whatever"), 8)
    described = load_cluster(like)
    for shape in ("1x8", "1x4", "2x8"):
        assert found.fingerprint(shape) == described.fingerprint(shape), found.parts(shape)
    assert found.link.kind == described.link.kind


def test_nvml_is_closed_and_its_errors_are_not_fatal() -> None:
    driver = FakeNvml(2, 4, 3, switched=False)
    first, _ = Nvml(driver).gpus()
    assert driver.open == 0
    assert first == GpuLinks((3, 3, 3, 3), False, (5, 16), "0000:10:00.0")
    assert first.link.kind == "nvlink" and first.link.gbs == 100

    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise FakeNvmlError("Driver Not Loaded")

    broken = Nvml(Broken(2, 0, 0, False))
    with pytest.raises(OSError, match="Driver Not Loaded"):
        broken.gpus()
    assert cuda_cluster(System(), broken, gpu(*A100), 2).link.kind == "unknown"


def test_slowest_link_determines_the_bandwidth() -> None:
    class Mixed:
        def gpus(self) -> list[GpuLinks]:
            return [
                GpuLinks((4,) * 18, True, (5, 16), "0000:10:00.0"),
                GpuLinks((), False, (4, 8), "0000:11:00.0"),
            ]

    found = cuda_cluster(System(Path("/nowhere")), Mixed(), gpu(*H100), 2)
    assert (found.link.kind, found.link.gbs) == ("pcie", 16)


def test_one_device_has_no_links_and_absent_nvml_is_reported(tmp_path: Path) -> None:
    system = System(tmp_path)
    assert cuda_cluster(system, None, gpu(*H100), 1).link.kind == "none"
    unknown = cuda_cluster(system, None, gpu(*H100), 4)
    item = next(i for i in topology_items(unknown) if i.name == "links between devices")
    assert item.status == "warning" and "nvidia-ml-py" in item.note


def test_pcie_trees_are_counted(tmp_path: Path) -> None:
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    for number, tree in enumerate(("pci0000:00", "pci0000:00", "pci0000:80", "pci0000:80")):
        bus = f"0000:{0x10 + number:02x}:00.0"
        real = tmp_path / "sys/devices" / tree / "0000:01:00.0" / bus
        real.mkdir(parents=True)
        (devices / bus).symlink_to(real)
    found = cuda_cluster(System(tmp_path), Nvml(FakeNvml(4, 0, 0, False)), gpu(*A100), 4)
    assert found.trees == 2


def test_network_is_detected_from_active_ports(tmp_path: Path) -> None:
    files = infiniband(2) | {
        "sys/class/infiniband/mlx5_9/ports/1/rate": "40 Gb/sec (4X QDR)",
        "sys/class/infiniband/mlx5_9/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_8/ports/1/rate": "400 Gb/sec (4X NDR)",
        "sys/class/infiniband/mlx5_8/ports/1/state": "1: DOWN",
    }
    network = write(tmp_path / "a", files).network()
    assert (network.kind, network.nics, network.gbits) == ("infiniband", 2, 400)

    cards = {}
    for name, speed, state in (("eth0", "25000", "up"), ("eth1", "25000", "down")):
        base = f"sys/class/net/{name}"
        cards |= {f"{base}/speed": speed, f"{base}/operstate": state, f"{base}/device/vendor": ""}
    cards |= {"sys/class/net/lo/operstate": "unknown", "sys/class/net/docker0/speed": "10000"}
    network = write(tmp_path / "b", cards).network()
    assert (network.kind, network.nics, network.gbits) == ("ethernet", 1, 25)

    virtual = {"sys/class/net/eth0/speed": "-1", "sys/class/net/eth0/device/vendor": ""}
    network = write(tmp_path / "c", virtual).network()
    assert (network.kind, network.nics, network.gbits) == ("unknown", 1, 0)
    assert System(tmp_path / "nothing").network().kind == "none"


CPUINFO = """processor : 0
vendor_id : GenuineIntel
cpu family : 6
model : 143
model name : Intel(R) Xeon(R) Platinum 8480+
cpu MHz : 2000.000
"""


def test_a_cpu_is_identified_by_instructions_and_threads_not_by_name(tmp_path: Path) -> None:
    system = write(tmp_path / "a", numa(4) | {"proc/cpuinfo": CPUINFO})
    found = cpu_cluster(system, 8, "AVX512")
    assert found.numa_domains == 4
    assert found.device.arch.endswith("AVX512 GenuineIntel/6/143")
    assert found.device.tflops["float32"] == pytest.approx(8 * 64 * 2.0e-3)
    renamed = CPUINFO.replace("Platinum 8480+", "Gold")
    same = cpu_cluster(write(tmp_path / "b", numa(4) | {"proc/cpuinfo": renamed}), 8, "AVX512")
    assert same.fingerprint("1x2") == found.fingerprint("1x2")
    assert cpu_cluster(system, 4, "AVX512").fingerprint("1x2") != found.fingerprint("1x2")
    assert cpu_cluster(system, 8, "AVX2").fingerprint("1x2") != found.fingerprint("1x2")


def test_this_machine_is_detected_the_same_twice() -> None:
    assert detect("cpu").fingerprint("1x2") == detect("cpu").fingerprint("1x2")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert detect("cpu").device.units == 1
    finally:
        torch.set_num_threads(before)
    assert detect("cpu").device.units == before
    names = [item.name for item in topology_items(detect("cpu"))]
    assert {"device", "links between devices", "NUMA domains of the host", "network ports"} <= set(
        names
    )
    assert any(name.startswith("fingerprint of") for name in names)

"""Cluster files: what they say, what is refused, and what a fingerprint depends on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flux.core.datafile import data_root, find
from flux.machine.cluster import (
    Cluster,
    DeviceSpec,
    Link,
    NetworkSpec,
    load_cluster,
    shipped_clusters,
    world_shape,
)

PAPERS = {
    # name: (host devices, kind of link, GB/s in both directions, ports, Gbit/s each)
    "flux-a100-pcie": (8, "pcie", 64, 2, 100),
    "flux-a100-nvlink": (8, "nvswitch", 600, 4, 200),
    "flux-h800": (8, "nvswitch", 400, 8, 400),
    "centauri-a": (8, "nvswitch", 600, 1, 200),
    "centauri-b": (8, "nvswitch", 600, 4, 200),
    "dhelix-a40": (8, "pcie", 64, 1, 100),
    "dhelix-a800": (8, "nvswitch", 400, 4, 200),
    "dhelix-h100": (8, "nvswitch", 900, 8, 400),
    "domino-dgx-h100": (8, "nvswitch", 900, 8, 400),
    "h200": (8, "nvswitch", 900, 8, 400),
}


def test_every_cluster_of_the_papers_is_there() -> None:
    assert {*PAPERS, "cpu"} <= set(shipped_clusters())


@pytest.mark.parametrize("name", PAPERS)
def test_clusters_have_the_figures_of_the_papers(name: str) -> None:
    devices, kind, gbs, ports, gbits = PAPERS[name]
    found = load_cluster(name)
    assert (found.devices, found.link.kind, 2 * found.link.gbs) == (devices, kind, gbs)
    assert (found.network.nics, found.network.gbits) == (ports, gbits)


@pytest.mark.parametrize("name", shipped_clusters())
def test_every_figure_of_a_cluster_has_its_source(name: str) -> None:
    text = (data_root() / "clusters" / f"{name}.toml").read_text(encoding="utf-8")
    assert "described_in" in text
    for key in ("memory_gbs", "gbs", "nics", "latency_us"):
        for line in re.findall(rf"^{key} = .*$", text, re.MULTILINE):
            assert "#" in line, f"{name}: {line}"


GOOD = (data_root() / "clusters" / "flux-h800.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("units = 132", "units = 0", r"device\.units: expected an integer >= 1, got 0"),
        ("units = 132", 'units = "many"', r"device\.units: expected an integer >= 1, got 'many'"),
        ("units = 132\n", "", r"device\.units: missing"),
        ('kind = "nvswitch"', 'kind = "string"', r"link\.kind: expected one of nvswitch.*'string'"),
        ("gbits = 400", "gbits = -1", r"network\.gbits: expected a number"),
        ("gbits = 400", "gbits = true", r"network\.gbits: expected a number"),
        ("gbits = 400", "gbit = 400", r"network\.gbits: missing"),
        ("gbits = 400", "gbits = 400\nspeed = 1", r"network\.speed: unknown key"),
        ("hosts = 16", "hosts = 16\nrooms = 2", r"rooms: unknown key"),
        ("[network]", "[overlap]\n2 = 0.5\n[network]", r"overlap\.1: missing"),
        ("[network]", "[overlap]\n1 = 1.5\n[network]", r"overlap\.1: expected a number <= 1"),
        ("[network]", "[overlap]\ntp = 0.5\n[network]", r"overlap\.tp: expected a number of hosts"),
        ("bfloat16 = 989.4", "bfloat16 = 0", r"device\.tflops\.bfloat16: expected a number"),
        ('arch = "sm_90"', 'arch = "H800"', r"device\.arch: expected sm_"),
        ("[link]", "[link", r"not TOML"),
        ("memory_gb = 80", "memory_gb = inf", r"device\.memory_gb: expected a number"),
        ('kind = "infiniband"\nnics = 8', 'kind = "none"\nnics = 0', r"16 hosts need a network"),
    ],
)
def test_bad_files_are_refused_by_file_and_key(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    assert old in GOOD
    file = tmp_path / "bad.toml"
    file.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(str(file)) + ".*" + complaint):
        load_cluster(file)


def test_the_error_about_a_missing_file_lists_existing_ones() -> None:
    with pytest.raises(ValueError, match=r"no file nowhere; clusters shipped with flux: .*h200"):
        load_cluster("nowhere")


def test_cluster_file_can_be_given_by_path(tmp_path: Path) -> None:
    own = tmp_path / "h200.toml"
    own.write_text(GOOD, encoding="utf-8")
    assert load_cluster(own).device.name == "NVIDIA H800 SXM5"
    assert find("clusters", "h200") == find("clusters", "tuning/clusters/h200.toml").resolve()


def cluster(**changes: object) -> Cluster:
    device = DeviceSpec(
        "cuda", "sm_90", 132, 85.0, 3350, {"bfloat16": 989}, "NVIDIA H100 80GB HBM3"
    )
    base = Cluster("one", device, 8, 1, 2, Link("nvswitch", 450), NetworkSpec("infiniband", 8, 400))
    return replace(base, **changes)


def test_the_fingerprint_ignores_names_and_small_differences() -> None:
    base = cluster()
    for other in (
        cluster(name="another", source="file", hosts=4),
        cluster(device=replace(base.device, name="NVIDIA H100")),
        cluster(device=replace(base.device, memory_gb=84.3, memory_gbs=3300, tflops={})),
        cluster(link=Link("nvswitch", 448.0, 9.0)),
    ):
        for shape in ("1x8", "2x8"):
            assert other.fingerprint(shape) == base.fingerprint(shape)


def test_the_fingerprint_depends_on_what_affects_speed() -> None:
    base = cluster()
    prints = {base.fingerprint("1x8"), base.fingerprint("1x4"), base.fingerprint("2x4")}
    prints |= {
        other.fingerprint("1x8")
        for other in (
            # The same marketing name with fewer multiprocessors is another device.
            cluster(device=replace(base.device, units=114)),
            cluster(device=replace(base.device, memory_gb=141.0)),
            cluster(device=replace(base.device, arch="sm_100")),
            cluster(link=Link("nvswitch", 200)),
            cluster(link=Link("pcie", 64)),
        )
    }
    assert len(prints) == 8


def test_the_network_counts_between_hosts_only() -> None:
    slow = cluster(network=NetworkSpec("infiniband", 1, 100))
    assert slow.fingerprint("1x8") == cluster().fingerprint("1x8")
    assert slow.fingerprint("2x8") != cluster().fingerprint("2x8")


def test_numa_counts_where_links_cross_it() -> None:
    assert cluster(numa_domains=1).fingerprint("1x8") == cluster().fingerprint("1x8")
    pcie = cluster(link=Link("pcie", 32))
    assert replace(pcie, numa_domains=1).fingerprint("1x8") != pcie.fingerprint("1x8")


def test_a_fingerprint_stays_the_same_from_release_to_release() -> None:
    """Winners on users' disks are found by it: whoever changes it makes them be tuned again."""
    assert load_cluster("flux-h800").fingerprint("1x8") == "7283ebe68a4535fa"


@pytest.mark.parametrize(
    ("hosts", "shape"),
    [("aa", "1x2"), ("aabb", "2x2"), ("abc", "3x1"), ("aaab", "3+1"), ("a", "1x1")],
)
def test_world_shape_lists_ranks_per_host(hosts: str, shape: str) -> None:
    assert world_shape(list(hosts)) == shape

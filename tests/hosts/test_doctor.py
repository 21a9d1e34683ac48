"""`flux doctor`: what it finds here, and what it says of machines that lack something."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import flux
from flux.cli.app import app
from flux.core import env
from flux.core.knobs import Knobs
from flux.doctor import examine as doctor
from flux.doctor.ranks import between, places_of_all
from flux.machine import host, toolchain
from flux.select.cache import Cache
from flux.select.winners import Entry, Key, Winner
from flux.transport.placement import RankPlace
from harness import nothing_left_in_shared_memory, run_ranks

SECTIONS = [
    "will be used",
    "software",
    "cpu",
    "shared memory",
    "torch.distributed",
    "cuda",
    "topology",
    "kernel toolchain",
    "kernels",
    "tuning",
    "environment",
]


def diagnose() -> tuple[int, dict[str, dict[str, dict[str, str]]]]:
    """Exit code, and items by section and name."""
    result = CliRunner().invoke(app, ["doctor", "--json"])
    findings = json.loads(result.stdout)
    assert findings["usable"] is (result.exit_code == 0)
    sections = {
        title: {item["name"]: item for item in items}
        for title, items in findings["sections"].items()
    }
    assert list(sections) == SECTIONS
    for items in sections.values():
        for item in items.values():
            assert set(item) == {"name", "value", "status", "note"}
            assert item["status"] in ("ok", "absent", "warning", "broken")
    return result.exit_code, sections


def test_this_machine_can_run_flux() -> None:
    with nothing_left_in_shared_memory():
        code, found = diagnose()
    assert code == 0
    assert found["software"]["flux"]["value"] == flux.__version__
    assert found["software"]["torch"]["value"] == torch.__version__
    assert Path(found["software"]["native module"]["note"]).is_file()
    assert found["cpu"]["cores"]["value"] == str(host.available_cores())
    assert found["shared memory"]["segment"]["status"] == "ok"
    assert found["torch.distributed"]["gloo"]["value"] == "works"
    assert {item["name"] for item in found["environment"].values()} == {
        variable.name for variable in env.VARIABLES
    }
    assert found["will be used"]["backend"]["value"] == "cpu"
    assert found["will be used"]["transport"]["value"] == "shm"
    assert found["will be used"]["not backend cuda"]["note"]


def test_panels_hold_every_finding() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    places = [result.stdout.index(f"─ {title} ─") for title in SECTIONS]
    assert places == sorted(places)
    assert "FLUX_POISON" not in result.stdout  # which is not set
    for name in ("NVIDIA driver", "nvcc", "CUTLASS", "NVSHMEM", "FLUX_TUNE_CACHE", "transport"):
        assert name in result.stdout
    assert "flux is ready to run" in result.stdout


def test_an_unreadable_variable_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_SPIN_US", "soon")
    code, found = diagnose()
    assert code == 1
    item = found["environment"]["FLUX_SPIN_US"]
    assert item["status"] == "broken"
    assert "FLUX_SPIN_US='soon'" in item["note"]
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 1
    assert "flux cannot run" in shown.stdout


def test_a_set_variable_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_POISON", "1")
    code, found = diagnose()
    assert code == 0
    assert found["environment"]["FLUX_POISON"]["value"] == "'1'"


@pytest.mark.parametrize(("value", "fine"), [("EAGER", True), ("LAZY", False), (None, False)])
def test_eager_loading_of_modules_is_recommended(value: str | None, fine: bool) -> None:
    item = doctor.module_loading(value)
    assert (item.status == doctor.OK) == fine and ("set it to EAGER" in item.note) != fine


def test_no_shared_memory_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(doctor.shm, "create", full)
    code, found = diagnose()
    assert code == 1
    assert found["shared memory"]["segment"]["status"] == "broken"
    assert "No space left" in found["shared memory"]["segment"]["note"]


def test_little_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = doctor.shutil.disk_usage("/")._replace(total=64 << 20, free=64 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    code, found = diagnose()
    assert code == 0
    assert found["shared memory"]["free"]["status"] == "warning"
    assert found["shared memory"]["free"]["value"] == "64 MiB"
    assert "--shm-size" in found["shared memory"]["free"]["note"]


def test_gloo_that_fails_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no network interface")

    monkeypatch.setattr(doctor.dist, "init_process_group", fails)
    code, found = diagnose()
    assert code == 1
    assert found["torch.distributed"]["gloo"]["status"] == "broken"
    assert found["torch.distributed"]["gloo"]["note"] == "no network interface"


def test_an_old_torch_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.1")
    code, found = diagnose()
    assert code == 1
    assert found["software"]["torch"]["status"] == "broken"
    assert "2.9" in found["software"]["torch"]["note"]


# -- toolchain -------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No CUDA_HOME, an empty PATH, no packages."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(toolchain, "NVCC_PACKAGES", ())
    monkeypatch.setattr(toolchain, "NVSHMEM_PACKAGES", ())
    return tmp_path


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


SPEAKS = "echo 'Cuda compilation tools, release 12.9, V12.9.86'"


def test_missing_nvcc_is_reported_as_absent(bare: Path) -> None:
    assert toolchain.nvcc() is None
    assert toolchain.nvshmem() is None
    _, found = diagnose()
    assert found["kernel toolchain"]["nvcc"]["status"] == "absent"
    assert "CUDA_HOME" in found["kernel toolchain"]["nvcc"]["note"]


def test_nvcc_of_cuda_home_comes_before_path(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_home = program(bare / "cuda" / "bin" / "nvcc", SPEAKS)
    program(bare / "path" / "nvcc", "echo V1.2.3")
    monkeypatch.setenv("PATH", str(bare / "path"))
    on_path = toolchain.nvcc()
    assert on_path is not None and (on_path.version, on_path.origin) == ("1.2.3", "PATH")
    monkeypatch.setenv("CUDA_HOME", str(bare / "cuda"))
    home = toolchain.nvcc()
    assert home == toolchain.Tool("12.9.86", str(at_home), "CUDA_HOME")


def test_broken_nvcc_is_reported(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare / "cuda" / "bin" / "nvcc", "exit 3")
    monkeypatch.setenv("CUDA_HOME", str(bare / "cuda"))
    broken = toolchain.nvcc()
    assert broken is not None and broken.problem
    code, found = diagnose()
    assert code == 0  # only kernels cannot be built
    assert found["kernel toolchain"]["nvcc"]["status"] == "warning"
    program(bare / "path" / "nvcc", SPEAKS)
    monkeypatch.setenv("PATH", str(bare / "path"))
    other = toolchain.nvcc()
    assert other is not None and not other.problem  # one that runs is preferred


def installed(folder: Path, package: str, version: str, files: list[str]) -> None:
    """Lay out a distribution as an installer would."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def test_toolchain_is_found_in_installed_packages(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "NVCC_PACKAGES", ("flux-test-nvcc",))
    monkeypatch.setattr(toolchain, "NVSHMEM_PACKAGES", ("flux-test-nvshmem",))
    packages = bare / "site"
    installed(packages, "flux-test-nvcc", "13.0", ["nvidia/cu13/bin/nvcc"])
    program(packages / "nvidia/cu13/bin/nvcc", SPEAKS)
    libraries = ("libnvshmem_device.a", "libnvshmem_host.so.3")
    files = [*(f"nvidia/nvshmem/lib/{name}" for name in libraries)]
    installed(packages, "flux-test-nvshmem", "3.4", ["nvidia/nvshmem/include/nvshmem.h", *files])
    header = "cutlass_library/source/include/cutlass/cutlass.h"
    installed(packages, "nvidia-cutlass", "4.2.0", [header, "cutlass_library/__init__.py"])
    monkeypatch.syspath_prepend(str(packages))
    assert "cutlass_library" not in sys.modules

    nvcc, cutlass, nvshmem = toolchain.nvcc(), toolchain.cutlass(), toolchain.nvshmem()
    assert nvcc is not None and cutlass is not None and nvshmem is not None
    assert (nvcc.version, nvcc.origin) == ("12.9.86", "package flux-test-nvcc")
    assert cutlass == toolchain.Tool(
        "4.2.0", str(packages / "cutlass_library/source/include"), "package nvidia-cutlass"
    )
    assert nvshmem.path == str(packages / "nvidia/nvshmem")
    _, found = diagnose()
    statuses = {name: item["status"] for name, item in found["kernel toolchain"].items()}
    assert statuses.pop("libflux_nvshmem") == "absent"
    assert set(statuses.values()) == {"ok"}
    (packages / files[0]).unlink()
    lacking = toolchain.nvshmem()
    assert lacking is not None and lacking.problem == "has no libnvshmem_device.a"
    assert "cutlass_library" not in sys.modules  # found without importing it


def test_doctor_reports_the_transport_between_ranks() -> None:
    """Four GPUs of one host, the last without P2P; one more on another host, and two without."""
    gpus = [f"gpu {i}" for i in range(4)]
    seen = {gpu: gpu != "gpu 3" for gpu in gpus}
    places = [RankPlace("one", gpu, seen) for gpu in gpus]
    places.append(RankPlace("two", "gpu 4", {"gpu 4": True}))
    found = {item.note: item for item in doctor.rank_pairs(places)}
    p2p, none, across = found.values()
    assert (p2p.name, p2p.value) == ("symm_mem", "ranks 0-1, 0-2, 1-2") and "P2P" in p2p.note
    assert (none.name, none.value) == ("send_recv", "ranks 0-3, 1-3, 2-3")
    assert "no P2P" in none.note and none.status == "warning"
    assert (across.name, across.value) == ("send_recv", "ranks 0-4, 1-4, 2-4, 3-4")
    assert "NCCL" in across.note and {across.status, p2p.status} == {"ok"}

    alone = RankPlace("one", "gpu 5", {"gpu 5": True})  # CUDA_VISIBLE_DEVICES of one each
    assert between(places[0], alone).transport == "symm_mem"
    assert "not sure" in between(places[0], alone).why
    assert "take turns" in between(alone, alone).why
    here, there = RankPlace("one"), RankPlace("two")
    assert between(here, here).transport == "shm" and between(here, there).transport == "send_recv"
    assert between(here, alone).why == "one host, a GPU on one side only: tensors on the CPU"
    assert doctor.rank_pairs([here])[0].note == "nothing is moved"


def _places(rank: int, world: int) -> list[RankPlace]:
    return places_of_all()


def test_ranks_exchange_their_placement() -> None:
    if torch.cuda.is_available():
        pytest.skip("the ranks have GPUs")
    for places in run_ranks(2, _places):
        assert [p.gpu for p in places] == [None, None]
        (item,) = doctor.rank_pairs(places)
        assert (item.name, item.value) == ("shm", "ranks 0-1")


def test_doctor_reports_the_transport_between_gpus() -> None:
    one = doctor.gpu_pairs(1, lambda a, b: True)
    assert [item.value for item in one] == ["nothing"]
    three = doctor.gpu_pairs(3, lambda a, b: (a, b) != (2, 1))
    assert [(item.name, item.value) for item in three] == [
        ("GPU 0 - GPU 1", "symm_mem"),
        ("GPU 0 - GPU 2", "symm_mem"),
        ("GPU 1 - GPU 2", "send_recv"),
    ]
    assert three[2].note == "2 cannot address 1: no P2P, so NCCL"


def test_winners_and_damaged_files_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUX_TUNE_CACHE", str(tmp_path))
    key = Key("ag_gemm", "float32", 8, 8, "1x2", "0" * 16, "cpu", "torch")
    for m in (8, 16):
        Cache(tmp_path).store(Entry(key, {}, (Winner(m, Knobs(path="medium"), 1.0),)))
    _, sections = diagnose()
    assert sections["tuning"]["winners"]["value"] == "2"
    path = Cache(tmp_path).directory / f"{key.name}.json"
    path.write_text("{")
    with pytest.warns(RuntimeWarning, match="set aside"):
        code, sections = diagnose()
    assert code == 0
    assert sections["tuning"]["damaged files"]["status"] == "warning"

"""Builds of kernels with a fake nvcc: when each library is built, and atomic publication."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flux.kernels import driver, manifest, ptxas, sources
from flux.kernels.build import CompileError, build, first_errors, make_unit
from flux.kernels.children import Cancelled, Children
from flux.kernels.config import GemmConfig
from flux.kernels.driver import Outcome
from flux.kernels.generator import config_struct, libraries, translation_unit
from flux.kernels.sets import config_set
from flux.machine import host
from kernel_sandbox import Sandbox

MINIMAL = config_set("minimal")
SM90 = config_set("minimal", ["90a"])
BF16_AG = [c for c in config_set("default", ["90a"]) if (c.op, c.dtype) == ("ag_gemm", "bf16")]


def build_set(
    sandbox: Sandbox, configs: Sequence[GemmConfig] = MINIMAL, root: Path | None = None
) -> list[Outcome]:
    """Build missing libraries."""
    root = root or sandbox.cache
    tools = sandbox.tools()
    plan = driver.plan(configs, root, tools)
    return (
        driver.build_all(plan.units, root, tools, 2, driver.CompileObserver()) if plan.units else []
    )


def build_one(sandbox: Sandbox, config: GemmConfig) -> manifest.Library:
    library, fresh = build(
        make_unit([config], sandbox.tools()), sandbox.cache, sandbox.tools(), Children()
    )
    assert fresh
    return library


# -- what is built ---------------------------------------------------------------------------------


def test_everything_is_built_once(sandbox: Sandbox) -> None:
    outcomes = build_set(sandbox)
    assert [outcome.error for outcome in outcomes] == [""] * len(MINIMAL)
    assert all(outcome.fresh for outcome in outcomes)
    assert len(sandbox.calls()) == len(sandbox.calls(compiling=False)) == len(MINIMAL)
    assert sandbox.leftovers() == []
    assert build_set(sandbox) == []
    assert len(sandbox.calls()) == len(MINIMAL)


def test_the_manifest_describes_the_library(sandbox: Sandbox) -> None:
    (outcome, *_) = build_set(sandbox, BF16_AG[:3])
    library = outcome.library
    assert library is not None
    assert {path.name for path in library.directory.iterdir()} == {
        f"{library.name}.so",
        f"{library.name}.json",
        f"{library.name}.ptxas.txt",
        "kernels.cu",
    }
    content = json.loads((library.directory / f"{library.name}.json").read_text())
    assert content["library"] == library.path.name
    assert library.name.startswith("libflux_ag_gemm_sm90a_bf16_")
    assert content["bytes"] == library.path.stat().st_size
    assert (content["abi_version"], content["arch"]) == (sources.abi_version(sandbox.csrc), "90a")
    assert (content["nvcc"], content["cutlass"]) == ("13.0.88", "4.2.0.0")
    assert list(content["kernels"]) == [config.name for config in BF16_AG[:3]]
    assert content["kernels"][BF16_AG[0].name] == BF16_AG[0].as_dict()
    assert content["ptxas"][BF16_AG[0].name] == {
        "functions": 1,
        "registers": 168,
        "stack_bytes": 0,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
    }
    assert (library.directory / "kernels.cu").read_text() == translation_unit(BF16_AG[:3])
    assert manifest.read(library.directory) == library


def test_nvcc_receives_the_expected_arguments(sandbox: Sandbox) -> None:
    build_set(sandbox)
    for call in sandbox.calls():
        arguments = call["arguments"]
        assert f"-I{sandbox.csrc}" in arguments
        include = sandbox.root / "packages/cutlass_library/source"
        assert f"-I{include}/include" in arguments
        assert f"-I{include}/tools/util/include" in arguments
        assert "-Xptxas=-v" in arguments
        # Temporary files lie in the directory that is removed whatever happens.
        assert Path(call["TMPDIR"]).parent.name.startswith(".building-libflux_")
    code = {arg for call in sandbox.calls() for arg in call["arguments"] if "gencode" in arg}
    assert code == {
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]",
    }
    assert all("-shared" in call["arguments"] for call in sandbox.calls(compiling=False))


def test_only_what_is_missing_is_built(sandbox: Sandbox) -> None:
    """Another set has other groups; what is in both is not built twice."""
    build_set(sandbox, BF16_AG[:2])
    build_set(sandbox, BF16_AG)
    units = [(path.parent / "kernels.cu").read_text() for path in sandbox.built()]
    names = [config.name for config in BF16_AG for unit in units if f"{config.name}," in unit]
    assert names == [config.name for config in BF16_AG]
    assert len(units) == 1 + len(libraries(BF16_AG))
    assert build_set(sandbox, BF16_AG) == []


@pytest.mark.parametrize(
    "header", ["cuda/gemm/common.cuh", "cuda/abi.h", "cuda/gemm/sm90/gemm.cuh"]
)
def test_a_changed_header_means_another_library(sandbox: Sandbox, header: str) -> None:
    config = SM90[0]
    before = build_one(sandbox, config)
    path = sandbox.csrc / header
    path.write_text(path.read_text() + "\n// changed\n")
    assert not driver.is_current(before, sandbox.tools())
    after = build_one(sandbox, config)
    assert before.name != after.name and before.sources != after.sources
    assert len(sandbox.built()) == 2  # the cache may serve other checkouts


def test_headers_that_are_not_included_do_not_matter(sandbox: Sandbox) -> None:
    library = build_one(sandbox, SM90[0])
    (sandbox.csrc / "core" / "tile_order.h").write_text("// nobody includes this here\n")
    (sandbox.csrc / "cuda/gemm/sm80/gemm.cuh").write_text("// of another architecture\n")
    assert driver.is_current(library, sandbox.tools())


def test_another_tool_means_another_library(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = sandbox.tools()
    unit = make_unit(SM90[:1], tools)
    others = [
        make_unit(SM90[:1], replace(tools, nvcc=replace(tools.nvcc, version="12.9.86"))),
        make_unit(SM90[:1], replace(tools, cutlass=replace(tools.cutlass, version="4.3.0.0"))),
        make_unit(SM90[1:2], tools),
    ]
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    others.append(make_unit(SM90[:1], tools))
    assert len({other.key for other in (unit, *others)}) == 5
    assert others[0].sources == unit.sources  # not stale: only the tool differs
    moved = replace(tools, nvcc=replace(tools.nvcc, path="/elsewhere/nvcc"))
    assert make_unit(SM90[:1], moved) == others[-1]


def test_includes_are_followed_wherever_they_lead(tmp_path: Path) -> None:
    for name, text in {
        "cuda/a.cuh": '#include "b.cuh"\n  #  include "core/c.h"\n#include <cuda/x.h>\n',
        "cuda/b.cuh": '#include "../core/d.h"\n#include "cuda/a.cuh"\n',
        "core/c.h": '#include "cutlass/cutlass.h"\n#include "missing.h"\n',
        "core/d.h": "",
        "cuda/x.h": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path.parent / "outside.h").write_text("")
    text = '#include "cuda/a.cuh"\n#include "../outside.h"\n'
    assert sources.headers(text, tmp_path) == ["core/c.h", "core/d.h", "cuda/a.cuh", "cuda/b.cuh"]


def test_a_wheel_brings_its_own_headers(sandbox: Sandbox) -> None:
    assert sources.csrc() == sandbox.csrc
    sandbox.csrc.rename(sandbox.root / "flux" / "csrc")
    assert sources.csrc() == sandbox.root / "flux" / "csrc"
    (sandbox.root / "csrc").mkdir()  # of somebody else
    assert sources.csrc() == sandbox.root / "flux" / "csrc"


def test_headers_edited_meanwhile_are_noticed(sandbox: Sandbox) -> None:
    unit = make_unit(SM90[:1], sandbox.tools())
    header = sandbox.csrc / "cuda/gemm/common.cuh"

    def edit() -> None:
        header.write_text(header.read_text() + "\n")

    with pytest.raises(CompileError, match="headers changed while this was compiled"):
        build(unit, sandbox.cache, sandbox.tools(), Children(), started=edit)
    assert sandbox.built() == [] and sandbox.leftovers() == []


# -- failure ---------------------------------------------------------------------------------------


def test_one_failure_does_not_stop_the_others(sandbox: Sandbox) -> None:
    bad = SM90[1].name
    sandbox.set(fail=bad)
    outcomes = build_set(sandbox)
    failed = [outcome for outcome in outcomes if outcome.error]
    assert len(failed) == 1 and len(sandbox.built()) == len(MINIMAL) - 1
    (error,) = (outcome.error for outcome in failed)
    assert error.startswith(f"{bad}: nvcc failed (exit status 2):\n  cute/layout.hpp(42): error:")
    log = Path(error.rpartition("full log: ")[2])
    assert "In file included" in log.read_text() and "-gencode" in log.read_text()
    assert sandbox.leftovers() == [log.name]
    sandbox.set(fail="")
    build_set(sandbox)
    assert len(sandbox.built()) == len(MINIMAL) and sandbox.leftovers() == []


def test_the_first_errors_are_shown() -> None:
    noise = [f"note {number}" for number in range(50)]
    lines = first_errors("\n".join([*noise, "x.h(3): error: no", *noise]))
    assert lines[0] == "x.h(3): error: no" and len(lines) == 12
    assert first_errors("\n".join(noise)) == noise[-12:]


def test_a_compiler_that_is_killed_is_said_to_lack_memory(sandbox: Sandbox) -> None:
    nvcc = sandbox.root / "cuda/bin/nvcc"
    nvcc.write_text("#!/bin/sh\nkill -9 $$\n")
    (outcome,) = build_set(sandbox, SM90[:1])
    assert "signal 9, probably out of memory: try --jobs 1" in outcome.error


def test_a_directory_that_cannot_be_written_is_a_failure(sandbox: Sandbox) -> None:
    sandbox.cache.write_text("a file")
    tools = sandbox.tools()
    units = [make_unit(SM90[:1], tools)]
    (outcome,) = driver.build_all(units, sandbox.cache, tools, 1, driver.CompileObserver())
    assert SM90[0].name in outcome.error and str(sandbox.cache) in outcome.error


# -- damage ----------------------------------------------------------------------------------------


def truncate(library: manifest.Library) -> None:
    library.path.write_bytes(library.path.read_bytes()[:-1])


def flip(library: manifest.Library) -> None:
    content = bytearray(library.path.read_bytes())
    content[0] ^= 1
    library.path.write_bytes(content)


def lose(library: manifest.Library) -> None:
    library.path.unlink()


def manifest_of(library: manifest.Library) -> Path:
    return library.directory / f"{library.name}.json"


def garble(library: manifest.Library) -> None:
    manifest_of(library).write_text("{")


def forget(library: manifest.Library) -> None:
    manifest_of(library).unlink()


def rename_kernel(library: manifest.Library) -> None:
    path = manifest_of(library)
    content = json.loads(path.read_text())
    content["kernels"] = {"other": content["kernels"].popitem()[1]}
    path.write_text(json.dumps(content))


def from_the_future(library: manifest.Library) -> None:
    path = manifest_of(library)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


def list_for_a_manifest(library: manifest.Library) -> None:
    manifest_of(library).write_text("[]")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "bytes, the manifest says"),
        (flip, "not the file that the manifest describes"),
        (lose, "No such file"),
        (garble, "bad manifest: not JSON"),
        (forget, "No such file"),
        (rename_kernel, "symbol other has the config of"),
        (from_the_future, "format: expected 1, got 99"),
        (list_for_a_manifest, "json: expected an object, got"),
    ],
)
def test_damaged_libraries_are_set_aside_and_built_again(
    sandbox: Sandbox, damage: Callable[[manifest.Library], None], reason: str
) -> None:
    library = build_one(sandbox, SM90[0])
    for number in (1, 2):
        damage(library)
        with pytest.warns(RuntimeWarning, match=f"damaged-{number}: .*{reason}"):
            assert list(manifest.scan(sandbox.cache)) == []
        assert list(manifest.scan(sandbox.cache)) == []
        assert replace(build_one(sandbox, SM90[0]), seconds=library.seconds) == library
    assert len(manifest.damaged(sandbox.cache)) == 2


def test_builder_sets_damaged_libraries_aside(sandbox: Sandbox) -> None:
    library = build_one(sandbox, SM90[0])
    truncate(library)
    with pytest.warns(RuntimeWarning, match="damaged-1"):
        assert replace(build_one(sandbox, SM90[0]), seconds=library.seconds) == library


def test_library_is_not_set_aside_while_its_lock_is_held(sandbox: Sandbox) -> None:
    library = build_one(sandbox, SM90[0])
    truncate(library)
    with manifest.lock(sandbox.cache, library.name):
        assert list(manifest.scan(sandbox.cache)) == []
    assert manifest.damaged(sandbox.cache) == []


def test_a_damaged_library_that_cannot_be_set_aside_is_ignored(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build_one(sandbox, SM90[0])
    truncate(library)

    def refuses(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(manifest, "lock", refuses)
    with pytest.warns(RuntimeWarning, match="cannot be set aside: .*Permission denied"):
        assert list(manifest.scan(sandbox.cache)) == []


# -- several at once -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gigabytes", "cores", "wanted", "expected"),
    [(64, 4, None, 4), (13, 4, None, 2), (5, 4, None, 1), (64, 64, None, 10), (5, 1, 3, 3)],
)
def test_number_of_jobs_is_limited_by_memory_and_cores(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int, cores: int, wanted: int | None, expected: int
) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: gigabytes << 30)
    monkeypatch.setattr(host, "available_cores", lambda: cores)
    assert driver.job_limit(10, wanted) == expected


def test_memory_of_this_machine_is_known() -> None:
    memory = host.available_memory()
    assert memory is not None and memory > 1 << 20


def test_memory_is_what_the_container_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 99 kB\nMemAvailable:    8388608 kB\n",
        "/sys/fs/cgroup/memory.max": f"{4 << 30}\n",
        "/sys/fs/cgroup/memory.current": f"{3 << 30}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {1 << 30}\n",
    }
    monkeypatch.setattr(host, "system_text", lambda path: files.get(path, "").strip())
    assert host.available_memory() == 2 << 30
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert host.available_memory() == 8 << 30
    # Of all cgroups around this process, of both versions.
    files["/proc/self/cgroup"] = "4:cpu,memory:/a/b\n0::/user/me\n"
    files["/sys/fs/cgroup/user/memory.max"] = f"{5 << 30}\n"
    files["/sys/fs/cgroup/user/memory.current"] = f"{2 << 30}\n"
    assert host.available_memory() == 3 << 30
    of_group = "/sys/fs/cgroup/memory/a"
    files[f"{of_group}/memory.limit_in_bytes"] = f"{2 << 30}\n"
    files[f"{of_group}/memory.usage_in_bytes"] = f"{2 << 30}\n"
    files[f"{of_group}/memory.stat"] = f"total_active_file {1 << 29}\ntotal_inactive_file 0\n"
    assert host.available_memory() == 1 << 29
    files.clear()
    assert host.available_memory() is None


def test_two_processes_build_each_library_once(sandbox: Sandbox) -> None:
    sandbox.set(seconds=0.5)
    processes = [sandbox.start("--set", "minimal", "--jobs", "5") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len(sandbox.calls()) == len(sandbox.built()) == len(MINIMAL)
    assert sandbox.leftovers() == []


def running(sandbox: Sandbox, process: subprocess.Popen[str]) -> list[int]:
    """Wait until nvcc compiles; returns its process ids."""
    deadline = time.monotonic() + 30
    while not sandbox.calls():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    return [call["pid"] for call in sandbox.calls()]


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_compilers_and_leaves_nothing(
    sandbox: Sandbox, number: signal.Signals
) -> None:
    sandbox.set(seconds=60)
    process = sandbox.start("--set", "minimal", "--arch", "90a", "--jobs", "1")
    pids = running(sandbox, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and "interrupted" in errors
    assert all(map(is_gone, pids))
    assert len(sandbox.calls()) == 1  # nothing new was begun
    assert sandbox.built() == [] and sandbox.leftovers() == []


def test_a_killed_build_leaves_no_valid_library(sandbox: Sandbox) -> None:
    sandbox.set(seconds=5)
    process = sandbox.start("--set", "minimal", "--arch", "90a", "--jobs", "1")
    (pid,) = running(sandbox, process)
    process.kill()
    process.communicate()
    assert sandbox.built() == [] and list(manifest.scan(sandbox.cache)) == []
    assert [name for name in sandbox.leftovers() if name.startswith(".building-")]
    os.kill(pid, signal.SIGKILL)
    sandbox.set(seconds=0)
    build_set(sandbox, SM90)
    assert len(sandbox.built()) == len(SM90) and sandbox.leftovers() == []


def test_cancelled_children_do_not_start(tmp_path: Path) -> None:
    children = Children()
    children.kill()
    with pytest.raises(Cancelled):
        children.run(["true"], tmp_path, os.environ)


# -- what was built ahead of time ------------------------------------------------------------------


def test_a_directory_of_its_own_keeps_only_current_libraries(sandbox: Sandbox) -> None:
    out = sandbox.root / "out"
    build_set(sandbox, SM90, out)
    old = sandbox.built(out)
    header = sandbox.csrc / "cuda/gemm/common.cuh"
    header.write_text(header.read_text() + "\n")
    build_set(sandbox, SM90[:2], out)
    removed = driver.remove_superseded(out, sandbox.tools())
    # The others are not there in a current version: their old ones stay.
    others = len(SM90) - 2
    assert len(removed) == 2 and len(set(sandbox.built(out)) & set(old)) == others
    build_set(sandbox, SM90, out)
    assert len(driver.remove_superseded(out, sandbox.tools())) == others
    assert len(sandbox.built(out)) == len(SM90) and not set(sandbox.built(out)) & set(old)
    assert {path.name for path in out.iterdir()} == {
        ".locks",
        *(path.stem for path in sandbox.built(out)),
    }


# -- ptxas -----------------------------------------------------------------------------------------


def test_ptxas_reports_are_read_by_config() -> None:
    one, two = SM90[0], SM90[1]

    def function(config: GemmConfig, stack: int, stores: int, loads: int, registers: int) -> str:
        struct = config_struct(config)
        name = f"_ZN7cutlass13device_kernelINS_4gemm{len(struct)}{struct}EEvNT_6ParamsE"
        return f"""\
ptxas info    : Compiling entry function '{name}' for 'sm_90a'
ptxas info    : Function properties for {name}
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 16 barriers, {stack} bytes cumulative stack size
ptxas info    : Compile time = 123.4 ms
"""

    report = (
        "ptxas info    : 0 bytes gmem\n"
        + function(one, 0, 0, 0, 168)
        + function(two, 8, 16, 24, 232)
        + function(one, 0, 4, 0, 90)
        + "ptxas info    : Compiling entry function '_Z4fillPf' for 'sm_90a'\n"
        + "ptxas info    : Function properties for _Z4fillPf\n"
        + "    99 bytes stack frame, 99 bytes spill stores, 99 bytes spill loads\n"
        + "ptxas info    : Used 255 registers\n"
        + "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions\n"
    )
    assert ptxas.usage(report, [one, two, SM90[2]]) == {
        one.name: ptxas.Usage(2, 168, 0, 4, 0),
        two.name: ptxas.Usage(1, 232, 8, 16, 24),
        SM90[2].name: ptxas.Usage(1, 255, 99, 99, 99),  # nobody else's: may be its
    }
    (warning,) = ptxas.warnings(report)
    assert "C7510" in warning

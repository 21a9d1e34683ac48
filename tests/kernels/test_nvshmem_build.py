"""libflux_nvshmem.so: how it is built, with a fake nvcc, and what the real one has made of it
(`make kernels` first). No GPU is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flux.kernels import runtime
from flux.kernels.build import CompileError, MissingToolError
from flux.kernels.manifest import DamagedLibraryError
from flux.kernels.registry import package_root
from flux.kernels.runtime import RuntimeLibrary, RuntimeTools
from flux.machine import toolchain
from flux.transport.nvshmem_library import NvshmemLibrary
from kernel_sandbox import ROOT, Sandbox
from ptx_target import ptx_target
from test_built_kernels import functions_in

PACKAGE = "nvidia-nvshmem-cu13"


# -- with a fake nvcc ------------------------------------------------------------------------------


@pytest.fixture
def tools(sandbox: Sandbox) -> RuntimeTools:
    for name in ("cuda/runtime", "cuda/sync.cuh", "cuda/gemm/reduce.cuh"):
        source, target = ROOT / "csrc" / name, sandbox.csrc / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
    nvshmem = toolchain.Tool("3.8.0", str(sandbox.root / "nvshmem"), f"package {PACKAGE}")
    return RuntimeTools(sandbox.tools(), nvshmem)


def make(sandbox: Sandbox, tools: RuntimeTools, archs: tuple[str, ...] = ("80", "90a")) -> bool:
    library, fresh = runtime.make(sandbox.cache, tools, archs)
    assert runtime.read(library.directory) == library
    return fresh


def test_library_is_built_once(sandbox: Sandbox, tools: RuntimeTools) -> None:
    assert make(sandbox, tools)
    assert not make(sandbox, tools)
    [compiling], [linking] = sandbox.calls(), sandbox.calls(compiling=False)
    assert "-rdc=true" in compiling["arguments"]
    assert str(sandbox.csrc / runtime.SOURCE) in compiling["arguments"]
    for call in (compiling, linking):
        code = [argument for argument in call["arguments"] if "gencode" in argument]
        assert [argument.rpartition("=")[2] for argument in code] == ["sm_80", "sm_90a"]
    assert str(sandbox.root / "nvshmem/lib/libnvshmem_device.a") in linking["arguments"]
    assert "-Xlinker=-l:libnvshmem_host.so.3" in linking["arguments"]
    assert not any("rpath" in argument for argument in linking["arguments"])
    [library] = runtime.scan(sandbox.cache)
    assert (library.package, library.nvshmem, library.archs) == (PACKAGE, "3.8.0", ("80", "90a"))
    assert {path.name for path in library.directory.iterdir()} == {
        f"{runtime.NAME}{suffix}" for suffix in (".so", ".json", ".ptxas.txt")
    }


def test_library_is_rebuilt_when_an_input_changes(sandbox: Sandbox, tools: RuntimeTools) -> None:
    assert make(sandbox, tools)
    newer = toolchain.Tool("3.9.0", tools.nvshmem.path, tools.nvshmem.origin)
    assert make(sandbox, RuntimeTools(tools.tools, newer))
    assert make(sandbox, tools, ("90a",))
    header = sandbox.csrc / "core/relay.h"
    header.write_text(header.read_text() + "\n")
    assert make(sandbox, tools)
    newest = runtime.scan(sandbox.cache)[0]
    assert len(runtime.scan(sandbox.cache)) == 4
    runtime.remove_others(sandbox.cache, newest)
    assert runtime.scan(sandbox.cache) == [newest]
    with pytest.raises(ValueError, match="is built for 80 and 90a, got 90a, 70"):
        make(sandbox, tools, ("90a", "70"))


def test_failed_build_leaves_no_files(sandbox: Sandbox, tools: RuntimeTools) -> None:
    sandbox.set(fail="nvshmemx_init_attr")
    with pytest.raises(CompileError, match=r"(?s)^libflux_nvshmem: nvcc failed.*full log: "):
        make(sandbox, tools)
    assert sandbox.leftovers() == [f"{runtime.NAME}.failed.txt"]
    sandbox.set(fail="")
    assert make(sandbox, tools)
    assert not (sandbox.cache / f"{runtime.NAME}.failed.txt").exists()


def test_a_damaged_library_is_built_again(sandbox: Sandbox, tools: RuntimeTools) -> None:
    make(sandbox, tools)
    [library] = runtime.scan(sandbox.cache)
    library.path.write_bytes(b"half")
    with pytest.raises(DamagedLibraryError, match="not the file that the manifest describes"):
        runtime.read(library.directory)
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert runtime.scan(sandbox.cache) == []
    with pytest.warns(RuntimeWarning, match="set aside"):
        assert make(sandbox, tools)
    [again] = runtime.scan(sandbox.cache)
    assert replace(again, seconds=library.seconds) == library


def test_the_library_must_fit_what_is_installed(
    sandbox: Sandbox, tools: RuntimeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = [sandbox.root / "nowhere", sandbox.cache]
    with pytest.raises(MissingToolError, match=r"not built .*flux compile --runtime"):
        runtime.usable(roots)
    make(sandbox, tools)
    [library] = runtime.scan(sandbox.cache)
    there: list[toolchain.Tool | None] = [tools.nvshmem]
    monkeypatch.setattr(toolchain, "nvshmem", lambda cuda=None: there[0])
    assert runtime.usable(roots) == library
    there[0] = toolchain.Tool("3.4.5", "", f"package {PACKAGE}")
    with pytest.raises(MissingToolError, match=rf"for {PACKAGE} 3\.8\.0, but {PACKAGE} 3\.4\.5 is"):
        runtime.usable(roots)
    there[0] = None
    with pytest.raises(MissingToolError, match=r"but none is installed"):
        runtime.usable(roots)
    header = sandbox.csrc / "cuda/runtime/relay.cuh"
    header.write_text(header.read_text() + "\n")
    with pytest.raises(MissingToolError, match="not built for this version of flux"):
        runtime.usable(roots)


def test_missing_tools_are_named(
    sandbox: Sandbox, tools: RuntimeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime.build, "find_tools", sandbox.tools)
    monkeypatch.setattr(toolchain, "nvshmem", lambda cuda: None)
    with pytest.raises(MissingToolError, match=rf"NVSHMEM was not found: pip install {PACKAGE}"):
        runtime.find_tools()
    bad = toolchain.Tool("3.8.0", "/x", f"package {PACKAGE}", "has no headers")
    monkeypatch.setattr(toolchain, "nvshmem", lambda cuda: bad)
    with pytest.raises(MissingToolError, match=r"NVSHMEM cannot be used: /x, .*has no headers"):
        runtime.find_tools()


@pytest.fixture
def checkout(
    sandbox: Sandbox, tools: RuntimeTools, monkeypatch: pytest.MonkeyPatch
) -> RuntimeTools:
    """A checkout with the emulated NVSHMEM."""
    shutil.copytree(
        ROOT / "ptx_machine/nvshmem/include", sandbox.root / "ptx_machine/nvshmem/include"
    )
    (sandbox.root / "ptx_machine/gpu").mkdir()
    (sandbox.root / "ptx_machine/gpu/libemulated_gpu.so").write_text("")
    monkeypatch.setattr(runtime.build, "find_tools", sandbox.tools)
    return runtime.find_tools(ptx_target(sandbox.root))


def test_an_emulated_library_holds_ptx_alone(
    sandbox: Sandbox, tools: RuntimeTools, checkout: RuntimeTools
) -> None:
    assert make(sandbox, checkout)
    assert not make(sandbox, checkout)
    [compiling], [linking] = sandbox.calls(), sandbox.calls(compiling=False)
    code = [argument for argument in compiling["arguments"] if "gencode" in argument]
    assert [argument.rpartition("=")[2] for argument in code] == ["compute_80", "compute_90a"]
    assert f"-I{sandbox.root / 'ptx_machine/nvshmem/include'}" in compiling["arguments"]
    assert str(sandbox.root / "ptx_machine/gpu/libemulated_gpu.so") in linking["arguments"]
    assert not any("nvshmem_host" in argument for argument in linking["arguments"])
    assert make(sandbox, tools), "one for GPUs is another library"
    header = sandbox.root / "ptx_machine/nvshmem/include/nvshmemx.h"
    header.write_text(header.read_text() + "\n")
    assert make(sandbox, checkout)


def test_an_emulated_library_is_not_used_on_gpus(sandbox: Sandbox, checkout: RuntimeTools) -> None:
    make(sandbox, checkout)
    with pytest.raises(MissingToolError, match=r"is built for the PTX machine 0\.0\.0, but"):
        runtime.usable([sandbox.cache])


def test_what_an_emulated_library_lacks_is_named(sandbox: Sandbox, checkout: RuntimeTools) -> None:
    (sandbox.root / "ptx_machine/gpu/libemulated_gpu.so").unlink()
    with pytest.raises(MissingToolError, match=r"libemulated_gpu\.so is missing: make emulator"):
        runtime.find_tools(ptx_target(sandbox.root))
    shutil.rmtree(sandbox.root / "ptx_machine/nvshmem")
    with pytest.raises(MissingToolError, match=r"nvshmem\.h is missing: make emulator"):
        runtime.find_tools(ptx_target(sandbox.root))


def test_compile_runtime_command_builds_the_library(sandbox: Sandbox, tools: RuntimeTools) -> None:
    files = ["include/nvshmem.h", "lib/libnvshmem_device.a", "lib/libnvshmem_host.so.3"]
    packages = sandbox.root / "packages"
    for name in files:
        (packages / "nvidia/nvshmem" / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / "nvidia/nvshmem" / name).write_text("")
    info = packages / "nvidia_nvshmem_cu13-3.7.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 3.7.7\n")
    (info / "RECORD").write_text("".join(f"nvidia/nvshmem/{name},,\n" for name in files))
    done = sandbox.compile("--runtime")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{runtime.NAME}: built in \d+ s: {sandbox.cache}/.*\.so\n", done.stdout)
    again = json.loads(sandbox.compile("--runtime", "--json").stdout)
    assert (again["status"], again["nvshmem"]) == ("ready", "3.7.7")
    refused = sandbox.compile("--runtime", "--emulated")
    assert refused.returncode == 2 and "need --out DIR" in refused.stderr
    refused = sandbox.compile("--runtime", "--emulated", "--out", str(sandbox.root / "out"))
    assert refused.returncode == 2 and "is missing: make emulator" in refused.stderr
    refused = sandbox.compile("--runtime", "--only", "x")
    assert refused.returncode == 2 and "--runtime cannot be combined" in refused.stderr
    refused = sandbox.compile("--runtime", "--arch", "70")
    assert refused.returncode == 2 and "got 70" in refused.stderr


# -- with the real one -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built() -> RuntimeLibrary:
    try:
        return runtime.usable([package_root()])
    except MissingToolError as error:
        pytest.skip(f"{error}, or make kernels")


def host_library() -> Path:
    package = toolchain.nvshmem()
    assert package is not None
    return Path(package.path, "lib", toolchain.NVSHMEM_HOST_LIBRARY)


def test_one_symbol_is_exported_and_all_others_are_found(built: RuntimeLibrary) -> None:
    shown = subprocess.run(
        ["nm", "-D", "--defined-only", str(built.path)], capture_output=True, text=True, check=True
    )
    assert [line.split()[2] for line in shown.stdout.splitlines()] == [runtime.SYMBOL]
    variables = {**os.environ, "LD_LIBRARY_PATH": str(host_library().parent)}
    resolved = subprocess.run(
        ["ldd", "-r", str(built.path)], capture_output=True, text=True, env=variables, check=True
    )
    assert f"=> {host_library()}" in resolved.stdout
    said = resolved.stdout + resolved.stderr
    assert "undefined symbol" not in said and "not found" not in said


def test_library_loads_from_any_directory(built: RuntimeLibrary, tmp_path: Path) -> None:
    """Without a GPU, and without LD_LIBRARY_PATH."""
    moved = tmp_path / "somewhere.so"
    shutil.copy(built.path, moved)
    library = NvshmemLibrary(moved, host_library())
    assert library.version == built.nvshmem
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"cudaSetDevice: .* \(status \d+\)"):
            library.prepare(0)


def test_kernels_do_not_spill_registers(built: RuntimeLibrary) -> None:
    """The relay's stack frame holds an argument of a function that is NVSHMEM's."""
    assert set(built.ptxas) == set(runtime.KERNELS)
    for kernel, usage in built.ptxas.items():
        assert usage.functions == 4 * len(built.archs) and 0 < usage.registers <= 128, kernel
        assert (usage.spill_store_bytes, usage.spill_load_bytes) == (0, 0), kernel
        assert usage.stack_bytes <= (8 if kernel == "relay_kernel" else 0), kernel


@pytest.mark.parametrize("arch", runtime.ARCHS)
def test_a_strip_is_awaited_then_summed_then_put(built: RuntimeLibrary, arch: str) -> None:
    """In machine code: acquire at system scope, barrier, loads past L1, fence at system scope and
    barrier, then NVSHMEM's function for the network."""
    functions = functions_in(built.path, arch)
    relays = [sass for name, sass in functions.items() if "relay_kernel" in name]
    assert len(relays) == 4
    for sass in relays:
        acquire = sass.index("LDG.E.STRONG.SYS")
        agreed = sass.index("BAR.RED.AND", acquire)
        load = re.compile(r"LDG\.E\.(128|U16)\.STRONG\.GPU").search(sass, agreed)
        assert load is not None
        fence = sass.index("MEMBAR.SC.SYS", load.start())
        barrier = sass.index("BAR.SYNC", fence)
        assert "CALL.ABS" in sass[barrier:] and "CALL.ABS" not in sass[:barrier]
        assert not re.search(r"^(@!?\w+ )?LDL", sass, re.M)
    assert any("nvshmemi_transfer_put_signal_dispatch" in name for name in functions)
    sums = [sass for name, sass in functions.items() if "node_sum_kernel" in name]
    assert len(sums) == 4 and all("LDG.E.STRONG.SYS" in sass for sass in sums)

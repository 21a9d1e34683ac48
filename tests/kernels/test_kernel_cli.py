"""`flux compile`, the registry, what `flux doctor` says of kernels, and their CMake target."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flux.cli.app import app
from flux.doctor import examine as doctor
from flux.kernels import GemmProblem, registry
from flux.kernels.config import GROUPED
from flux.kernels.registry import Registry
from flux.kernels.sets import FUSED, config_set
from kernel_sandbox import ROOT, Sandbox

SM90 = config_set("minimal", ["90a"])
MINIMAL = config_set("minimal")
BIG = GemmProblem(8192, 6144, 12288, 8)


def change_a_header(sandbox: Sandbox) -> None:
    header = sandbox.csrc / "cuda/gemm/common.cuh"
    header.write_text(header.read_text() + "\n")


# -- flux compile ----------------------------------------------------------------------------------


def test_compile_says_what_it_did(sandbox: Sandbox) -> None:
    done = sandbox.run_script("--set", "minimal")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(MINIMAL) + 1
    assert re.fullmatch(rf"\[1/{len(MINIMAL)}\] .* x1: built, \d+ s", lines[0])
    ending = rf"0 failed: {re.escape(str(sandbox.cache))}"
    assert re.fullmatch(
        rf"{len(MINIMAL)} kernels built in \d+ s, 0 kernels already built, {ending}", lines[-1]
    )
    again = sandbox.compile("--set", "minimal", "--arch", "90a")
    assert re.fullmatch(
        rf"0 kernels built in \d+ s, {len(SM90)} kernels already built, {ending}\n", again.stdout
    )


def test_compile_as_json(sandbox: Sandbox) -> None:
    bad = SM90[0].name
    sandbox.set(fail=f"{bad},")
    done = sandbox.compile("--arch", "sm_90a", "--set", "minimal", "--json", "--jobs", "2")
    assert done.returncode == 1 and not done.stderr
    content = json.loads(done.stdout)
    assert (content["root"], content["jobs"]) == (str(sandbox.cache), 2)
    by_status = {entry["status"]: entry for entry in content["libraries"]}
    assert set(by_status) == {"built", "failed"}
    assert by_status["failed"]["kernels"] == [bad] and "error:" in by_status["failed"]["error"]
    assert Path(by_status["built"]["path"]).is_file()
    (usage,) = by_status["built"]["kernels"].values()
    assert usage["registers"] == 168
    sandbox.set(fail="")
    content = json.loads(sandbox.compile("--arch", "90a", "--set", "minimal", "--json").stdout)
    assert sorted(entry["status"] for entry in content["libraries"]) == [
        "built",
        *["ready"] * (len(SM90) - 1),
    ]


def test_failures_are_shown_and_the_exit_status_is_1(sandbox: Sandbox) -> None:
    sandbox.set(fail="sm90")
    done = sandbox.compile("--set", "minimal")
    assert done.returncode == 1
    assert done.stderr.count("nvcc failed") == len(SM90)
    assert f"{len(SM90)} failed" in done.stdout
    assert f"error: {SM90[0].name}: nvcc failed (exit status 2):" in done.stderr
    assert "Shapes do not match" in done.stderr
    assert f"{len(MINIMAL) - len(SM90)} kernels built in" in done.stdout


def test_spills_are_pointed_out(sandbox: Sandbox) -> None:
    sandbox.set(spill=12)
    done = sandbox.compile("--set", "minimal", "--only", "90a")
    assert done.returncode == 0
    assert done.stderr.count("12 bytes of spilled registers") == len(SM90)


def test_only_option_builds_matching_kernels(sandbox: Sandbox) -> None:
    done = sandbox.compile("--set", "default", "--only", "fp16_nk_64x64x32")
    assert done.returncode == 0, done.stderr
    names = [name for path in sandbox.built() for name in path.parent.name.split("_")]
    assert len(sandbox.built()) == 4 and "bf16" not in names  # dense ones, and those of experts
    none = sandbox.compile("--only", "int4")
    assert none.returncode == 2 and "has 'int4' in its name" in none.stderr


def test_out_keeps_only_what_is_current(sandbox: Sandbox) -> None:
    out = sandbox.root / "out"
    for _ in range(2):
        done = sandbox.compile("--set", "minimal", "--out", str(out))
        assert done.returncode == 0, done.stderr
        assert len(sandbox.built(out)) == len(MINIMAL) and not sandbox.cache.exists()
        change_a_header(sandbox)


def test_list_needs_no_tools(sandbox: Sandbox) -> None:
    shutil.rmtree(sandbox.root / "packages")
    (sandbox.root / "cuda/bin/nvcc").unlink()
    done = sandbox.compile("--set", "minimal", "--list")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"-     {config.name}" for config in MINIMAL]
    assert not sandbox.cache.exists()


def test_list_shows_what_is_built(sandbox: Sandbox) -> None:
    sandbox.compile("--set", "minimal", "--arch", "90a")
    done = sandbox.compile("--set", "minimal", "--list")
    assert done.stdout.count("built ") == len(SM90)
    content = json.loads(sandbox.compile("--set", "minimal", "--list", "--json").stdout)
    libraries = {entry["name"]: entry["library"] for entry in content["kernels"]}
    assert list(libraries) == [config.name for config in MINIMAL]
    assert {name for name, library in libraries.items() if library} == {c.name for c in SM90}
    assert content["kernels"][0]["config"] == MINIMAL[0].as_dict()
    change_a_header(sandbox)
    assert "built" not in sandbox.compile("--set", "minimal", "--list").stdout


def test_list_keeps_kernels_for_gpus_and_for_the_machine_apart(sandbox: Sandbox) -> None:
    options = ("--set", "minimal", "--arch", "90a", "--out", str(sandbox.root / "kernels"))
    for first, other in (((), ("--emulated",)), (("--emulated",), ())):
        shutil.rmtree(sandbox.root / "kernels", ignore_errors=True)
        assert sandbox.compile(*options, *first).returncode == 0
        assert sandbox.compile(*options, *first, "--list").stdout.count("built ") == len(SM90)
        assert "built" not in sandbox.compile(*options, *other, "--list").stdout


def test_missing_nvcc_or_cutlass_prints_how_to_install_it(sandbox: Sandbox) -> None:
    shutil.rmtree(sandbox.root / "packages")
    (sandbox.root / "packages").mkdir()
    empty = str(sandbox.root / "bin")
    done = sandbox.compile("--set", "minimal", CUDA_HOME="", PATH=empty)
    assert done.returncode == 2 and "pip install nvidia-cuda-nvcc" in done.stderr
    if "nvidia-cutlass" not in installed_packages():
        done = sandbox.compile("--set", "minimal")
        assert done.returncode == 2 and "pip install nvidia-cutlass" in done.stderr
    (sandbox.root / "cuda/bin/nvcc").write_text("#!/bin/sh\nexit 3\n")
    done = sandbox.compile("--set", "minimal", PATH=empty)
    assert done.returncode == 2 and "nvcc cannot be used" in done.stderr


def installed_packages() -> set[str]:
    from importlib import metadata

    return {distribution.metadata["Name"] for distribution in metadata.distributions()}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--set", "some"], "set must be one of minimal, default, full, got 'some'"),
        (["--arch", "80,75"], "arch must be of 80, 90a, got 75"),
        (["--arch", ","], "arch must be of 80, 90a, got none"),
        (["--jobs", "0"], "--jobs"),
    ],
)
def test_invalid_arguments_exit_with_status_2(
    sandbox: Sandbox, arguments: list[str], reason: str
) -> None:
    done = sandbox.compile(*arguments)
    assert done.returncode == 2 and reason in done.stderr


def test_unwritable_output_directory_is_an_error(sandbox: Sandbox) -> None:
    (sandbox.root / "file").write_text("")
    done = sandbox.compile("--set", "minimal", "--out", str(sandbox.root / "file/kernels"))
    assert done.returncode == 2 and "cannot write" in done.stderr


def test_compile_is_a_command_of_flux(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(sandbox.root / "packages"))
    result = CliRunner().invoke(app, ["compile", "--set", "minimal", "--arch", "90a", "--json"])
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["libraries"]) == len(SM90)
    assert "compile" in CliRunner().invoke(app, ["--help"]).stdout


def test_ccache_is_used_unless_told_not_to(sandbox: Sandbox) -> None:
    ccache = sandbox.root / "bin/ccache"
    ccache.parent.mkdir()
    ccache.write_text(f'#!/bin/sh\necho "$@" >> {sandbox.root}/ccache.txt\nexec "$@"\n')
    ccache.chmod(0o755)
    assert sandbox.compile("--set", "minimal", "--arch", "80").returncode == 0
    assert not (sandbox.root / "ccache.txt").exists()
    assert sandbox.compile("--set", "minimal", "--arch", "90a", FLUX_CCACHE="1").returncode == 0
    commands = (sandbox.root / "ccache.txt").read_text().splitlines()
    assert len(commands) == len(SM90)
    assert all(" -c kernels.cu " in command for command in commands)  # ccache does not link


# -- registry --------------------------------------------------------------------------------------


def test_the_registry_finds_what_was_built(sandbox: Sandbox) -> None:
    sandbox.compile("--set", "default")
    built = Registry.load([sandbox.root / "nowhere", sandbox.cache])
    default = config_set("default")
    assert set(built.kernels) == {config.name for config in default}
    assert built.stale == built.damaged == ()
    kernel = built.find(SM90[0])
    assert kernel is not None and kernel.library.is_file() and kernel.symbol == SM90[0].name
    assert kernel.usage.registers == 168
    assert SM90[0].name in (kernel.library.parent / "kernels.cu").read_text()

    def names(*args: object, **kwargs: object) -> set[str]:
        return {kernel.symbol for kernel in built.candidates(*args, **kwargs)}  # type: ignore[arg-type]

    hopper = names("ag_gemm", "bf16", (9, 0), BIG)
    ampere = names("ag_gemm", "bf16", (8, 0), BIG)
    assert ampere and hopper > ampere and all("_sm80_" in name for name in ampere)
    assert names("ag_gemm", "bf16", (7, 5), BIG) == set()
    assert names("ag_gemm", "e4m3", (9, 0), BIG) == set()
    promoted = names("ag_gemm", "e4m3", (9, 0), BIG, scaling="row")
    assert len(promoted) == 3 and all(name.endswith("_promoted") for name in promoted)
    fast = names("ag_gemm", "e4m3", (9, 0), BIG, scaling="row", fast_accum=True)
    assert len(fast) == 2 and not any(name.endswith("_promoted") for name in fast)
    assert names("ag_gemm", "bf16", (9, 0), BIG, activation="gelu") == set()
    (in_flight,) = names("gemm_rs", "bf16", (9, 0), BIG, reduce="in_flight")
    either = names("gemm_rs", "bf16", (9, 0), BIG, reduce=None)
    assert either == names("gemm_rs", "bf16", (9, 0), BIG) | {in_flight}
    odd = GemmProblem(77, 1001, 333, 8, aligned_bytes=2)
    assert all("_a1" in name for name in names("ag_gemm", "bf16", (9, 0), odd))


def test_the_first_root_comes_first_unless_it_is_stale(sandbox: Sandbox) -> None:
    package, cache = sandbox.root / "package", sandbox.cache
    sandbox.compile("--set", "minimal", "--arch", "90a", "--out", str(package))
    sandbox.compile("--set", "minimal")
    built = Registry.load([package, cache])
    assert len(built.kernels) == len(MINIMAL)
    where = {name: kernel.library.parents[1] for name, kernel in built.kernels.items()}
    assert {where[config.name] for config in SM90} == {package}
    change_a_header(sandbox)
    sandbox.compile("--set", "minimal", "--arch", "90a")
    built = Registry.load([package, cache])
    assert set(built.kernels) == {config.name for config in SM90}
    assert {kernel.library.parents[1] for kernel in built.kernels.values()} == {cache}
    assert len(built.stale) == len(MINIMAL) + len(SM90)


def test_within_a_root_the_newest_counts(sandbox: Sandbox) -> None:
    sandbox.compile("--set", "minimal", "--arch", "90a")
    old = sandbox.built()
    for path in old:
        os.utime(path, (1, 1))
    sandbox.set(version="13.1.1")
    sandbox.compile("--set", "minimal", "--arch", "90a")
    built = Registry.load([sandbox.cache])
    assert len(built.libraries) == 2 * len(SM90) and not built.stale
    assert not {kernel.library for kernel in built.kernels.values()} & set(old)


def test_trace_builds_lie_beside_the_others(sandbox: Sandbox) -> None:
    fused = [config for config in SM90 if config.op in (*FUSED, *GROUPED)]
    sandbox.compile("--set", "minimal", "--arch", "90a")
    plain = set(sandbox.built())
    listed = sandbox.compile("--set", "minimal", "--arch", "90a", "--trace", "--list").stdout
    assert listed.splitlines() == [f"{'-':<6}{config.name}" for config in fused]
    done = sandbox.compile("--set", "minimal", "--arch", "90a", "--trace")
    assert done.returncode == 0 and f"{len(fused)} kernels built" in done.stdout
    traced = set(sandbox.built()) - plain
    assert len(traced) == len(fused) and all("_bf16_traced_" in path.name for path in traced)
    for path in traced:
        assert "#define FLUX_TRACE" in (path.parent / "kernels.cu").read_text()
        content = json.loads(path.with_suffix(".json").read_text())
        assert content["traced"] is True
        assert all(symbol.endswith("_traced") for symbol in content["kernels"])
    calls = len(sandbox.calls())
    sandbox.compile("--set", "minimal", "--arch", "90a", "--trace")
    assert len(sandbox.calls()) == calls, "they are there already"
    listed = sandbox.compile("--set", "minimal", "--arch", "90a", "--trace", "--list").stdout
    assert listed.count("built") == len(fused)

    registry = Registry.load([sandbox.cache])
    assert set(registry.kernels) == {config.name for config in SM90}
    assert {kernel.library for kernel in registry.kernels.values()} <= plain
    traces = registry.for_traces()
    assert set(traces.kernels) == {config.name for config in fused}
    for kernel in traces.candidates("ag_gemm", "bf16", (9, 0), BIG):
        assert kernel.symbol == f"{kernel.config.name}_traced" and kernel.library in traced
        assert kernel.usage.registers == 168


def test_what_is_built_ahead_replaces_no_other_build(sandbox: Sandbox) -> None:
    out = sandbox.root / "package"
    both = ["--set", "minimal", "--arch", "90a", "--out", str(out)]
    sandbox.compile(*both)
    sandbox.compile(*both, "--trace")
    before = sandbox.built(out)
    change_a_header(sandbox)
    sandbox.compile(*both)
    after = sandbox.built(out)
    assert {path for path in before if "_traced_" in path.name} <= set(after)
    assert len(after) == len(before), "of each build the old ones are gone, or none are"
    registry = Registry.load([out])
    assert len(registry.kernels) == len(SM90) and not registry.traced and len(registry.stale) == 4


def test_doctor_tells_trace_builds_apart(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "package_root", lambda: sandbox.root / "package")
    sandbox.compile("--set", "minimal", "--arch", "90a", "--trace")
    section = kernels_section()
    assert section["libraries"].value == "none" and section["trace builds"].value == "4 configs"


def test_libraries_are_not_stale_without_sources(sandbox: Sandbox) -> None:
    sandbox.compile("--set", "minimal")
    shutil.rmtree(sandbox.csrc)
    assert len(Registry.load([sandbox.cache]).kernels) == len(MINIMAL)


# -- flux doctor -----------------------------------------------------------------------------------


def kernels_section() -> dict[str, doctor.Item]:
    return {item.name: item for item in doctor._kernels()}


def test_doctor_shows_kernels(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "package_root", lambda: sandbox.root / "package")
    section = kernels_section()
    assert section["cache"].value == str(sandbox.cache)
    assert section["libraries"].status == "absent" and "flux compile" in section["libraries"].note
    sandbox.compile("--set", "minimal")
    section = kernels_section()
    assert (
        section["libraries"].value == str(len(MINIMAL))
        and str(sandbox.cache) in section["libraries"].note
    )
    assert section["ag_gemm sm_90a"].value == "1 config"
    assert "stale libraries" not in section and "damaged libraries" not in section
    change_a_header(sandbox)
    sandbox.built()[0].write_text("")
    with pytest.warns(RuntimeWarning, match="set aside"):
        section = kernels_section()
    stale = section["stale libraries"]
    assert (stale.value, stale.status) == (str(len(MINIMAL) - 1), "warning")
    assert section["damaged libraries"].value == "1"
    assert "damaged-1" in kernels_section()["damaged libraries"].note
    assert section["libraries"].value == "none"


# -- CMake -----------------------------------------------------------------------------------------


def test_cmake_builds_a_set_ahead_of_time(sandbox: Sandbox) -> None:
    # The one that the package is built with; the system's may be too old for it.
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("no CMake or no C++ compiler")
    shutil.copy(ROOT / "CMakeLists.txt", sandbox.root)
    build = sandbox.root / "build"

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [cmake, *command],
            env=sandbox.environment,
            capture_output=True,
            text=True,
            timeout=200,
        )

    def configure(**options: str) -> subprocess.CompletedProcess[str]:
        given = [f"-D{name}={value}" for name, value in options.items()]
        python = f"-DPython_EXECUTABLE={sys.executable}"
        quick = ["-DFLUX_BUILD_PYTHON=OFF", python]
        return run("-S", str(sandbox.root), "-B", str(build), *quick, *given)

    refused = configure(FLUX_KERNEL_SET="everything")
    assert refused.returncode != 0 and "got 'everything'" in refused.stderr
    done = configure(FLUX_KERNEL_SET="none")
    assert done.returncode == 0, done.stderr
    assert run("--build", str(build), "--target", "kernels").returncode == 0
    assert not sandbox.calls()
    done = configure(FLUX_KERNEL_SET="minimal", FLUX_CUDA_ARCHS="90a")
    assert done.returncode == 0, done.stderr
    done = run("--build", str(build))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(sandbox.built(sandbox.root / "flux/lib/kernels")) == len(SM90)
    assert run("--build", str(build)).returncode == 0
    assert len(sandbox.calls()) == len(SM90)

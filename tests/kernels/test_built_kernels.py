"""Kernels as the compiler made them: those of `make kernels`, and where it made none, the same code
in the libraries for the PTX machine. No GPU is needed."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flux import _C
from flux.kernels.config import GROUPED, OPS, GemmConfig
from flux.kernels.registry import BuiltKernel, Registry, package_root
from flux.kernels.sets import config_set

MINIMAL = config_set("minimal")


@pytest.fixture(scope="module")
def registry(ptx_kernels: Path) -> Registry:
    return Registry.load([package_root(), ptx_kernels])


def kernel_of(registry: Registry, config: GemmConfig) -> BuiltKernel:
    kernel = registry.find(config)
    if kernel is None:
        pytest.skip(f"{config.name} is not built")
    return kernel


@pytest.mark.parametrize("config", MINIMAL, ids=lambda c: c.name)
def test_the_library_offers_what_the_manifest_says(registry: Registry, config: GemmConfig) -> None:
    built = kernel_of(registry, config)
    kernel = _C.Kernel(str(built.library), built.symbol)
    assert kernel.name == built.symbol == config.name
    assert kernel.tile == config.tile[:2]
    assert kernel.reduces == config.op.endswith("gemm_rs")


def test_kernels_do_not_spill_registers(registry: Registry) -> None:
    """Neither registers nor arrays may live in local memory, which is as slow as device memory."""
    for kernel in registry.kernels.values():
        usage = kernel.usage
        assert usage.functions > 0 and 0 < usage.registers <= 255, kernel.symbol
        local = (usage.stack_bytes, usage.spill_store_bytes, usage.spill_load_bytes)
        assert local == (0, 0, 0), f"{kernel.symbol}: {usage}"


# -- machine code ----------------------------------------------------------------------------------


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit, or of NVIDIA's packages."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations or [] if spec else []
    folders = [str(path.parent) for root in roots for path in Path(root).glob(f"*/bin/{name}")]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders) or "/nowhere")


def sass_of(kernel: BuiltKernel, arch: str) -> str:
    """Instructions of the GEMM itself, one per line."""
    functions = functions_in(kernel.library, arch)
    [gemm] = [sass for name, sass in functions.items() if kernel.config.name in name]
    return gemm


@functools.cache
def functions_in(library: Path, arch: str) -> dict[str, str]:
    """Instructions of each device function, one per line."""
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    if cuobjdump is None or nvdisasm is None:
        pytest.skip(
            "no cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    environment = {**os.environ, "PATH": f"{Path(nvdisasm).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [cuobjdump, "--dump-sass", "--gpu-architecture", f"sm_{arch}", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    functions = re.split(r"^\s*Function : ", done.stdout, flags=re.M)[1:]
    return {
        function.split("\n", 1)[0]: "\n".join(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.+?);", function))
        for function in functions
    }


def sm90(registry: Registry, op: str) -> str:
    [config] = [c for c in MINIMAL if (c.op, c.arch) == (op, "90a")]
    return sass_of(kernel_of(registry, config), "90a")


@pytest.mark.parametrize("op", OPS)
def test_hopper_kernels_use_hopper(registry: Registry, op: str) -> None:
    """Those of experts gather rows, which TMA does not."""
    sass = sm90(registry, op)
    moves = ("LDGSTS", "FENCE.VIEW.ASYNC.S") if op in GROUPED else ("UTMALDG", "UTMASTG")
    for instruction in ("HGMMA", *moves):
        assert instruction in sass, f"no {instruction}"
    for instruction in ("LDL", "STL", "HMMA."):
        assert not re.search(rf"^(@!?\w+ )?{instruction}", sass, re.M), instruction


def test_rows_are_awaited_before_they_are_loaded(registry: Registry) -> None:
    """Acquire at system scope, then the proxy fence, then the first TMA load; a plain GEMM does
    neither."""
    sass = sm90(registry, "ag_gemm")
    acquire = sass.index("LDG.E.STRONG.SYS")
    fence = sass.index("FENCE.VIEW.ASYNC.G", acquire)
    assert acquire < fence < sass.index("UTMALDG")
    assert "STRONG.SYS" not in sm90(registry, "gemm")


def test_flags_are_raised_after_the_stores_are_complete(registry: Registry) -> None:
    sass = sm90(registry, "gemm_rs")
    for flag in re.finditer(r"STG\.E\.STRONG\.SYS", sass):
        before = sass[: flag.start()]
        assert "FENCE.VIEW.ASYNC.G" in before and "MEMBAR.ALL.SYS" in before
    assert "STG.E.STRONG.SYS" in sass


def test_the_reduction_may_start_before_its_gemm_ends(registry: Registry) -> None:
    """Blocks of the GEMM say so when they start; those of the reduction wait for it at their end.
    Only kernels of sm_90a that scatter do."""
    sass = sm90(registry, "gemm_rs")
    assert sass.index("PREEXIT") < sass.index("SYNCS")
    for op in ("gemm", "ag_gemm"):
        assert "PREEXIT" not in sm90(registry, op)
    [config] = [c for c in MINIMAL if (c.op, c.arch) == ("gemm_rs", "90a")]
    functions = functions_in(kernel_of(registry, config).library, "90a")
    reductions = [sass for name, sass in functions.items() if "reduce_kernel" in name]
    assert [sass.count("ACQBULK") for sass in reductions] == [1, 1]


def test_failures_are_written_for_the_host_with_their_code_last(registry: Registry) -> None:
    """Where a wait fails, first into the rank's status, and where the kernel ends: four words of
    the host's memory, a fence at system scope, and the fifth. AGGemm waits for the rows of a tile
    and, where its blocks push rows, for the words of all ranks; GemmRS for entries and, where it
    sums, for flags and (GemmAR) for the words of sums. It ends in two ways."""
    words = r"ST\w*\.E\.64\.STRONG\.SYS"
    report = (
        rf"(?:{words} (?:.*\n){{1,2}}){{3}}{words} (?:.*\n)+?MEMBAR\.SC\.SYS(?:.*\n)+?[^\n]*{words}"
    )
    orders = {
        op: len(re.findall(report, sm90(registry, op))) for op in ("gemm", "ag_gemm", "gemm_rs")
    }
    assert orders == {"gemm": 0, "ag_gemm": 2 * 2 + 1, "gemm_rs": 2 * 4 + 2}


def clock_reads(sass: str) -> int:
    return len(re.findall(r"SR_GLOBALTIMERLO", sass))


@pytest.mark.parametrize("op", ["gemm", "ag_gemm", "gemm_rs"])
def test_only_waits_read_the_clock(registry: Registry, op: str) -> None:
    """But in trace builds: where a wait begins, and as it goes on."""
    waits = {"gemm": 0, "ag_gemm": 2, "gemm_rs": 4}
    assert clock_reads(sm90(registry, op)) == 2 * waits[op]


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_trace_builds_stamp_tiles(registry: Registry, op: str) -> None:
    traced = registry.for_traces()
    [config] = [c for c in MINIMAL if (c.op, c.arch) == (op, "90a")]
    kernel = kernel_of(traced, config)
    assert _C.Kernel(str(kernel.library), kernel.symbol).traces
    plain = kernel_of(registry, config)
    assert not _C.Kernel(str(plain.library), plain.symbol).traces
    sass = sass_of(kernel, "90a")
    assert clock_reads(sass) > clock_reads(sass_of(plain, "90a")) and "SR_VIRTUALSMID" in sass
    usage = kernel.usage
    assert usage.registers <= plain.usage.registers
    # With stamps the idle warps, which have 40 registers, keep four words while they sum.
    beside = 16 if op == "gemm_rs" else 0
    assert usage.spill_store_bytes <= beside and usage.spill_load_bytes <= beside, usage


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_ampere_kernels_run_on_newer_devices_too(registry: Registry, op: str) -> None:
    config = next(c for c in MINIMAL if (c.op, c.arch) == (op, "80"))
    kernel = kernel_of(registry, config)
    for arch in ("80", "90"):
        sass = sass_of(kernel, arch)
        assert "HMMA.16816" in sass and "LDGSTS" in sass
        assert "STRONG.SYS" in sass

"""Flux's minimal kernels as another CUDA version compiles them, by its NVRTC, for the PTX machine.

    python tests/support/emulation/nvrtc_ptx.py --version 12.8.93 --out build/nvrtc-12.8
    python tests/support/emulation/seeds.py --ptx build/nvrtc-12.8 --seeds 100

pip has no nvcc of CUDA 12, but its compiler as a library. NVRTC has no standard library and no host
code: empty headers and functions that do nothing stand in for both, and only kernels are compiled.
Constants of templates, 8,000 for sm_90a, become variables of the device.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests" / "support")]


from every_kernel import minimal  # noqa: E402
from flux.kernels.build import find_tools  # noqa: E402
from flux.kernels.config import ARCHS, GemmConfig  # noqa: E402
from flux.kernels.generator import config_struct, translation_unit  # noqa: E402
from flux.machine.toolchain import cutlass_includes  # noqa: E402

# By pip: the compiler, and the headers that kernels include.
PACKAGES = ("nvrtc", "nvcc", "runtime", "cccl")
HAS_TWIN = """
    array atomic bit cassert cfloat climits cmath complex cstddef cstdint functional
    initializer_list limits optional span tuple type_traits utility variant
"""
HOST_ONLY = """
    algorithm cinttypes cstdio cstdlib cstring exception fstream iomanip iostream
    iterator map memory mutex new numeric ostream random set sstream stdexcept string thread
    unordered_map vector assert.h limits.h math.h stdio.h stdlib.h string.h
"""
TWIN = "#pragma once\n#include <cuda/std/{}>\nnamespace std { using namespace ::cuda::std; }\n"
RUNTIME_CALLS = """
    cudaGetDevice cudaSetDevice cudaGetLastError cudaDeviceGetAttribute
    cudaFuncSetAttribute cudaLaunchKernelEx cudaLaunchKernelExC cudaMemsetAsync
    cudaOccupancyMaxActiveBlocksPerMultiprocessor cudaOccupancyMaxActiveClusters
"""
PRELUDE = """
#pragma once
#include <cstdint>
#include <tuple>
#include <driver_types.h>
namespace cute { template <class... T> struct tuple; }
namespace std {  // for structured bindings of constants, which CUTLASS leaves to the library
template <class... T>
struct tuple_size<const cute::tuple<T...>> : cuda::std::tuple_size<cute::tuple<T...>> {};
template <size_t I, class... T>
struct tuple_element<I, const cute::tuple<T...>>
    : cuda::std::tuple_element<I, const cute::tuple<T...>> {};
}  // namespace std
#define CALL(name) template <class... A> __device__ cudaError_t name(A...) { return cudaSuccess; }
@CALLS@
#define cudaFuncGetAttributes(...) cudaSuccess
extern "C" __device__ void* cudaGetParameterBufferV2(void*, dim3, dim3, unsigned);
extern "C" __device__ cudaError_t cudaLaunchDeviceV2(void*, cudaStream_t);
"""
DESCRIPTOR = "cute/arch/copy_sm90_desc.hpp"
# Host code whose containers have no twin.
LAUNCH_CACHE = """
#pragma once
#include <optional>
#include "cuda/abi.h"
namespace flux {
struct LaunchKey {};
__device__ inline LaunchKey launch_key(const FluxGemmArgs&) { return {}; }
template <class Value>
struct LaunchCache {
  __device__ std::optional<Value> find(const LaunchKey&) { return {}; }
  __device__ void keep(const LaunchKey&, const Value&) {}
};
}  // namespace flux
"""
# Of host code, which is compiled as if it ran on the device: tables of functions and of texts.
HOST_TABLE = re.compile(r"^\.\w+ \.global [^;\n]*= [^;\n]*[A-Za-z_$][^;\n]*;\n", re.M)


def install(version: str, folder: Path) -> Path:
    """Install NVRTC and its headers by pip, if they are not there; return the folder of both."""
    major_minor = version.rsplit(".", 1)[0]
    if not (folder / "nvidia" / "cuda_nvrtc").exists():
        suffix = f"cu{version.split('.')[0]}"
        wanted = [
            f"nvidia-cuda-{name}-{suffix}=={version if name == 'nvrtc' else f'{major_minor}.*'}"
            for name in PACKAGES
        ]
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        subprocess.run([*command, str(folder), *wanted], check=True)
    return folder / "nvidia"


def write_headers(folder: Path, cutlass: Path) -> None:
    """Write what stands in for the standard library, for host code, and for a header of CUTLASS.

    The library that launches the kernels has tensor maps as CUDA 13 aligns them.
    """
    texts = {name: TWIN.replace("{}", name, 1) for name in HAS_TWIN.split()}
    texts |= {"stdint.h": texts["cstdint"], "stddef.h": texts["cstddef"]}
    texts |= dict.fromkeys(HOST_ONLY.split(), "#pragma once\n")
    calls = "\n".join(f"CALL({name})" for name in RUNTIME_CALLS.split())
    texts |= {"prelude.h": PRELUDE.replace("@CALLS@", calls), "cuda/launch_cache.h": LAUNCH_CACHE}
    descriptor = (cutlass / DESCRIPTOR).read_text()
    texts[DESCRIPTOR] = descriptor.replace("struct alignas(64)", "struct alignas(128)")
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def kernels_of(config: GemmConfig) -> list[str]:
    """Return the C++ names of the kernels in a configuration's library."""
    types = config_struct(config)
    kind = {"gemm": "Gemm", "ag_gemm": "AGGemm", "gemm_rs": "GemmRS"}[config.op]
    space = "flux::sm80" if config.arch == "80" else "flux::sm90"
    launch = f"{space}::{kind}<{types}>::Launch"
    if config.arch == "80":
        names = [f"{space}::kernel<{types}, {launch}::Base, {launch}::kStreamK>"]
    else:
        names = [f"cutlass::device_kernel<{launch}::Kernel>"]
    if config.op == "gemm_rs":
        widths = (8, 1)
        names += [f"flux::reduce_kernel<cutlass::bfloat16_t, {width}>" for width in widths]
    return [*names, "flux::meet_kernel"]


class Nvrtc:
    """One version of the compiler.

    Args:
        packages: folder of the pip packages.
        headers: folder for what ``write_headers`` writes.
    """

    def __init__(self, packages: Path, headers: Path) -> None:
        cutlass = cutlass_includes(find_tools().cutlass)
        write_headers(headers, Path(cutlass[0]))
        (library,) = (packages / "cuda_nvrtc" / "lib").glob("libnvrtc.so.*")
        self.library = ctypes.CDLL(str(library))
        parts = [packages / f"cuda_{name}" / "include" for name in ("cccl", "runtime", "nvcc")]
        self.includes = [headers, ROOT / "csrc", *cutlass, *parts]

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{what}")(program, text)
        return text.value.decode()

    def compile(self, source: str, arch: str, kernels: Sequence[str]) -> str:
        """Return the PTX of kernels in a source.

        Raises:
            RuntimeError: it does not compile.
        """
        program = ctypes.c_void_p()
        self.library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
        )
        for kernel in kernels:
            self.library.nvrtcAddNameExpression(program, kernel.encode())
        options = [
            f"-arch=compute_{arch}",
            "-std=c++17",
            "-default-device",
            "-rdc=true",
            "-lineinfo",
            "-DNDEBUG",
            "--pre-include=prelude.h",
            *(f"-I{folder}" for folder in self.includes),
        ]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = self.library.nvrtcCompileProgram(program, len(options), given)
        if failed:
            log = self._text(program, "ProgramLog").splitlines()
            raise RuntimeError("\n".join(line for line in log if "error" in line))
        return HOST_TABLE.sub("", self._text(program, "PTX"))


def main() -> None:
    """Compile the minimal kernels, each into a file of its name."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--version", default="12.8.93", help="of NVRTC")
    parser.add_argument("--arch", default=",".join(ARCHS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    packages = install(options.version, options.out / "packages")
    nvrtc = Nvrtc(packages, options.out / "headers")
    for config in (c for arch in options.arch.split(",") for c in minimal(arch)):
        source = translation_unit([config])
        without_table = re.sub(r"(?m)^FLUX_KERNEL\(.*\)$", "", source)
        text = nvrtc.compile(without_table, config.arch, kernels_of(config))
        (options.out / f"{config.name}.ptx").write_text(text)
        print(f"{config.name}: {text.count(chr(10))} lines of PTX", flush=True)


if __name__ == "__main__":
    main()

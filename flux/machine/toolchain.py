"""Find the tools to build and trace CUDA kernels: nvcc, CUTLASS, NVSHMEM, NVTX."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NVCC_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu13", "nvidia-cuda-nvcc-cu12")
NVSHMEM_PACKAGES = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
NVSHMEM_DEVICE_LIBRARY = "libnvshmem_device.a"
NVSHMEM_HOST_LIBRARY = "libnvshmem_host.so.3"
NVTX_PACKAGES = ("nvidia-nvtx", "nvidia-nvtx-cu12")
NVTX_NAMES = ("libnvtx3interop.so.1", "libnvToolsExt.so.1")  # the second up to CUDA 12


@dataclass(frozen=True)
class Tool:
    """A tool that was found.

    Attributes:
        version: as the tool states it, None if it does not.
        path: the program, or the directory of the headers or of a whole package.
        origin: where the path comes from: an environment variable, PATH, or a package.
        problem: why the tool cannot be used although it was found; empty if it can.
    """

    version: str | None
    path: str
    origin: str
    problem: str = ""

    def describe(self) -> str:
        """Return path, origin and problem in one line."""
        text = f"{self.path}, from {self.origin}"
        return f"{text}: {self.problem}" if self.problem else text


def nvcc() -> Tool | None:
    """Return the first working nvcc of CUDA_HOME, CUDA_PATH, PATH and the nvidia-cuda-nvcc package.

    If none works, return the first that was found, with its problem.
    """
    unusable: Tool | None = None
    for origin, path in _nvcc_candidates():
        if not os.access(path, os.X_OK):
            continue
        command = [path, "--version"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            unusable = unusable or Tool(None, path, origin, f"does not run: {error}")
            continue
        version = re.search(r"\bV(\d+\.\d+\.\d+)", done.stdout)
        return Tool(version.group(1) if version else None, path, origin)
    return unusable


def _nvcc_candidates() -> list[tuple[str, str]]:
    candidates = [
        (name, str(Path(os.environ[name], "bin", "nvcc")))
        for name in ("CUDA_HOME", "CUDA_PATH")
        if os.environ.get(name)
    ]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(("PATH", on_path))
    for package in NVCC_PACKAGES:
        candidates += [(f"package {package}", path) for path in _package_files(package, "nvcc")]
    return candidates


def cutlass_includes(cutlass: Tool) -> list[str]:
    """Return the include directories of CUTLASS: the library's, and its utilities' if present."""
    utilities = Path(cutlass.path).parent / "tools" / "util" / "include"
    return [cutlass.path, *([str(utilities)] if utilities.is_dir() else [])]


def cutlass() -> Tool | None:
    """Return the CUTLASS headers of the nvidia-cutlass package."""
    spec = importlib.util.find_spec("cutlass_library")
    for root in (spec.submodule_search_locations or []) if spec else []:
        include = Path(root, "source", "include")
        if (include / "cutlass" / "cutlass.h").is_file():
            version = _package_version("nvidia-cutlass")
            return Tool(version, str(include), "package nvidia-cutlass")
    return None


def nvshmem(cuda: str | None = None) -> Tool | None:
    """Return NVSHMEM from its wheel: ``path`` is its directory, with include and lib in it.

    Args:
        cuda: required major version of CUDA; by default any, the newest first.
    """
    for package in NVSHMEM_PACKAGES:
        version = _package_version(package)
        if version and (cuda is None or package.endswith(f"-cu{cuda}")):
            headers = _package_files(package, "nvshmem.h")
            path = str(Path(headers[0]).parents[1]) if headers else "no path"
            return Tool(version, path, f"package {package}", _lacking(path, bool(headers)))
    return None


def _lacking(path: str, headers: bool) -> str:
    libraries = (NVSHMEM_DEVICE_LIBRARY, NVSHMEM_HOST_LIBRARY)
    missing = [name for name in libraries if not Path(path, "lib", name).is_file()]
    if not headers:
        return "has no headers"
    return f"has no {' and no '.join(missing)}" if missing else ""


def nvtx_libraries() -> list[str]:
    """Return candidates for NVTX's library: in packages, in CUDA_HOME, on the loader's path."""
    libraries = [
        path
        for package in NVTX_PACKAGES
        for name in NVTX_NAMES
        for path in _package_files(package, name)
    ]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            places = (Path(os.environ[variable], "lib64", name) for name in NVTX_NAMES)
            libraries += [str(path) for path in places if path.is_file()]
    return [*libraries, *NVTX_NAMES]


def _package_files(package: str, name: str) -> list[str]:
    """Return the installed files of a distribution with this file name."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [str(file.locate()) for file in files if file.name == name]


def _package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

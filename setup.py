"""Builds the native module flux._C with CMake and Ninja; every other fact is in pyproject.toml.

Environment: CMAKE_ARGS is passed on to CMake (for example "-DFLUX_WERROR=ON"), and
CMAKE_BUILD_PARALLEL_LEVEL limits the number of compilers that run at once.
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def find_tool(name: str, package_attribute: str) -> str:
    """Path of `cmake` or `ninja`: from its Python package, else from PATH.

    The package comes first because pip does not put a virtual environment's bin directory on PATH
    when it builds without isolation.
    """
    try:
        directory = getattr(importlib.import_module(name), package_attribute)
    except (ImportError, AttributeError):
        directory = None
    path = shutil.which(name, path=directory) or shutil.which(name)
    if path is None:
        sys.exit(f"flux-overlap needs {name} to build: pip install {name}")
    return path


class CMakeBuild(build_ext):
    """Configures and builds in build/native-<tag>, which is kept, so that a rebuild is partial."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        tag = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        build_dir = ROOT / "build" / f"native-{tag}"
        cmake = find_tool("cmake", "CMAKE_BIN_DIR")
        configure = [
            cmake,
            *("-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja', 'BIN_DIR')}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DFLUX_VERSION={self.distribution.get_version()}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        # CMake keeps the options of earlier runs and refuses a tree that was moved. So start over
        # whenever the command differs from the last one that worked.
        record = build_dir / "configured-with.txt"
        command = shlex.join(configure)
        if not record.exists() or record.read_text() != command:
            configure.append("--fresh")
        subprocess.run(configure, check=True)
        record.write_text(command)
        # `kernels` does nothing unless FLUX_KERNEL_SET or FLUX_NVSHMEM asks for some.
        subprocess.run([cmake, "--build", str(build_dir), "--target", "_C", "kernels"], check=True)

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renamed over the old module, not written into it: a running process may have it mapped.
        with tempfile.TemporaryDirectory(prefix=".new-", dir=target.parent) as folder:
            fresh = shutil.copy2(build_dir / target.name, folder)
            os.replace(fresh, target)
        self.copy_kernels(build_dir, target.parent / "lib" / "kernels")

    def copy_kernels(self, build_dir: Path, destination: Path) -> None:
        """Put the kernels that CMake built into the wheel; in the checkout they are in place."""
        built = ROOT / "flux" / "lib" / "kernels"
        if destination == built:
            return
        shutil.rmtree(destination, ignore_errors=True)  # of an earlier build
        cache = (build_dir / "CMakeCache.txt").read_text()
        if "FLUX_KERNEL_SET:STRING=none" in cache and "FLUX_NVSHMEM:BOOL=OFF" in cache:
            return
        for library in [*built.glob("libflux_*/*.so"), *built.glob("nvshmem_*/*.so")]:
            shutil.copytree(library.parent, destination / library.parent.name)


class BuildPy(build_py):
    """Adds the sources that `flux compile` needs, and the data of `flux tune`, so that both work
    from a wheel too."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # they are found in the checkout
            return
        kernels = [f"{part}/**/*.{kind}" for part in ("cuda", "cuda_moe") for kind in ("h", "cuh")]
        self.copy("csrc", ("core/*.h", *kernels, "cuda/**/*.cu"))
        self.copy("tuning", ("**/*.toml", "**/*.json"))

    def copy(self, folder: str, patterns: tuple[str, ...]) -> None:
        """Copy what matches, of a folder of the checkout, to one of that name in the package."""
        destination = Path(self.build_lib) / "flux" / folder
        shutil.rmtree(destination, ignore_errors=True)  # a file may be gone since
        for pattern in patterns:
            for file in (ROOT / folder).glob(pattern):
                copy = destination / file.relative_to(ROOT / folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


setup(
    ext_modules=[Extension("flux._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildPy},
)

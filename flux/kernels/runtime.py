"""Build and find libflux_nvshmem.so: csrc/cuda/runtime linked with NVSHMEM.

It lies beside the kernel libraries (manifest.py), and is built and moved into place like them:

<root>/nvshmem_<key>/libflux_nvshmem.so
                     libflux_nvshmem.json       the manifest
                     libflux_nvshmem.ptxas.txt  ptxas's report
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flux.kernels import build, manifest, ptxas, sources, trust
from flux.kernels.build import MissingToolError, Target, Tools
from flux.kernels.children import Children
from flux.kernels.manifest import DamagedLibraryError
from flux.kernels.ptxas import Usage
from flux.kernels.trust import UntrustedError
from flux.machine import toolchain

NAME = "libflux_nvshmem"
SYMBOL = "flux_nvshmem"  # FLUX_NVSHMEM_SYMBOL
SOURCE = "cuda/runtime/nvshmem.cu"
KERNELS = ("relay_kernel", "node_sum_kernel")

_FORMAT = 1
_TEXTS = ("sha256", "package", "nvshmem", "nvcc", "cutlass", "sources", "key")
_OBJECT = "nvshmem.o"
_EXPORTS = "exports.map"
# Device code is linked, so NVSHMEM's library must contain, or be able to produce, each
# architecture.
_CODE = {
    "80": "-gencode=arch=compute_80,code=sm_80",
    "90a": "-gencode=arch=compute_90a,code=sm_90a",
}
ARCHS = tuple(_CODE)


@dataclass(frozen=True)
class RuntimeTools:
    """The tools to build the library."""

    tools: Tools
    nvshmem: toolchain.Tool

    @property
    def package(self) -> str:
        """The NVSHMEM package."""
        return self.nvshmem.origin.removeprefix("package ")

    def flags(self, archs: Sequence[str]) -> tuple[str, ...]:
        """Return the compiler's flags except paths."""
        target = self.tools.target
        if target.nvshmem is not None:  # it has functions that ptxas does not find: PTX alone
            code = [f"-gencode=arch=compute_{arch},code=compute_{arch}" for arch in archs]
            return (*target.flags, *code)
        return (*target.flags, "-rdc=true", *(_CODE[arch] for arch in archs))

    def commands(self, archs: Sequence[str]) -> list[list[str]]:
        """Return the compile and link commands; their directory must hold the list of exports."""
        tools, source = self.tools, str(self.tools.csrc / SOURCE)
        include = str(Path(self.nvshmem.path, "include"))
        compiling = tools.compiling(self.flags(archs), source, _OBJECT, [include])
        linking = [*tools.linking(), f"-Xlinker=--version-script={_EXPORTS}", _OBJECT]
        return [compiling, [*linking, *self._libraries(archs), "-o", f"{NAME}.so"]]

    def _libraries(self, archs: Sequence[str]) -> list[str]:
        # No run path: what the library needs is loaded before it, wherever both are by then.
        if self.tools.target.nvshmem_library is not None:
            return [str(self.tools.target.nvshmem_library)]
        library = Path(self.nvshmem.path, "lib")
        return [
            *(_CODE[arch] for arch in archs),
            str(library / toolchain.NVSHMEM_DEVICE_LIBRARY),
            f"-L{library}",
            f"-Xlinker=-l:{toolchain.NVSHMEM_HOST_LIBRARY}",
        ]

    def inputs(self, archs: Sequence[str]) -> list[str]:
        """Return the inputs of the commands, other than our sources, that the key depends on."""
        key_inputs = [
            self.tools.cutlass.version or "unknown",
            self.tools.nvcc.version or "unknown",
            self.package,
            self.nvshmem.version or "unknown",
            *self.flags(archs),
            *self.tools.link_inputs(),
            *build.inherited_flags(),
        ]
        if self.tools.target.nvshmem is not None:  # these headers have no version
            headers = sorted(Path(self.nvshmem.path, "include").glob("*.h"))
            key_inputs.append(sources.digest([header.read_text("utf-8") for header in headers]))
        return key_inputs


@dataclass(frozen=True)
class RuntimeLibrary:
    """A built library, as its manifest describes it.

    Attributes:
        directory: the library's directory.
        sha256: of the .so.
        package: of NVSHMEM that it was linked with.
        nvshmem: version of that package.
        archs: that it has code for.
        nvcc: version.
        cutlass: version.
        sources: hash of our sources.
        key: hash of all inputs of the build.
        ptxas: usage of registers and local memory, by kernel: the largest of its instances.
        seconds: duration of compiling and linking.
    """

    directory: Path
    sha256: str
    package: str
    nvshmem: str
    archs: tuple[str, ...]
    nvcc: str
    cutlass: str
    sources: str
    key: str
    ptxas: dict[str, Usage]
    seconds: float

    @property
    def path(self) -> Path:
        """The shared object."""
        return self.directory / f"{NAME}.so"

    def as_dict(self) -> dict[str, Any]:
        """Return the manifest, for JSON."""
        fields = asdict(self) | {"archs": list(self.archs), "seconds": round(self.seconds, 1)}
        del fields["directory"]
        return {"format": _FORMAT, "library": f"{NAME}.so", **fields}


def read(directory: Path) -> RuntimeLibrary:
    """Return the library in ``directory``, after comparing its file with the manifest.

    Raises:
        DamagedLibraryError: it differs from what was built.
        UntrustedError: another user can write or replace it.
    """
    trust.check(directory)
    with manifest.reading():
        content = manifest.load(directory / f"{NAME}.json", _FORMAT)
        library = RuntimeLibrary(
            directory=directory,
            **{name: content.text(name) for name in _TEXTS},
            archs=content.texts("archs"),
            ptxas=ptxas.read(content),
            seconds=content.number("seconds", most=1e9),
        )
        with trust.opened(library.path) as file:
            sha256 = file.sha256()
    if sha256 != library.sha256:
        raise DamagedLibraryError(f"{NAME}.so is not the file that the manifest describes")
    return library


def scan(root: Path) -> list[RuntimeLibrary]:
    """Return the libraries in ``root``, newest first.

    Damaged ones, and those that another user can write or replace, are left out with a warning.
    """
    if not manifest.is_trusted(root):
        return []
    libraries = []
    for directory in sorted(root.glob("nvshmem_*")):
        if ".damaged-" in directory.name:
            continue
        try:
            libraries.append(read(directory))
        except UntrustedError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        except DamagedLibraryError as error:
            warnings.warn(
                f"damaged library {directory} is ignored: {error}", RuntimeWarning, stacklevel=2
            )
    return sorted(libraries, key=lambda library: -library.path.stat().st_mtime_ns)


def usable(roots: Sequence[Path]) -> RuntimeLibrary:
    """Return the library for these sources and the installed NVSHMEM, of the first root with one.

    Raises:
        MissingToolError: there is none; the message says how to get it.
    """
    how = "build it with flux compile --runtime"
    libraries = [library for root in roots for library in scan(root)]
    headers = sources.csrc()
    if headers is not None and (headers / SOURCE).is_file():
        libraries = [library for library in libraries if library.sources == sources_hash(headers)]
    if not libraries:
        raise MissingToolError(f"{NAME}.so is not built for this version of flux: {how}")
    for library in libraries:
        installed = toolchain.nvshmem(library.package.rpartition("-cu")[2])
        if installed is not None and installed.version == library.nvshmem:
            return library
    built = " or ".join(sorted({f"{library.package} {library.nvshmem}" for library in libraries}))
    present = toolchain.nvshmem()
    have = "none" if present is None else f"{present.origin.split()[-1]} {present.version}"
    raise MissingToolError(f"{NAME}.so is built for {built}, but {have} is installed: {how}")


def find_tools(target: Target = build.GPU) -> RuntimeTools:
    """Find nvcc, CUTLASS, our sources, and NVSHMEM: the target's, or that for nvcc's CUDA.

    Args:
        target: what the library is built for.

    Raises:
        MissingToolError: one of them is missing or does not work.
    """
    tools = build.find_tools(target)
    if not (tools.csrc / SOURCE).is_file():
        raise MissingToolError(f"{tools.csrc / SOURCE} is missing: reinstall flux-overlap")
    if target.nvshmem is None:
        return RuntimeTools(tools, _nvshmem_for(tools))
    header = Path(target.nvshmem.path, "include/nvshmem.h")
    for file in (header, target.nvshmem_library):
        if file is not None and not file.is_file():
            raise MissingToolError(f"{file} is missing: {target.how_to_get}")
    return RuntimeTools(tools, target.nvshmem)


def _nvshmem_for(tools: Tools) -> toolchain.Tool:
    cuda = (tools.nvcc.version or "13").partition(".")[0]
    nvshmem = toolchain.nvshmem(cuda)
    wanted = f"nvidia-nvshmem-cu{cuda}"
    if nvshmem is None:
        raise MissingToolError(f"NVSHMEM was not found: pip install {wanted}")
    if nvshmem.problem:
        raise MissingToolError(f"NVSHMEM cannot be used: {nvshmem.describe()}")
    return nvshmem


def sources_hash(root: Path) -> str:
    """Return the hash of the source and all headers of ours that it includes."""
    text = (root / SOURCE).read_text(encoding="utf-8")
    parts = [(SOURCE, text)]
    for name in sources.headers(text, root):
        parts.append((name, (root / name).read_text(encoding="utf-8")))
    return sources.digest(parts)


def make(root: Path, tools: RuntimeTools, archs: Sequence[str]) -> tuple[RuntimeLibrary, bool]:
    """Build the library in ``root`` unless it exists; return it, and whether it was built now.

    Raises:
        ValueError: an architecture that it cannot be built for.
        CompileError: it does not compile or link.
        UntrustedError: another user can write or replace ``root``, or the library.
        OSError: ``root`` cannot be written.
    """
    unknown = [arch for arch in archs if arch not in _CODE]
    if unknown or not archs:
        raise ValueError(f"{NAME} is built for {' and '.join(ARCHS)}, got {', '.join(archs)}")
    hashed = sources_hash(tools.tools.csrc)
    key = sources.digest([hashed, *tools.inputs(archs)])
    name, children = f"nvshmem_{key[:12]}", Children()
    into = partial(
        _make_in, tools=tools, archs=archs, children=children, root=root, hashed=hashed, key=key
    )
    # On another thread, so that an exception in this one, above all Ctrl-C, kills the compilers.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="flux-compile") as pool:
        try:
            return pool.submit(build.in_place, root, name, read, into, children).result()
        except BaseException:
            children.kill()
            raise


def remove_others(root: Path, library: RuntimeLibrary) -> None:
    """Remove the libraries that ``library`` replaces, in a root used by one checkout.

    Raises:
        OSError: one cannot be removed.
    """
    for other in scan(root):
        if other.key != library.key:
            manifest.remove(root, other.directory)


def _make_in(
    staging: Path,
    tools: RuntimeTools,
    archs: Sequence[str],
    children: Children,
    root: Path,
    hashed: str,
    key: str,
) -> None:
    begin = time.monotonic()
    exports = f"{{ global: {SYMBOL}; local: *; }};\n"
    (staging / _EXPORTS).write_text(exports, encoding="utf-8")
    log = build.failure_log(root, NAME)
    report = build.run_all(tools.commands(archs), staging, children, NAME, log)
    if sources_hash(tools.tools.csrc) != hashed:
        raise build.CompileError(f"{NAME}: sources changed while this was compiled; try again")
    (staging / f"{NAME}.ptxas.txt").write_text(report, encoding="utf-8")
    library = RuntimeLibrary(
        directory=staging,
        sha256=manifest.file_hash(staging / f"{NAME}.so"),
        package=tools.package,
        nvshmem=tools.nvshmem.version or "unknown",
        archs=tuple(archs),
        nvcc=tools.tools.nvcc.version or "unknown",
        cutlass=tools.tools.cutlass.version or "unknown",
        sources=hashed,
        key=key,
        ptxas=ptxas.usage_by(report, {kernel: kernel for kernel in KERNELS}),
        seconds=time.monotonic() - begin,
    )
    text = json.dumps(library.as_dict(), indent=1)
    (staging / f"{NAME}.json").write_text(text + "\n", encoding="utf-8")
    for name in (_OBJECT, _EXPORTS):
        os.unlink(staging / name)

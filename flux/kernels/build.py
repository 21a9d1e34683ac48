"""Build one library of kernels: tools, key, and the atomic move into place.

A library takes two commands, one after the other. ninja would only run them. This module also has
the lock that other processes wait for, the key, the rename into place and the report of ptxas, and
it ends compilers when the user interrupts.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from flux.core import env
from flux.core.datafile import write_whole
from flux.kernels import manifest, ptxas, sources, trust
from flux.kernels.children import Cancelled, Children
from flux.kernels.config import GemmConfig
from flux.kernels.generator import library_name, symbol, translation_unit
from flux.kernels.manifest import DamagedLibraryError, Library
from flux.machine import toolchain

SOURCE = "kernels.cu"
_OBJECT = "kernels.o"
_EXCERPT_LINES = 12

T = TypeVar("T")

FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Xptxas=-v",
)
_CODE = {
    # The fallback on newer GPUs: code for Hopper too, where it is used beside sm_90a (both from one
    # front-end run), and PTX for later architectures.
    "80": "arch=compute_80,code=[sm_80,sm_90,compute_80]",
    "90a": "arch=compute_90a,code=sm_90a",
}
LINK_FLAGS = (
    "-shared",
    # Static, so that no libcudart of a particular version is needed at run time.
    "-cudart=static",
    "-Xlinker=--exclude-libs=ALL",
    # Unresolved symbols fail here instead of at load time.
    "-Xlinker=--no-undefined",
)
# Variables that nvcc itself reads.
_NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")


def inherited_flags() -> list[str]:
    """Return the flags that nvcc takes from the environment."""
    return [f"{name}={os.environ[name]}" for name in _NVCC_VARIABLES if name in os.environ]


class MissingToolError(RuntimeError):
    """A required tool or library is missing; the message says how to get it."""


class CompileError(RuntimeError):
    """A library did not compile; the message names its configs and has nvcc's first errors."""


@dataclass(frozen=True)
class Target:
    """What libraries are built for. The default, ``GPU``, is a GPU with NVIDIA's runtime.

    Attributes:
        flags: of the compiler, for each kernel.
        code: flag of the compiler by architecture: which code it generates.
        link_flags: of the linker.
        runtime: files of what stands in for NVIDIA's runtime. Those that end in ``.cpp`` are
            compiled into each library; the others are headers that they include.
        nvshmem: headers that libflux_nvshmem is built with; None: of the installed package.
        nvshmem_library: what it is linked with then.
        loads_on_gpus: whether a GPU can load the libraries. If not, the cache of kernels must not
            hold them.
        how_to_get: how to make ``nvshmem`` and its library, for messages.
        families: whether ops of a family share a library: less to compile, for fewer cores.
    """

    flags: tuple[str, ...] = FLAGS
    code: Mapping[str, str] = field(
        default_factory=lambda: {arch: f"-gencode={code}" for arch, code in _CODE.items()}
    )
    link_flags: tuple[str, ...] = LINK_FLAGS
    runtime: tuple[Path, ...] = ()
    nvshmem: toolchain.Tool | None = None
    nvshmem_library: Path | None = None
    loads_on_gpus: bool = True
    how_to_get: str = ""
    families: bool = False


GPU = Target()


@dataclass(frozen=True)
class Tools:
    """The build tools: programs, headers, versions; and what they build for."""

    nvcc: toolchain.Tool
    cutlass: toolchain.Tool
    csrc: Path
    ccache: str | None = None
    target: Target = GPU

    def _own_flags(self, arch: str) -> tuple[str, ...]:
        return (*self.target.flags, self.target.code[arch])

    def flags(self, arch: str) -> tuple[str, ...]:
        """Return the compiler's flags except paths, with nvcc's flags from the environment."""
        return (*self._own_flags(arch), *inherited_flags())

    def link_inputs(self) -> tuple[str, ...]:
        """Return the inputs of linking that a library's key depends on."""
        target = self.target
        if not target.runtime:
            return target.link_flags
        texts = [(file.name, file.read_text(encoding="utf-8")) for file in target.runtime]
        return (*target.link_flags, sources.digest(texts))

    def compile_command(self, arch: str) -> list[str]:
        """Return the compile command; its directory must hold the source."""
        return self.compiling(self._own_flags(arch), SOURCE, _OBJECT)

    def link_command(self, output: str) -> list[str]:
        """Return the link command, for the same directory."""
        return [*self.linking(), _OBJECT, "-o", output]

    def compiling(
        self, flags: Sequence[str], source: str, output: str, headers: Sequence[str] = ()
    ) -> list[str]:
        """Return a compile command with our headers and CUTLASS's, then those of ``headers``."""
        prefix = [self.ccache] if self.ccache else []
        # nvcc itself finds CUDA's headers and libraries, those of its package too.
        folders = [str(self.csrc), *toolchain.cutlass_includes(self.cutlass), *headers]
        includes = [f"-I{folder}" for folder in folders]
        return [*prefix, self.nvcc.path, *flags, *includes, "-c", source, "-o", output]

    def linking(self) -> list[str]:
        """Return a link command without its inputs and its output."""
        compiled = [str(file) for file in self.target.runtime if file.suffix == ".cpp"]
        return [self.nvcc.path, *self.target.link_flags, *compiled]


def find_tools(target: Target = GPU) -> Tools:
    """Find nvcc, CUTLASS and our headers.

    Args:
        target: what kernels are built for.

    Raises:
        MissingToolError: one of them is missing or does not work.
    """
    nvcc, cutlass, csrc = toolchain.nvcc(), toolchain.cutlass(), sources.csrc()
    if nvcc is None:
        raise MissingToolError(
            "nvcc was not found in CUDA_HOME, CUDA_PATH, PATH or the nvidia-cuda-nvcc package: "
            "install the CUDA toolkit, or pip install nvidia-cuda-nvcc"
        )
    if nvcc.problem:
        raise MissingToolError(f"nvcc cannot be used: {nvcc.describe()}")
    if cutlass is None:
        raise MissingToolError("CUTLASS was not found: pip install nvidia-cutlass==4.2.0.0")
    if csrc is None:
        raise MissingToolError(
            "flux's CUDA headers were found neither beside the package nor in it: "
            "reinstall flux-overlap"
        )
    ccache = shutil.which("ccache") if env.CCACHE.get() else None
    return Tools(nvcc, cutlass, csrc, ccache, target)


@dataclass(frozen=True)
class CompileUnit:
    """One library to be built: its configs and its identity."""

    configs: tuple[GemmConfig, ...]
    sources: str
    key: str
    traced: bool = False

    @property
    def name(self) -> str:
        """Name of the library."""
        return library_name(self.configs, self.key, self.traced)

    @property
    def arch(self) -> str:
        """Architecture of its kernels."""
        return self.configs[0].arch

    @property
    def what(self) -> str:
        """Short description of its kernels, for display."""
        first = self.configs[0]
        build = " traced" if self.traced else ""
        ops = "+".join(dict.fromkeys(config.op for config in self.configs))
        return f"{ops} sm_{first.arch} {first.dtype}{build} x{len(self.configs)}"


def make_unit(configs: Sequence[GemmConfig], tools: Tools, traced: bool = False) -> CompileUnit:
    """Return the library of these configs, with its key for these tools."""
    hashed = sources.sources_hash(configs, tools.csrc, traced)
    key = sources.library_key(
        hashed,
        cutlass=tools.cutlass.version or "unknown",
        nvcc=tools.nvcc.version or "unknown",
        flags=(*tools.flags(configs[0].arch), *tools.link_inputs()),
    )
    return CompileUnit(tuple(configs), hashed, key, traced)


def build(
    unit: CompileUnit,
    root: Path,
    tools: Tools,
    children: Children,
    started: Callable[[], None] = lambda: None,
) -> tuple[Library, bool]:
    """Build ``unit`` in ``root`` unless it exists; return it, and whether it was built now.

    If several processes want the same library, one builds it and the others wait. It is built in a
    directory of its own and renamed into place, so that no process sees an incomplete library.

    Args:
        unit: the library to build.
        root: directory of libraries.
        tools: the build tools.
        children: runs the compiler.
        started: called when compiling starts.

    Raises:
        CompileError: it does not compile or link.
        Cancelled: ``children`` were killed meanwhile.
        OSError: ``root`` cannot be written.
    """
    make = partial(_build_in, unit=unit, root=root, tools=tools, children=children)
    return in_place(root, unit.name, manifest.read, make, children, started)


def in_place(
    root: Path,
    name: str,
    read: Callable[[Path], T],
    make: Callable[[Path], None],
    children: Children,
    started: Callable[[], None] = lambda: None,
) -> tuple[T, bool]:
    """Return root/name; if missing, build it in a temporary directory and rename.

    Args:
        root: directory of libraries.
        name: of the directory to return.
        read: reads that directory.
        make: fills an empty directory.
        children: checked for cancellation.
        started: called before ``make``.

    Returns:
        (result of ``read``, whether the directory was made now).

    Raises:
        UntrustedError: another user can write or replace ``root``, or the directory.
        Cancelled: ``children`` were killed meanwhile.
        OSError: ``root`` cannot be written.
    """
    trust.check(root)
    guard = manifest.lock(root, name)
    _acquire(guard, children.cancelled)
    try:
        directory = root / name
        if directory.exists():
            try:
                return read(directory), False
            except DamagedLibraryError as error:
                manifest.set_aside(directory, str(error))
        started()
        # A fixed name, so that ccache sees the same paths. If the directory exists, the process
        # that made it is dead: else it would hold the lock.
        staging = root / f".building-{name}"
        if staging.is_symlink():  # rmtree does not remove links, and mkdir does not follow them
            staging.unlink()
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            make(staging)
            trust.keep_others_out(staging)
            os.rename(staging, directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return read(directory), True
    finally:
        guard.release()


def _acquire(guard: FileLock, cancelled: threading.Event) -> None:
    while True:
        if cancelled.is_set():
            raise Cancelled
        try:
            guard.acquire(timeout=0.2)
        except Timeout:
            continue
        return


def _build_in(
    staging: Path, unit: CompileUnit, root: Path, tools: Tools, children: Children
) -> None:
    begin = time.monotonic()
    library = f"{unit.name}.so"
    text = translation_unit(unit.configs, unit.traced)
    (staging / SOURCE).write_text(text, encoding="utf-8")
    commands = (tools.compile_command(unit.arch), tools.link_command(library))
    report = run_all(commands, staging, children, _names(unit), failure_log(root, unit.name))
    seconds = time.monotonic() - begin
    # The headers may have been edited since the key was computed.
    if sources.sources_hash(unit.configs, tools.csrc, unit.traced) != unit.sources:
        raise CompileError(f"{_names(unit)}: headers changed while this was compiled; try again")
    (staging / f"{unit.name}.ptxas.txt").write_text(report, encoding="utf-8")
    path = staging / library
    usage = ptxas.usage(report, unit.configs)
    manifest.write(
        Library(
            name=unit.name,
            size=path.stat().st_size,
            sha256=manifest.file_hash(path),
            abi_version=sources.abi_version(tools.csrc),
            arch=unit.arch,
            nvcc=tools.nvcc.version or "unknown",
            cutlass=tools.cutlass.version or "unknown",
            flags=tools.flags(unit.arch),
            sources=unit.sources,
            key=unit.key,
            traced=unit.traced,
            kernels={symbol(config, unit.traced): config for config in unit.configs},
            usage={symbol(config, unit.traced): usage[config.name] for config in unit.configs},
            warnings=tuple(ptxas.warnings(report)),
            seconds=seconds,
        ),
        staging,
    )
    (staging / _OBJECT).unlink()


def run_all(
    commands: Sequence[Sequence[str]], staging: Path, children: Children, what: str, log: Path
) -> str:
    """Run compiler and linker in ``staging``; return their output.

    Args:
        commands: to run in order.
        staging: the directory to run in.
        children: runs them.
        what: description of the build, for errors.
        log: file for the whole output of a failed command.

    Raises:
        CompileError: a command failed; ``log`` has all of its output.
        Cancelled: see ``Children.run``.
        OSError: see ``Children.run``.
    """
    temporary = staging / "tmp"
    temporary.mkdir()
    # nvcc's temporary files go into a directory that is removed even if nvcc is killed.
    variables = {**os.environ, "TMPDIR": str(temporary), "CCACHE_NOHASHDIR": "1"}
    report = ""
    for command in commands:
        status, output = children.run(command, staging, variables)
        if status != 0:
            raise _failure(what, log, command, status, output)
        report += output
    shutil.rmtree(temporary)
    log.unlink(missing_ok=True)
    return report


def failure_log(root: Path, name: str) -> Path:
    """Return the file that keeps nvcc's whole output if a library does not compile."""
    return root / f"{name}.failed.txt"


def _failure(
    what: str, log: Path, command: Sequence[str], status: int, output: str
) -> CompileError:
    write_whole(log, f"{' '.join(command)}\n{output}")
    how = f"exit status {status}" if status > 0 else f"signal {-status}"
    if re.search(r"\bKilled\b|out of memory", output) or status == -9:
        how += ", probably out of memory: try --jobs 1"
    excerpt = "\n".join(f"  {line}" for line in first_errors(output))
    return CompileError(f"{what}: nvcc failed ({how}):\n{excerpt}\n  full log: {log}")


def _names(unit: CompileUnit) -> str:
    return ", ".join(config.name for config in unit.configs)


def first_errors(output: str) -> list[str]:
    """Return the most relevant lines of a compiler's output: from the first error on."""
    lines = [line for line in output.splitlines() if line.strip()]
    error = re.compile(r"\b(error|fatal|undefined reference|No such file)\b", re.IGNORECASE)
    first = next((index for index, line in enumerate(lines) if error.search(line)), None)
    if first is None:
        return lines[-_EXCERPT_LINES:]
    return lines[first : first + _EXCERPT_LINES]

"""Build many libraries in parallel, as many as cores and memory allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from flux.kernels import manifest
from flux.kernels.build import CompileError, CompileUnit, Tools, build, make_unit
from flux.kernels.children import Cancelled, Children
from flux.kernels.config import GemmConfig
from flux.kernels.generator import libraries
from flux.kernels.manifest import DamagedLibraryError, Library
from flux.kernels.trust import UntrustedError
from flux.machine import host

JOB_BYTES = 6 << 30
"""Memory to reserve per nvcc. 13.0 takes for sm_90a 3.5 GiB for a unit of one config, 5.1 GiB for
one of four."""


@dataclass(frozen=True)
class CompilePlan:
    """The libraries for a set of configs: those that exist, and those to be built."""

    ready: list[Library]
    units: list[CompileUnit]


@dataclass(frozen=True)
class Outcome:
    """The result of building one library.

    Attributes:
        unit: the library's configs and identity.
        library: None if the build failed.
        fresh: whether it was built now rather than found (another process may have built it first).
        error: why it failed, or empty.
        seconds: duration, including waits for other processes.
    """

    unit: CompileUnit
    library: Library | None
    fresh: bool
    error: str
    seconds: float


class CompileObserver:
    """Receives start and end of each library's build. Called from several threads."""

    def started(self, unit: CompileUnit) -> None:
        """Handle the start of a compiler."""

    def ended(self, outcome: Outcome) -> None:
        """Handle the end of a build: built, found or failed."""


def plan(
    configs: Sequence[GemmConfig], root: Path, tools: Tools, traced: bool = False
) -> CompilePlan:
    """Return which of the configs ``root`` has, as built by these tools now, and which to build.

    Configs are grouped into libraries before the lookup, so that all processes that ask for the
    same configs at the same time ask for the same libraries.

    Args:
        configs: the kernels.
        root: directory of libraries.
        tools: the build tools.
        traced: whether the kernels record what they do.
    """
    current: dict[str, Library] = {}
    for library in manifest.scan(root):
        if library.traced == traced and is_current(library, tools):
            current.update({config.name: library for config in library.configs})
    ready: dict[str, Library] = {}
    units = []
    for group in libraries(configs, tools.target.families):
        missing = [config for config in group if config.name not in current]
        for config in group:
            if config.name in current:
                ready[current[config.name].name] = current[config.name]
        if missing:
            units.append(make_unit(missing, tools, traced))
    return CompilePlan(list(ready.values()), units)


def is_current(library: Library, tools: Tools) -> bool:
    """Return whether these tools would build an identical library."""
    return make_unit(library.configs, tools, library.traced).key == library.key


def job_limit(units: int, wanted: int | None = None) -> int:
    """Return how many compilers to run: ``wanted``, else what cores and free memory allow."""
    if wanted is not None:
        return max(1, min(wanted, units))
    limits = [units, host.available_cores()]
    memory = host.available_memory()
    if memory is not None:
        limits.append(memory // JOB_BYTES)
    return max(1, min(limits))


def build_all(
    units: Sequence[CompileUnit], root: Path, tools: Tools, jobs: int, observer: CompileObserver
) -> list[Outcome]:
    """Build the libraries, ``jobs`` at a time; one failure does not stop the others.

    On an exception in the caller's thread, above all Ctrl-C, the compilers are killed and no
    incomplete library remains before the exception continues.
    """
    children = Children()
    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="flux-compile") as pool:
        futures = [pool.submit(_build_one, unit, root, tools, children, observer) for unit in units]
        try:
            wait(futures)
        except BaseException:
            children.kill()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _build_one(
    unit: CompileUnit, root: Path, tools: Tools, children: Children, observer: CompileObserver
) -> Outcome:
    begin = time.monotonic()
    library, fresh, error = None, False, ""
    starting: Callable[[], None] = lambda: observer.started(unit)  # noqa: E731
    try:
        library, fresh = build(unit, root, tools, children, starting)
    except (CompileError, DamagedLibraryError, UntrustedError) as failure:
        error = str(failure)
    except Cancelled:
        error = "cancelled"
    except OSError as failure:
        error = f"{', '.join(config.name for config in unit.configs)}: {failure}"
    outcome = Outcome(unit, library, fresh, error, time.monotonic() - begin)
    observer.ended(outcome)
    return outcome


def remove_superseded(root: Path, tools: Tools) -> list[Library]:
    """Remove libraries all of whose kernels are in ``root`` in a current version too.

    This is for directories of kernels built ahead of time from one checkout. A cache may be shared
    by several checkouts, and a library that is stale for one is current for another.
    """
    libraries = list(manifest.scan(root))
    current = {library.name for library in libraries if is_current(library, tools)}
    available = {
        name for library in libraries if library.name in current for name in library.kernels
    }
    superseded = [
        library
        for library in libraries
        if library.name not in current and available.issuperset(library.kernels)
    ]
    for library in superseded:
        manifest.remove(root, library.directory)
    return superseded

"""Builds many libraries at once, as many as cores and memory allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from flux import host
from flux.kernels import manifest
from flux.kernels.build import CompileError, Tools, Unit, build, make_unit
from flux.kernels.children import Cancelled, Children
from flux.kernels.config import GemmConfig
from flux.kernels.generator import libraries
from flux.kernels.manifest import DamagedLibraryError, Library
from flux.kernels.trust import UntrustedError

JOB_BYTES = 6 << 30
"""Memory to keep for one nvcc; 13.0 takes for sm_90a 3.5 GiB for a unit of one config, 5.1 GiB
for one of four."""


@dataclass(frozen=True)
class Plan:
    """What a set of configs needs: libraries that are there already, and those to be built."""

    ready: list[Library]
    units: list[Unit]


@dataclass(frozen=True)
class Outcome:
    """How building one library ended.

    Attributes:
        library: None if it failed.
        fresh: it was built now, not found (another process may have been quicker).
        error: why it failed, or empty.
        seconds: that it took, waiting for other processes included.
    """

    unit: Unit
    library: Library | None
    fresh: bool
    error: str
    seconds: float


class Observer:
    """Told of each library when it begins to compile, and when it ends. From several threads."""

    def started(self, unit: Unit) -> None:
        """The compiler runs."""

    def ended(self, outcome: Outcome) -> None:
        """It was built, or found, or failed."""


def plan(configs: Sequence[GemmConfig], root: Path, tools: Tools, traced: bool = False) -> Plan:
    """Look up in ``root`` which of the configs are built, as these tools would build them now;
    ``traced``: as kernels that put down what they do.

    Groups are made before looking, so that everyone who asks for the same configs at the same time
    asks for the same libraries.
    """
    current: dict[str, Library] = {}
    for library in manifest.scan(root):
        if library.traced == traced and is_current(library, tools):
            current.update({config.name: library for config in library.configs})
    ready: dict[str, Library] = {}
    units = []
    for group in libraries(configs):
        missing = [config for config in group if config.name not in current]
        for config in group:
            if config.name in current:
                ready[current[config.name].name] = current[config.name]
        if missing:
            units.append(make_unit(missing, tools, traced))
    return Plan(list(ready.values()), units)


def is_current(library: Library, tools: Tools) -> bool:
    """Whether these tools would build the very same library."""
    return make_unit(library.configs, tools, library.traced).key == library.key


def job_limit(units: int, wanted: int | None = None) -> int:
    """How many compilers to run at once: ``wanted``, else what cores and free memory allow."""
    if wanted is not None:
        return max(1, min(wanted, units))
    limits = [units, host.available_cores()]
    memory = host.available_memory()
    if memory is not None:
        limits.append(memory // JOB_BYTES)
    return max(1, min(limits))


def build_all(
    units: Sequence[Unit], root: Path, tools: Tools, jobs: int, observer: Observer
) -> list[Outcome]:
    """Build the libraries, ``jobs`` at a time; one that fails does not stop the others.

    An exception in the caller's thread, Ctrl-C above all, kills the compilers and leaves nothing
    half-built behind before it goes on.
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
    unit: Unit, root: Path, tools: Tools, children: Children, observer: Observer
) -> Outcome:
    begin = time.monotonic()
    library, fresh, error = None, False, ""
    starting: Callable[[], None] = lambda: observer.started(unit)  # noqa: E731
    try:
        library, fresh = build(unit, root, tools, children, starting)
    except (CompileError, DamagedLibraryError, UntrustedError) as failure:
        error = str(failure)
    except Cancelled:
        error = "called off"
    except OSError as failure:
        error = f"{', '.join(config.name for config in unit.configs)}: {failure}"
    outcome = Outcome(unit, library, fresh, error, time.monotonic() - begin)
    observer.ended(outcome)
    return outcome


def remove_superseded(root: Path, tools: Tools) -> list[Library]:
    """Remove libraries whose kernels all are in ``root`` in a current version too.

    For directories that hold what was built ahead of time, from one checkout: a cache may be shared
    by several, and what is stale for one is current for another.
    """
    found = list(manifest.scan(root))
    current = {library.name for library in found if is_current(library, tools)}
    available = {name for library in found if library.name in current for name in library.kernels}
    superseded = [
        library
        for library in found
        if library.name not in current and available.issuperset(library.kernels)
    ]
    for library in superseded:
        manifest.remove(root, library.directory)
    return superseded

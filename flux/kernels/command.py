"""`flux compile`: build kernels ahead of time, with or without a GPU."""

from __future__ import annotations

import json
import signal
import threading
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from flux.cli.terminal import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    PLAIN,
    complain,
    open_console,
    refuse,
    say,
)

if TYPE_CHECKING:
    from flux.kernels.build import CompileUnit, Target
    from flux.kernels.config import GemmConfig
    from flux.kernels.driver import CompileObserver, CompilePlan, Outcome
    from flux.kernels.manifest import Library


def compile_kernels(
    context: typer.Context,
    arch: Annotated[
        str, typer.Option(help="Architectures to build for, separated by commas.")
    ] = "80,90a",
    set_name: Annotated[
        str, typer.Option("--set", help="Set of kernels: minimal | default | full.")
    ] = "default",
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Parallel compilations (default: by cores and free memory)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write to DIR instead of the kernel cache.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Build only kernels whose name contains TEXT."),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="List kernels and whether they are built; build nothing.")
    ] = False,
    runtime: Annotated[
        bool,
        typer.Option(
            "--runtime",
            help="Build libflux_nvshmem, for ranks on several nodes, instead of kernels. Needs "
            "the nvidia-nvshmem package too.",
        ),
    ] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Build kernels that record time stamps for `flux trace`, next to the others.",
        ),
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
) -> None:
    """Build CUDA kernels ahead of time. Needs nvcc and CUTLASS, but no GPU.

    Kernels that were built from the same sources with the same tools are not built again. If a
    kernel does not compile, the others are still built, and the exit status is 1.
    """
    from flux.core.env import user_path
    from flux.kernels.build import GPU, Target
    from flux.kernels.registry import cache_root

    # Programs that build for something else run this command with another target as its object.
    target = context.obj if isinstance(context.obj, Target) else GPU
    try:
        root = cache_root() if out is None else user_path(out)
    except ValueError as error:
        refuse(str(error))
    if out is None and not target.loads_on_gpus:
        refuse("kernels that no GPU can load need --out DIR: the cache is for GPUs")
    if runtime:
        if list_only or only is not None or trace:
            refuse("--runtime cannot be combined with --list, --only or --trace")
        _compile_runtime(_archs(arch), root, target, is_cache=out is None, json_output=json_output)
        return
    configs = _chosen(arch, set_name, only, traced=trace)
    if list_only:
        _list(configs, root, target, traced=trace, json_output=json_output)
    else:
        _compile(
            configs,
            root,
            jobs,
            target,
            traced=trace,
            is_cache=out is None,
            json_output=json_output,
        )


def _archs(text: str) -> list[str]:
    return [part.strip().removeprefix("sm_") for part in text.split(",") if part.strip()]


def _chosen(arch: str, set_name: str, only: str | None, *, traced: bool) -> list[GemmConfig]:
    from flux.kernels.config import GROUPED
    from flux.kernels.sets import FUSED, config_set

    try:
        configs = config_set(set_name, _archs(arch))
    except ValueError as error:
        refuse(str(error))
    chosen = [config for config in configs if only is None or only in config.name]
    if traced:  # ops use no other kernels
        chosen = [config for config in chosen if config.op in (*FUSED, *GROUPED)]
    if not chosen:
        refuse(f"no kernel of the set {set_name} for {arch} has {only!r} in its name; see --list")
    return chosen


def _list(
    configs: Sequence[GemmConfig], root: Path, target: Target, *, traced: bool, json_output: bool
) -> None:
    from flux.kernels.registry import Registry

    built: dict[str, str] = {}
    for library in Registry.load([root]).libraries:  # within a root the newest first
        if (library.traced, library.loads_on_gpus) == (traced, target.loads_on_gpus):
            for config in library.configs:
                built.setdefault(config.name, str(library.path))
    if json_output:
        kernels = [
            {"name": config.name, "library": built.get(config.name), "config": config.as_dict()}
            for config in configs
        ]
        print(json.dumps({"root": str(root), "kernels": kernels}, indent=1))
        return
    for config in configs:
        say(f"{'built' if config.name in built else '-':<6}{config.name}")


def _make_root(root: Path, *, is_cache: bool) -> None:
    """Create ``root``, and check that no other user can write it.

    A cache is created for this user alone, a directory that the user named by the umask.

    Raises:
        UntrustedError: another user can write or replace it, so kernels built there are not used.
        OSError: it cannot be created.
    """
    from flux.kernels import trust

    if is_cache:
        trust.make_private(root)
    else:
        root.mkdir(parents=True, exist_ok=True)
    trust.check(root)


def _compile_runtime(
    archs: Sequence[str], root: Path, target: Target, *, is_cache: bool, json_output: bool
) -> None:
    from flux.kernels import build, trust
    from flux.kernels import runtime as runtime_library

    try:
        tools = runtime_library.find_tools(target)
        _make_root(root, is_cache=is_cache)
        with _ends_as_interrupted():
            library, fresh = runtime_library.make(root, tools, archs)
            if not is_cache:
                runtime_library.remove_others(root, library)
    except (build.MissingToolError, trust.UntrustedError, ValueError) as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"cannot write {root}: {error.strerror}")
    except build.CompileError as error:
        complain(str(error))
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if json_output:
        status = "built" if fresh else "ready"
        document = {"status": status, "path": str(library.path), **library.as_dict()}
        print(json.dumps(document, indent=1))
    else:
        how = f"built in {library.seconds:.0f} s" if fresh else "already built"
        say(f"{runtime_library.NAME}: {how}: {library.path}")


def _compile(
    configs: Sequence[GemmConfig],
    root: Path,
    jobs: int | None,
    target: Target,
    *,
    traced: bool,
    is_cache: bool,
    json_output: bool,
) -> None:
    from flux.kernels import build, driver, trust

    try:
        tools = build.find_tools(target)
    except (build.MissingToolError, ValueError) as error:
        refuse(str(error))
    try:
        _make_root(root, is_cache=is_cache)
    except trust.UntrustedError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"cannot write {root}: {error.strerror}")
    begin = time.monotonic()
    plan = driver.plan(configs, root, tools, traced)
    limit = driver.job_limit(len(plan.units), jobs)
    try:
        with _ends_as_interrupted(), _progress(len(plan.units), silent=json_output) as observer:
            outcomes = driver.build_all(plan.units, root, tools, limit, observer)
    except KeyboardInterrupt:
        complain("interrupted; kernels built so far are kept")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    failed = [outcome for outcome in outcomes if outcome.error]
    if not is_cache and not failed:
        driver.remove_superseded(root, tools)
    seconds = time.monotonic() - begin
    if json_output:
        print(json.dumps(_document(root, plan, outcomes, limit, seconds), indent=1))
    else:
        _report(root, plan, outcomes, seconds)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _document(
    root: Path, plan: CompilePlan, outcomes: Sequence[Outcome], jobs: int, seconds: float
) -> dict[str, Any]:
    libraries = [_entry(library, "ready") for library in plan.ready]
    for outcome in outcomes:
        if outcome.library is not None:
            libraries.append(_entry(outcome.library, "built" if outcome.fresh else "ready"))
        else:
            kernels = [config.name for config in outcome.unit.configs]
            libraries.append({"status": "failed", "kernels": kernels, "error": outcome.error})
    return {
        "root": str(root),
        "jobs": jobs,
        "seconds": round(seconds, 1),
        "libraries": libraries,
    }


def _entry(library: Library, status: str) -> dict[str, Any]:
    return {
        "status": status,
        "path": str(library.path),
        "seconds": library.seconds,
        "kernels": {symbol: library.usage[symbol].as_dict() for symbol in library.kernels},
        "warnings": list(library.warnings),
    }


def _report(root: Path, plan: CompilePlan, outcomes: Sequence[Outcome], seconds: float) -> None:
    errors = open_console(stderr=True)
    built = [outcome.library for outcome in outcomes if outcome.library and outcome.fresh]
    already_built = [
        outcome.library for outcome in outcomes if outcome.library and not outcome.fresh
    ]
    for library in built:
        for symbol, usage in library.usage.items():
            if usage.stack_bytes or usage.spill_store_bytes or usage.spill_load_bytes:
                errors.print(
                    f"[yellow]slow:[/] {escape(symbol)} keeps {usage.stack_bytes} bytes of stack "
                    f"and {usage.spill_store_bytes} bytes of spilled registers in memory",
                    **PLAIN,
                )
    failed = [outcome for outcome in outcomes if outcome.error]
    for outcome in failed:
        complain(outcome.error)
    ready = [*plan.ready, *already_built]
    say(
        f"{_count(built)} built in {seconds:.0f} s, {_count(ready)} already built, "
        f"{sum(len(outcome.unit.configs) for outcome in failed)} failed: {root}"
    )


def _count(libraries: Sequence[Library]) -> str:
    kernels = sum(len(library.kernels) for library in libraries)
    return f"{kernels} kernel{'' if kernels == 1 else 's'}"


@contextmanager
def _ends_as_interrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, so that it ends the compilers too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(total: int, *, silent: bool) -> Iterator[CompileObserver]:
    """Show a line per library being compiled, on a terminal; else one for each that ended."""
    from flux.kernels.driver import CompileObserver

    if silent or not total:
        yield CompileObserver()
        return
    console = open_console()
    if not console.is_terminal:
        yield _lines(total)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, MofNCompleteColumn(), console=console, transient=True) as bar:
        overall = bar.add_task("libraries", total=total)
        running: dict[str, TaskID] = {}

        class CompileBar(CompileObserver):
            def started(self, unit: CompileUnit) -> None:
                running[unit.name] = bar.add_task(escape(unit.what), total=None)

            def ended(self, outcome: Outcome) -> None:
                task = running.pop(outcome.unit.name, None)
                if task is not None:
                    bar.remove_task(task)
                bar.advance(overall)

        yield CompileBar()


def _lines(total: int) -> CompileObserver:
    from flux.kernels.driver import CompileObserver

    class CompileLines(CompileObserver):
        def __init__(self) -> None:
            self._lock = threading.Lock()
            self._ended = 0

        def ended(self, outcome: Outcome) -> None:
            with self._lock:
                self._ended += 1
                how = "failed" if outcome.error else "built" if outcome.fresh else "already built"
                say(f"[{self._ended}/{total}] {outcome.unit.what}: {how}, {outcome.seconds:.0f} s")

    return CompileLines()

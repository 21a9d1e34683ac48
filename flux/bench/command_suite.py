"""`flux bench suite`: many shapes, with every installed peer; page, tables, JSON, CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flux.cli import options
from flux.cli.options import integers, parse_duration, with_options
from flux.cli.ranks import check_writable, speaks, torchrun_or_own
from flux.cli.terminal import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    command_line,
    complain,
    open_console,
    refuse,
    say,
    write_file,
    writing,
)

if TYPE_CHECKING:
    from flux.bench.config import BenchConfig
    from flux.bench.peers import Peer
    from flux.bench.results import SuiteDocument
    from flux.bench.suite import Sweep
    from flux.bench.suite_ranks import SuiteRanks
    from flux.core.problem import Problem

PAPER, PAPER_CPU = "flux-paper", "flux-paper-cpu"
_RUN_SETTINGS = ("repeats", "warmup", "threads", "seed", "timeout_s", "hosts", "link_rate")


@dataclass(frozen=True)
class SuiteOptions:
    """What is measured, and how; None: the file's value, or a detected one."""

    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File of shapes, or a name in tuning/shapes. Default: flux-paper on GPUs, "
            "flux-paper-cpu (scaled down) on CPUs.",
        ),
    ] = None
    ops: Annotated[
        str | None, typer.Option(help="Measure only these ops of the file, separated by commas.")
    ] = None
    m: Annotated[
        str | None, typer.Option("--m", help="Rows M instead of the file's, separated by commas.")
    ] = None
    dtype: Annotated[str | None, typer.Option(help="Data type instead of the file's.")] = None
    scaling: options.Scaling = None
    fast_accum: options.FastAccum = False
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks to start (default: the file's first)."),
    ] = None
    backend: Annotated[
        str | None, typer.Option(help="Backend: cpu | cuda (default: cuda if each rank has a GPU).")
    ] = None
    transport: Annotated[str | None, typer.Option(help="Transport, as in flux bench op.")] = None
    hosts: options.Hosts = "1"
    link_rate: options.LinkRate = None
    sweeps: Annotated[
        bool,
        typer.Option("--sweeps", help="Also sweep the communication tile size, and push and pull."),
    ] = False
    sweep_m: Annotated[
        int | None, typer.Option(help="Rows M of the sweeps (default: the largest of each op).")
    ] = None
    repeats: options.Repeats = 15
    warmup: options.Warmup = 3
    threads: options.Threads = 1
    seed: options.Seed = 0
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a rank before failing.")] = (
        60.0
    )
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Start no new shape after TIME, such as 90s, 10m or 2h."),
    ] = None


@with_options
def suite(
    what: SuiteOptions,
    *,
    json_target: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write results as JSON; rewritten after each shape."
        ),
    ] = None,
    csv_target: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the results as a CSV table.")
    ] = None,
    report_target: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write one HTML page with charts."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the earlier run in --json FILE.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Measure nothing; show the results in FILE."),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(
            "--peers", metavar="DIR", help="Python package with adapters for other libraries."
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print no tables and no progress.")
    ] = False,
) -> None:
    """Time a file of shapes: unfused, medium, flux and every installed peer.

    Each shape runs as with flux bench op, on new ranks. A shape that fails is reported, the others
    continue, and the exit status is 1. Peers that cannot take part are listed with the reason.

    Starts its own ranks, or one for each of torchrun's, on one host or several: torchrun
    --nproc-per-node 8 -m -- flux bench suite ...
    """
    targets = {"--json": json_target, "--csv": csv_target, "--report": report_target}
    if speaks():
        check_writable(*targets.values())
    if source is not None:
        if speaks():
            _show_again(source, targets, quiet=quiet)
        return
    if resume and json_target is None:
        refuse("--resume needs the results of the earlier run: pass --json FILE")
    from flux.bench.suite_ranks import SuiteRanks, TorchrunRanks

    world = torchrun_or_own(what.nproc, what.hosts)
    ranks = SuiteRanks() if world is None else TorchrunRanks()
    with closing(ranks):
        placed = replace(what, nproc=world or what.nproc)
        plan = _agreed(ranks, lambda: _plan(placed, peers, ranks))
        reasons = ranks.survey(plan.peers)
        if not ranks.leads:
            _follow(ranks)
            return
        _measure(plan, reasons, ranks, targets, resume=resume, quiet=quiet)


@dataclass(frozen=True)
class _Plan:
    """The measurements, their settings, and the time limit."""

    configs: Sequence[BenchConfig]
    sweeps: Sequence[Sweep]
    settings: dict[str, Any]
    budget_s: float | None
    peers: Sequence[Peer]


def _agreed(ranks: SuiteRanks, make: Callable[[], _Plan]) -> _Plan:
    """Return the plan, or exit on all ranks alike. Collective."""
    plan, problem = None, ""
    try:
        plan = make()
    except (ValueError, TypeError) as error:
        problem = str(error)
    settings = None if plan is None else plan.settings
    everybody = ranks.agree((problem, settings))
    problems = [text for text, _ in everybody if text]
    if not problems and any(other != settings for _, other in everybody):
        problems = [
            "ranks have different plans: give all of them the same arguments, and --backend"
        ]
    if problems or plan is None:
        if ranks.leads:
            refuse(problems[0])
        raise typer.Exit(EXIT_USAGE)
    return plan


def _follow(ranks: SuiteRanks) -> None:
    try:
        ranks.follow()
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _plan(what: SuiteOptions, peers: Path | None, ranks: SuiteRanks) -> _Plan:
    """Return the plan; raise ValueError if options contradict one another."""
    from flux.bench.config import ONE_GPU, BenchConfig, dtype_name
    from flux.bench.peers import load
    from flux.bench.places.gpu import problem_here
    from flux.bench.shapes import load_shapes
    from flux.bench.suite import sweeps_of

    backend = what.backend
    if backend not in (None, "cpu", "cuda"):
        raise ValueError(f"--backend must be cpu or cuda, got {backend!r}")
    if backend is None:
        backend = "cuda" if what.transport in ONE_GPU else _detected(what.nproc)
    file = load_shapes(what.shapes or (PAPER if backend == "cuda" else PAPER_CPU))
    world = what.nproc or file.tensor_parallel[0]
    dtype = None if what.dtype is None else dtype_name(what.dtype)
    scales = options.scales_of(what.scaling, what.fast_accum)
    problems = _selected(file.problems(world, dtype, scales), what.ops, what.m)
    configs = [
        BenchConfig(
            problem=problem,
            backend=backend,
            transport=what.transport,
            repeats=what.repeats,
            warmup=what.warmup,
            threads=what.threads,
            seed=what.seed,
            timeout_s=what.timeout,
            hosts=what.hosts,
            link_rate=what.link_rate,
        )
        for problem in problems
    ]
    if backend == "cuda":
        problem_text = problem_here(configs[0])
        if problem_text is not None:
            raise ValueError(problem_text)
    if what.hosts != "1":
        _check_hosts()
    configs = ranks.placed(configs)
    sweeps = []
    if what.sweeps:
        sweeps = sweeps_of(problems, what.sweep_m, pulls=configs[0].shares_memory)
    settings = {
        "shapes": file.file.name,
        "model": file.model,
        "dtype": dtype or file.dtype,
        "world": world,
        "backend": backend,
        "transport": what.transport,
        **{name: getattr(configs[0], name) for name in _RUN_SETTINGS},
        "sweeps": [f"{sweep.knob} at {sweep.problem.name} {sweep.problem.m}" for sweep in sweeps],
    }
    adapters = load(peers)
    if peers is not None:
        settings["adapters"] = [peer.name for peer in adapters]
    budget_s = None if what.budget is None else parse_duration(what.budget)
    return _Plan(configs, sweeps, settings, budget_s, adapters)


def _check_hosts() -> None:
    """Raise ValueError if hosts cannot be simulated here, before the first measurement."""
    from flux.launch.hosts import HostsUnavailableError, check_available

    try:
        check_available()
    except HostsUnavailableError as error:
        raise ValueError(str(error)) from error


def _detected(nproc: int | None) -> str:
    """Return cuda if every rank has a GPU, else cpu."""
    from flux.bench.places.gpu import gpus_here

    gpus, ranks_here = gpus_here()
    return "cuda" if gpus >= (ranks_here or max(2, nproc or 8)) else "cpu"


def _selected(problems: Sequence[Problem], ops: str | None, m: str | None) -> list[Problem]:
    """Return the chosen problems of a file, with the chosen rows.

    Raise ValueError if there are none.
    """
    left = list(problems)
    if ops is not None:
        names = [name.strip() for name in ops.split(",")]
        there = {problem.name for problem in problems}
        for name in names:
            if name not in there:
                raise ValueError(f"--ops {name}: the file has {', '.join(sorted(there))}")
        left = [problem for problem in left if problem.name in names]
    if m is not None:
        rows = integers("--m", m)
        left = [replace(problem, m=size) for problem in left for size in rows]
    return list(dict.fromkeys(left))


def _measure(
    plan: _Plan,
    reasons: dict[str, str | None],
    ranks: SuiteRanks,
    targets: dict[str, Path | None],
    *,
    resume: bool,
    quiet: bool,
) -> None:
    from flux.bench import results, suite, suite_view

    configs = plan.configs
    about = {peer.name: peer.about for peer in plan.peers}
    document = suite.new_document(
        configs, plan.sweeps, plan.settings, reasons, command_line(), about
    )
    target = targets["--json"]
    if resume and target is not None and target.exists():
        try:
            count = suite.resume(document, results.load(target))
        except ValueError as error:
            ranks.done()
            refuse(str(error))
        if not quiet:
            say(f"resuming: {count} of {len(document.entries)} are measured already")

    def save() -> None:
        if target is not None:
            results.save(document, target)

    console, interrupted, untraced = open_console(), False, None
    try:
        with suite_view.watcher(console, silent=quiet) as watching:
            suite.Suite(
                document,
                configs[0],
                save,
                watching,
                plan.budget_s,
                plan.peers,
                ranks.measure,
            ).run()
        if targets["--report"] is not None:
            untraced = _record_timeline(document, configs, ranks)
            save()
        ranks.done()
    except KeyboardInterrupt:  # torchrun's other processes get it too
        interrupted = True
    except OSError as error:
        ranks.done()
        complain(f"cannot write {target}: {error.strerror or error}")
        raise typer.Exit(EXIT_FAILED) from None
    _write(document, targets, quiet=quiet)
    failed = suite.failures(document) + ([] if untraced is None else [untraced])
    for line in failed:
        complain(line)
    if interrupted:
        again = "" if target is None else "; run the same command with --resume to continue"
        complain(f"interrupted{again}")
        raise typer.Exit(EXIT_INTERRUPTED)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _record_timeline(
    document: SuiteDocument, configs: Sequence[BenchConfig], ranks: SuiteRanks
) -> str | None:
    """Trace one call at the largest shape of the first op; return the error, if it failed."""
    from flux.bench import suite_trace
    from flux.launch.spawn import RankFailedError

    first = [config for config in configs if config.problem.name == configs[0].problem.name]
    config = max(first, key=lambda config: config.problem.m)
    if document.timeline is not None or suite_trace.reason_unsupported(config) is not None:
        return None
    try:
        document.timeline = suite_trace.timeline_of(config, ranks.trace(config))
    except RankFailedError as error:
        return f"no timeline: {error}"
    return None


def _show_again(source: Path, targets: dict[str, Path | None], *, quiet: bool) -> None:
    from flux.bench import results

    try:
        document = results.load(source)
    except ValueError as error:
        refuse(str(error))
    target = targets["--json"]
    if target is not None:
        with writing(target):
            results.save(document, target)
    _write(document, targets, quiet=quiet)


def _write(document: SuiteDocument, targets: dict[str, Path | None], *, quiet: bool) -> None:
    """Write the page, the CSV and the tables."""
    from flux.bench import page, results, suite_view

    if not quiet:
        suite_view.show(document, open_console())
    contents = {"--csv": results.to_csv, "--report": page.render}
    for option, make in contents.items():
        target = targets[option]
        if target is not None:
            write_file(target, make(document))
    if not quiet:
        for target in targets.values():
            if target is not None:
                say(f"wrote {target}")

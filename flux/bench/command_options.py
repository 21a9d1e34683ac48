"""The options with which commands describe one op on ranks, and their conversion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typer
from rich.console import Console

from flux.cli import options
from flux.cli.ranks import check_writable, say_wrong, speaks, torchrun_or_own, watched_ranks
from flux.cli.terminal import EXIT_FAILED, open_console, refuse, writing

if TYPE_CHECKING:
    from flux.bench.config import BenchConfig
    from flux.launch.progress import Progress


@dataclass(frozen=True)
class ProblemOptions:
    """What is computed, and where."""

    op: options.Op = "ag_gemm"
    m: options.M = 2048
    n: options.N = 4096
    k: options.K = 2048
    sizes: options.Sizes = None
    dtype: options.Dtype = None
    scaling: options.Scaling = None
    fast_accum: options.FastAccum = False
    nproc: options.Nproc = None
    hosts: options.Hosts = "1"
    link_rate: options.LinkRate = None
    backend: options.Backend = None
    transport: options.Transport = None


@dataclass(frozen=True)
class RunOptions:
    """How it is computed: inputs, limits and knobs."""

    threads: options.Threads = 1
    seed: options.Seed = 0
    timeout: options.Timeout = 60.0
    path: options.PathKnob = None
    order: options.Order = None
    direction: options.Direction = None
    comm_tile_rows: options.CommTileRows = None
    tile: options.Tile = None
    store: options.Store = None
    swizzle: options.Swizzle = None


def config_of(
    what: ProblemOptions, how: RunOptions, *, repeats: int = 1, warmup: int
) -> BenchConfig:
    """Return the configuration for these options; exit if it is impossible, before ranks start."""
    from flux.bench.config import ONE_GPU, BenchConfig, dtype_name
    from flux.core.sparse_problem import make_problem

    world = torchrun_or_own(what.nproc, what.hosts)
    backend = what.backend
    if backend is None and what.transport in ONE_GPU:
        backend = "cuda"
    dtype = what.dtype or ("bfloat16" if backend == "cuda" else "float32")
    ranks = what.nproc if world is None else world
    shape = (what.m, what.n, what.k)
    try:
        sizes = options.sizes_of(what.sizes)
        sizes |= options.scales_of(what.scaling, what.fast_accum)
        skews = (float(sizes.pop("skew", 0.0)),)
        world_size = 2 if ranks is None else ranks
        config = BenchConfig(
            problem=make_problem(what.op, *shape, dtype_name(dtype), world_size, sizes),
            skews=skews,
            repeats=repeats,
            warmup=warmup,
            threads=how.threads,
            backend=backend,
            transport=what.transport,
            knobs=_knobs(how),
            timeout_s=how.timeout,
            seed=how.seed,
            hosts=what.hosts,
            link_rate=what.link_rate,
        )
    except (ValueError, TypeError) as error:
        refuse(str(error))
    if config.backend == "cuda" and world is None:
        from flux.bench.places.gpu import problem_here

        problem = problem_here(config)
        if problem is not None:
            refuse(problem)
    return config


def _knobs(how: RunOptions) -> dict[str, Any]:
    """Return the knobs that the command line sets, checked before any rank is started."""
    names = ("path", "order", "direction", "comm_tile_rows", "tile", "store", "swizzle")
    knobs = {name: getattr(how, name) for name in names if getattr(how, name) is not None}
    if "tile" in knobs:
        try:
            rows, columns = knobs["tile"].lower().split("x")
            knobs["tile"] = (int(rows), int(columns))
        except ValueError:
            raise ValueError(f"tile must look like 512x1024, got {knobs['tile']!r}") from None
    if knobs:
        from flux import Knobs

        Knobs(**knobs)
    return knobs


class Phase(Protocol):
    """The result of one phase of a model."""

    @property
    def complaint(self) -> str:
        """What is wrong, or nothing."""
        ...


P = TypeVar("P", bound=Phase)


def report_phases(
    measure: Callable[[Progress], list[P]],
    document: Callable[[list[P]], dict[str, Any]],
    show: Callable[[dict[str, Any], Console], None],
    json_target: str | None,
    quiet: bool,
) -> None:
    """Measure the phases of a model and report them; exit with 1 if a result is wrong.

    Args:
        measure: runs the benchmark.
        document: returns the results as one JSON object.
        show: prints that object as a table.
        json_target: where to write it; "-" is stdout, None is nowhere.
        quiet: print no table and no progress.
    """
    from flux.bench.report import write_json

    silent = quiet or json_target == "-" or not speaks()
    if speaks():
        check_writable(json_target)
    with watched_ranks(silent) as progress:
        results = measure(progress)
    complaints = [phase.complaint for phase in results if phase.complaint]
    if speaks():
        content = document(results)
        if not silent:
            show(content, open_console())
        say_wrong(complaints)
        if json_target is not None:
            with writing(json_target):
                write_json(content, json_target)
    if complaints:
        raise typer.Exit(EXIT_FAILED)

"""Options that all commands share which run an op on ranks, and their conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flux.cli.ranks import torchrun_or_own
from flux.cli.terminal import refuse

if TYPE_CHECKING:
    from flux.bench.config import BenchConfig

Op = Annotated[str, typer.Option(help="Op: ag_gemm | gemm_rs | gemm_ar.")]
M = Annotated[int, typer.Option("--m", help="Rows M of the global problem.")]
N = Annotated[
    int, typer.Option("--n", help="Columns N of the global problem; ag_gemm splits N over ranks.")
]
K = Annotated[
    int,
    typer.Option(
        "--k", help="Depth K of the global problem; gemm_rs and gemm_ar split K over ranks."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32 | bfloat16 | float16 | float64. Default: float32 on CPUs, bfloat16 on GPUs."
    ),
]
Nproc = Annotated[
    int | None, typer.Option(help="Number of ranks to start (default: 2, or torchrun's).")
]
Hosts = Annotated[
    str,
    typer.Option(
        help="Hosts to create (network namespaces): 2, or ranks on each: 3+1. Needs root."
    ),
]
LinkRate = Annotated[
    str | None, typer.Option(help="Speed of the link of each host, such as 500mbit or 1gbit.")
]
Backend = Annotated[str | None, typer.Option(help="Backend: cpu | cuda (default: cpu).")]
Transport = Annotated[
    str | None,
    typer.Option(
        help="On cpu: shm | send_recv. On cuda: symm_mem, or on one GPU virtual | loopback."
    ),
]
Repeats = Annotated[int, typer.Option(help="Timed repeats of every method.")]
Warmup = Annotated[int, typer.Option(help="Untimed repeats before the timed ones.")]
Threads = Annotated[int, typer.Option(help="GEMM threads of each rank.")]
Seed = Annotated[int, typer.Option(help="Seed of the random inputs.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for a peer before failing.")]
PathKnob = Annotated[
    str | None, typer.Option("--path", help="Knob path: fused | medium | unfused.")
]
Order = Annotated[
    str | None, typer.Option(help="Knob order, of communication: direct | ring1d | ring2d | ...")
]
Direction = Annotated[str | None, typer.Option(help="Knob direction, of copies: push | pull.")]
CommTileRows = Annotated[
    int | None, typer.Option(help="Knob comm_tile_rows: rows of a communication tile.")
]
Tile = Annotated[str | None, typer.Option(help="Knob tile: size of a GEMM tile, ROWSxCOLUMNS.")]
Store = Annotated[str | None, typer.Option(help="Knob store, of GEMM results: direct | staged.")]
Swizzle = Annotated[
    str | None,
    typer.Option(help="Knob swizzle, of the GEMM's tile order: none | rank_shift | xor."),
]
JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write results as JSON to FILE; - is stdout."),
]
QuietTable = Annotated[bool, typer.Option("--quiet", help="Print no table and no progress bar.")]


@dataclass(frozen=True)
class Chosen:
    """The values of these options."""

    op: str
    m: int
    n: int
    k: int
    dtype: str | None
    nproc: int | None
    hosts: str
    link_rate: str | None
    backend: str | None
    transport: str | None
    threads: int
    seed: int
    timeout: float
    path: str | None
    order: str | None
    direction: str | None
    comm_tile_rows: int | None
    tile: str | None
    store: str | None
    swizzle: str | None

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Chosen:
        """Return the shared options among a command's arguments."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})


def config_of(chosen: Chosen, *, repeats: int = 1, warmup: int) -> BenchConfig:
    """Return the configuration for these options; exit if it is impossible, before ranks start."""
    from flux.bench.config import ONE_GPU, BenchConfig, dtype_name
    from flux.core import knobs
    from flux.core.problem import Problem

    world = torchrun_or_own(chosen.nproc, chosen.hosts)
    backend = chosen.backend
    if backend is None and chosen.transport in ONE_GPU:
        backend = "cuda"
    dtype = chosen.dtype or ("bfloat16" if backend == "cuda" else "float32")
    ranks = chosen.nproc if world is None else world
    shape = (chosen.m, chosen.n, chosen.k)
    try:
        op = knobs.Op.named(chosen.op)
        config = BenchConfig(
            problem=Problem(op, *shape, dtype_name(dtype), 2 if ranks is None else ranks),
            repeats=repeats,
            warmup=warmup,
            threads=chosen.threads,
            backend=backend,
            transport=chosen.transport,
            knobs=_knobs(
                path=chosen.path,
                order=chosen.order,
                direction=chosen.direction,
                comm_tile_rows=chosen.comm_tile_rows,
                tile=chosen.tile,
                store=chosen.store,
                swizzle=chosen.swizzle,
            ),
            timeout_s=chosen.timeout,
            seed=chosen.seed,
            hosts=chosen.hosts,
            link_rate=chosen.link_rate,
        )
    except (ValueError, TypeError) as error:
        refuse(str(error))
    if config.backend == "cuda" and world is None:
        from flux.bench.places.gpu import problem_here

        problem = problem_here(config)
        if problem is not None:
            refuse(problem)
    return config


def _knobs(**chosen: Any) -> dict[str, Any]:
    """Return the knobs that the command line sets, checked before any rank is started."""
    given = {name: value for name, value in chosen.items() if value is not None}
    if "tile" in given:
        try:
            rows, columns = given["tile"].lower().split("x")
            given["tile"] = (int(rows), int(columns))
        except ValueError:
            raise ValueError(f"tile must look like 512x1024, got {given['tile']!r}") from None
    if given:
        from flux import Knobs

        Knobs(**given)
    return given

"""The options with which commands describe one op on ranks, and their conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from flux.cli.ranks import torchrun_or_own
from flux.cli.terminal import refuse

if TYPE_CHECKING:
    from flux.bench.config import BenchConfig


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

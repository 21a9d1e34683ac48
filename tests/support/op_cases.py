"""Random cases of the fused ops, and the function that runs them on the ranks.

Cases are drawn in pytest, with a seed, and run in batches: a case costs milliseconds, most of them
for building the op.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flux import Knobs, PeerTimeoutError, Topology
from reference import ACTIVATIONS, DTYPES, FP8, LAYOUTS, Inputs, Problem


@dataclass(frozen=True)
class Call:
    """One call of a case; arguments of Inputs and Inputs.call."""

    m: int
    seed: int
    bias: bool = True
    layout: str = "dense"
    padded: bool = False
    gather: bool = False

    def check(self, problem: Problem, op: Any, rank: int, world: int, path: str = "fused") -> None:
        """Make the call, wait for its results, and compare them with float64."""
        inputs = Inputs(problem, self.m, world, self.seed, self.bias)
        options = {"layout": self.layout, "padded": self.padded, "gather": self.gather}
        inputs.call_and_check(op, rank, path, **options)


@dataclass(frozen=True)
class Case:
    """An op with its knobs, and the calls made on it."""

    problem: Problem
    knobs: Knobs
    calls: tuple[Call, ...]
    delay_s: float = 0.0
    topology: Topology | None = None

    def __str__(self) -> str:
        return f"{self.problem}\n  knobs: {self.knobs}\n  {self.topology}, delay: {self.delay_s} s"


def check_cases(rank: int, world: int, cases: Sequence[Case]) -> int:
    """Run cases on one rank and compare every result with float64. Returns the number of calls."""
    calls = 0
    for case in cases:
        with case.problem.build(tuning=case.knobs, topology=case.topology) as op:
            if case.delay_s and op._backend:
                op._backend.engine.set_delay(case.delay_s, case.calls[0].seed * 31 + rank)
            for call in case.calls:
                try:
                    call.check(case.problem, op, rank, world, way_of(op, call.m))
                except Exception as error:
                    raise AssertionError(
                        f"rank {rank} of {world}: {error}\n  {call}\n  {case}"
                    ) from error
                calls += 1
    return calls


def way_of(op: Any, m: int) -> str:
    """How a call reduces, as far as the reference's rounding is concerned."""
    knobs = op.schedule(m).knobs
    two_levels = knobs.order == "hierarchical" and knobs.direction == "push"
    if knobs.path != "unfused" and two_levels and op.topology.nodes > 1:
        return "two_levels"
    return str(knobs.path)


def _some_m(rng: random.Random, world: int, limit: int) -> int:
    """Return error-prone sizes: near 1, the world and its multiples; primes."""
    common = (1, 2, world - 1, world, world + 1, 2 * world, 3 * world + 1, 13, 31, 64, 97)
    m = rng.choice(common) if rng.random() < 0.6 else rng.randint(1, limit)
    return max(1, min(m, limit))


def _some_size(rng: random.Random) -> int:
    return rng.choice((1, 2, 3, 5, 7, 8, 16, 17, 31, 33, 64, 65, 100, rng.randint(1, 130)))


def random_knobs(rng: random.Random, world: int, chunk: int, columns: int) -> Knobs:
    """Any combination that is legal for all M, fields left open among them.

    Args:
        rng: source of randomness.
        world: number of ranks.
        chunk, columns: rows and columns that tiles are to be sized for.
    """

    def maybe(*values: Any) -> Any:
        return rng.choice(values) if rng.random() < 0.8 else None

    swizzles = ("none", "rank_shift", *(("xor",) if world & (world - 1) == 0 else ()))
    tile = None
    if rng.random() < 0.7:
        tile = (rng.randint(1, 2 * chunk + 3), rng.randint(1, columns + 2))
    return Knobs(
        path=rng.choice(("fused",) * 6 + ("medium",) * 2 + ("unfused",)),
        tile=tile,
        raster=maybe(1, 2, 3, 5),
        comm_tile_rows=rng.randint(1, chunk + 2) if rng.random() < 0.7 else None,
        direction=maybe("push", "pull"),
        order=maybe("direct", "ring1d", "ring2d", "hierarchical", "numa"),
        swizzle=maybe(*swizzles),
        store=rng.choice(("staged", None)),
        copy_streams=maybe(0, 1),
    )


def meshes(world: int) -> list[Topology]:
    """Every way to arrange ``world`` ranks in nodes, domains and lanes."""
    return [
        Topology(nodes, domains, world // nodes // domains)
        for nodes in range(1, world + 1)
        for domains in range(1, world + 1)
        if world % (nodes * domains) == 0
    ]


def random_case(rng: random.Random, op: str, world: int, calls: int = 4) -> Case:
    """One random case of ``op``."""
    gathers = op == "ag_gemm"
    limit = rng.choice((1, 3, 20, 100, 100, 260))
    several = gathers and rng.random() < 0.3
    columns = [_some_size(rng) for _ in range(rng.randint(2, 3) if several else 1)]
    if several:  # each must be divisible by the world
        columns = [world * max(1, n // world) for n in columns]
    dtype = rng.choice((*DTYPES, FP8))
    problem = Problem(
        op=op,
        max_m=limit,
        n=tuple(columns),
        k=_some_size(rng),
        dtype=dtype,
        transpose_weight=rng.random() < 0.5,
        reduce=rng.choice(("sum", "avg")) if not gathers else "sum",
        scaling=rng.choice(("tensor", "row")) if dtype == FP8 else "none",
        activation=rng.choice(("none", "none", *ACTIVATIONS)) if gathers else "none",
    )
    chunk = -(-limit // world)
    knobs = random_knobs(rng, world, chunk, sum(columns))
    sizes = [_some_m(rng, world, limit) for _ in range(calls)]
    if not gathers and rng.random() < 0.4:
        # Tiles that are stored straight into the owner's memory must fit its rows, for every M.
        rows = rng.randint(1, min(4, chunk))
        tile = (rows, rng.randint(1, columns[0] + 2))
        knobs = Knobs(**{**vars(knobs), "path": "fused", "store": "direct", "tile": tile})
        wholes = [rng.randint(1, chunk // rows) * rows for _ in range(calls)]
        sizes = [max(1, min(limit, whole * world - rng.randrange(world))) for whole in wholes]
        sizes = [m if -(-m // world) % rows == 0 else min(limit, world * rows) for m in sizes]
        sizes = [m for m in sizes if -(-m // world) % rows == 0] or [1]
        if sizes == [1] and rows > 1 and world > 1:
            knobs = Knobs(**{**vars(knobs), "tile": (1, tile[1])})
    return Case(
        problem,
        knobs,
        tuple(
            Call(
                m=m,
                seed=rng.randrange(1 << 30),
                bias=rng.random() < 0.5,
                layout=rng.choice(LAYOUTS),
                padded=gathers and rng.random() < 0.4,
                gather=gathers and rng.random() < 0.4,
            )
            for m in sizes
        ),
        delay_s=rng.choice((0.0, 0.0, 0.0, 1e-4)),
        topology=rng.choice((None, *meshes(world))),
    )


def random_cases(seed: int, op: str, world: int, count: int) -> list[Case]:
    """``count`` random cases; the same ones for the same arguments."""
    rng = random.Random(f"{seed} {op} {world}")
    return [random_case(rng, op, world) for _ in range(count)]


def every_dtype(problem: Problem) -> list[Problem]:
    """The problem in each supported dtype, float8 with both ways of scaling."""
    scaled = [replace(problem, dtype=FP8, scaling=scaling) for scaling in ("tensor", "row")]
    return [*(replace(problem, dtype=dtype) for dtype in DTYPES), *scaled]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all bits are equal, including those of NaN and -0."""
    bits = [t.contiguous().view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and torch.equal(*bits)


def failing_work(op: Any, x: torch.Tensor, weight: torch.Tensor, rank: int) -> None:
    """Work beside a call that fails on rank 0 closes the op there, and the others hear of it."""

    def fail() -> None:
        raise ValueError("the weight gradient is ill")

    if rank == 0:
        with pytest.raises(ValueError, match="the weight gradient is ill"):
            op.overlapped(x, weight, fail)
        assert op.closed
    else:
        # This rank's call may be through before rank 0 fails, but the next one is not.
        with pytest.raises(PeerTimeoutError, match="rank 0"):
            for _ in range(2):
                op.overlapped(x, weight, lambda: None)
    op.close()
    dist.barrier()

"""Executions of whole sets of schedules, in a model: no deadlock, every row arrives.

schedule_model.py has the model. Several calls are made one after the other, with different shapes
and knobs, so that the argument for reusing buffers and signals without clearing them
(csrc/cpu/signal_pad.h) is checked as well.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_cases import (
    AG_GEMM,
    DIRECT,
    DIRECTIONS,
    GEMM_AR,
    GEMM_RS,
    HIERARCHICAL,
    PULL,
    PUSH,
    RANK_SHIFT,
    RING1D,
    STORE_DIRECT,
    STORE_STAGED,
    STORES,
    Case,
    cases,
)
from schedule_model import Call, Wrong, agents_of, run_exhaustively, run_randomly


@st.composite
def histories(draw: st.DrawFn, max_world: int, max_m: int) -> list[Call]:
    """Calls of one op on one group of ranks. (N belongs to the op, all else may change.)"""
    first = draw(cases(max_world=max_world, max_m=max_m, max_n=3))
    calls = [Call(first, draw(st.booleans()))]
    for _ in range(draw(st.integers(0, 2))):
        again = draw(cases(ops=(first.op,), max_world=1, max_m=max_m, max_n=3))
        chunk = -(-again.m // first.world)
        tile_m = chunk if again.store == STORE_DIRECT else again.tile_m
        case = again._replace(
            mesh=first.mesh, hosts=first.hosts, n=first.n, tile_m=tile_m, swizzle=first.swizzle
        )
        calls.append(Call(case, draw(st.booleans())))
    return calls


@settings(max_examples=150)
@given(calls=histories(max_world=6, max_m=12), seed=st.integers(0, 2**32))
def test_random_interleavings_deliver_every_row(calls: list[Call], seed: int) -> None:
    agents = agents_of(calls)
    for i in range(4):
        run_randomly(agents, seed + i)


def pair(op: int, direction: int, store: int = STORE_STAGED, **knobs: int) -> Case:
    base = Case(
        op=op,
        m=2,
        n=1,
        k=2,
        mesh=(1, 1, 2),
        tile_m=1,
        tile_n=1,
        raster=1,
        comm_rows=1,
        direction=direction,
        order=DIRECT,
        swizzle=RANK_SHIFT,
        store=store,
    )
    return base._replace(**knobs)


VARIANTS = [
    (AG_GEMM, STORE_STAGED),
    *((op, store) for op in (GEMM_RS, GEMM_AR) for store in STORES),
]


@pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threaded"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("op", "store"), VARIANTS)
def test_all_interleavings_of_two_calls(
    op: int, store: int, direction: int, threaded: bool
) -> None:
    """Every M up to 3 after every other, the direction changing in between or not."""
    for first, second, comm_rows in itertools.product((1, 2, 3), (1, 2, 3), (1, 2)):
        calls = []
        for m, way, worker in ((first, direction, threaded), (second, first % 2, not threaded)):
            tile_m = (m + 1) // 2 if store == STORE_DIRECT else m
            case = pair(op, way, store, m=m, tile_m=tile_m, comm_rows=comm_rows)
            calls.append(Call(case, threaded=worker))
        assert run_exhaustively(agents_of(calls)) > 10


def test_all_interleavings_of_a_forwarding_ring() -> None:
    for direction in DIRECTIONS:
        ring = pair(AG_GEMM, direction, m=3, mesh=(1, 1, 3), order=RING1D, n=3)
        assert run_exhaustively(agents_of([Call(ring, threaded=False)] * 2)) > 1000


# Each omission must be found, or the checks above would prove nothing. (An AllReduce would survive
# without "entries": no rank has its result before every other has read all partials. It needs them
# to find out that ranks disagree.)
OMISSIONS = [
    ("entries", AG_GEMM, PUSH, STORE_STAGED),
    ("entries", AG_GEMM, PULL, STORE_STAGED),
    ("entries", GEMM_RS, PUSH, STORE_DIRECT),
    ("entries", GEMM_RS, PULL, STORE_STAGED),
    ("visit", AG_GEMM, PUSH, STORE_STAGED),
    ("gather", AG_GEMM, PULL, STORE_STAGED),
    ("data before signal", AG_GEMM, PUSH, STORE_STAGED),
    ("computed", GEMM_RS, PUSH, STORE_STAGED),
    ("reduce", GEMM_AR, PULL, STORE_DIRECT),
    ("result", GEMM_AR, PULL, STORE_STAGED),
    ("result", GEMM_AR, PUSH, STORE_DIRECT),
    ("finished", GEMM_RS, PUSH, STORE_STAGED),
]


@pytest.mark.parametrize(("omission", "op", "direction", "store"), OMISSIONS)
def test_the_model_finds_a_missing_wait(omission: str, op: int, direction: int, store: int) -> None:
    mesh = (1, 1, 3)
    case = pair(op, direction, store, m=6, mesh=mesh, tile_m=2, comm_rows=2, n=3)
    calls = [Call(case, threaded=True)] * 3
    for seed in range(20):
        run_randomly(agents_of(calls), seed)
    agents = agents_of(calls, drop=omission)
    with pytest.raises(Wrong):
        for seed in range(300):
            run_randomly(agents, seed)


def test_the_model_finds_a_deadlock() -> None:
    """Each rank waits for its peers before it offers its own rows."""
    right = pair(AG_GEMM, PULL, m=4, mesh=(2, 1, 2), order=HIERARCHICAL, n=4)
    agents = agents_of([Call(right, threaded=False)])
    run_randomly(agents, 0)
    for steps in agents:
        waits = [i for i, step in enumerate(steps) if step.kind == "wait"]
        raises = [
            i
            for i, step in enumerate(steps)
            if step.kind == "write" and "signal" in step.values[0][0]
        ]
        own, peer = raises[0], waits[3]  # waits 0 to 2 are those for entries
        steps[own], steps[peer] = steps[peer], steps[own]
    with pytest.raises(Wrong, match="deadlock"):
        run_randomly(agents, 0)

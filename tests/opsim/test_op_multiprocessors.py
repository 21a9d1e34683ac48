"""The op simulator where a GEMM does not have all multiprocessors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flux.core.events import Kind
from flux.core.knobs import Knobs, Op
from flux.core.problem import Problem
from flux.machine.cluster import load_cluster
from flux.opsim.simulator import simulate
from flux.select.hardware import blocks_per_wave
from flux.select.kernel import default_configs, default_kernel
from flux.select.share import gemm_units

H100 = load_cluster("dhelix-h100")  # 132 multiprocessors
LINK = replace(H100, link=replace(H100.link, gbs=1e9, latency_us=0.0))
SHAPES = {"ag_gemm": (49152, 12288), "gemm_rs": (12288, 49152)}
OPS = pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])


def problem(op: str, m: int = 4096) -> Problem:
    return Problem(Op[op], m, *SHAPES[op], "bfloat16", 8)


def time(op: str, scheduler: str, taken: int, m: int = 4096) -> float:
    knobs = Knobs(tile_scheduler=scheduler, sm_margin=0)
    return simulate(problem(op, m), H100, knobs, taken=taken).total_ms


@OPS
def test_blocks_that_start_late_cost_a_static_scheduler_their_tiles_once_more(op: str) -> None:
    """108 of 132 multiprocessors: claimed tiles take as many waves as those have."""
    alone = time(op, "static", 0)
    assert time(op, "dynamic", 0) == pytest.approx(alone, rel=0.01)
    assert time(op, "static", 24) > 1.6 * alone
    assert alone * 1.1 < time(op, "dynamic", 24) < alone * 132 / 108 * 1.1


@OPS
def test_blocks_that_fit_beside_other_kernels_are_not_late(op: str) -> None:
    """At M = 64 no kernel has as many blocks as 108 multiprocessors take."""
    calls = [simulate(problem(op, 64), H100, taken=taken) for taken in (0, 24)]
    assert calls[0].blocks < 108 and calls[0].total_ms == calls[1].total_ms


def test_claimed_tiles_are_taken_between_hosts_where_rows_are_late() -> None:
    """They cost next to nothing alone; beside other kernels late blocks hold up their tiles."""
    two = replace(problem("ag_gemm", 8192), world=16, nodes=2)
    cluster = load_cluster("flux-a100-nvlink")

    def time(scheduler: str | None, taken: int) -> float:
        return simulate(two, cluster, Knobs(tile_scheduler=scheduler), taken=taken).total_ms

    assert time(None, 0) == time("dynamic", 0) < 1.01 * time("static", 0)
    assert time("dynamic", 16) < 0.85 * time("static", 16)
    assert default_kernel(two, cluster).tile_scheduler == "dynamic"
    assert default_kernel(problem("ag_gemm"), cluster).tile_scheduler == "static"


def test_the_margin_of_a_kernel_that_waits_is_counted() -> None:
    """384 clusters of tiles are 6 waves of 66 clusters, and 7 of 62."""
    shape = problem("ag_gemm")
    wide = (k for k in default_configs(shape, "90a") if k.tile == (128, 256, 64))
    (kernel,) = (k for k in wide if k.cluster == (2, 1))
    waves, times = {}, {}
    for margin in (0, 8, None):
        knobs = Knobs(sm_margin=margin)
        assert gemm_units(shape, H100, knobs) == 132 - (8 if margin is None else margin)
        call = simulate(shape, LINK, knobs, kernel=kernel)
        waves[margin], times[margin] = call.waves, call.total_ms
    assert waves == {0: 6, 8: 7, None: 7}
    assert times[8] == times[None] and times[8] == pytest.approx(times[0] * 7 / 6, rel=0.03)
    assert blocks_per_wave(kernel, 124) == 124


def test_blocks_that_claim_tiles_multiply_on_the_margin_while_rows_come_in_time() -> None:
    """A margin that is set is not lent. Over a slow link blocks leave, and nothing is won."""
    shape = problem("ag_gemm")
    wide = (k for k in default_configs(shape, "90a", None) if k.tile == (128, 256, 64))
    static, claims = sorted((k for k in wide if k.cluster == (2, 1)), key=lambda k: k.name)
    assert (static.tile_scheduler, claims.tile_scheduler) == ("static", "dynamic")
    for knobs, units in ((Knobs(), 132), (Knobs(sm_margin=8), 124), (Knobs(order="ring1d"), 124)):
        assert gemm_units(shape, H100, knobs, claims) == units
        assert gemm_units(shape, H100, knobs, static) == 124
    fast = [simulate(shape, LINK, kernel=kernel) for kernel in (static, claims)]
    assert [call.waves for call in fast] == [7, 6]
    assert fast[1].total_ms < 0.9 * fast[0].total_ms
    slow = replace(LINK, link=replace(LINK.link, gbs=5.0))
    spans = simulate(shape, slow, kernel=claims)._log.spans
    lanes = {lane for rank, lane, kind, *_ in spans if (rank, kind) == (0, Kind.gemm)}
    assert lanes == {f"SM {block}" for block in range(62)}  # the own rows are 48 tiles

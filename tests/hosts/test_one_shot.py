"""Path one_shot of the fused ops: results, changes of path, disagreements, failures."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import flux
from flux import Knobs, PeerTimeoutError
from flux.backends.cpu.one_shot import block_columns
from flux.core.env import HOST
from flux.select.choose import Modelled
from flux.select.one_shot import ONE_SHOTS
from harness import BUSY, fresh_ranks, more, run_ranks
from reference import Inputs, Problem

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")


BY_COLUMNS = Knobs(path="one_shot", tile=(99, 10))


def many_calls(rank: int, world: int, hosts: str, in_rounds: bool) -> None:
    """M in random order, with pauses of this rank's own and inside calls."""
    rng, own = random.Random(3), random.Random(rank)
    knobs = Knobs(path="one_shot", comm_tile_rows=5, tile=(1, 1)) if in_rounds else ONE_SHOTS[0]
    ways = [(name, knobs) for name in OPS] + [("gemm_ar", BY_COLUMNS)] * in_rounds
    with HOST.during(hosts[rank]):
        for op_name, way in ways:
            problem = Problem(op_name, 70, (24,), 40)
            with problem.build(tuning=way) as op:
                backend: Any = op._backend
                cut = in_rounds and way is knobs
                assert backend.one_shot._in_rounds(op.schedule(64)) == cut
                assert block_columns(op.schedule(64), op.spec) == (10 if way is BY_COLUMNS else 0)
                room = op.workspace_bytes
                for call in range(25):
                    if call == 15:
                        backend.one_shot.collectives.native.set_delay(3e-4, rank)
                    m = rng.randint(1, 70)
                    inputs = Inputs(problem, m, world, seed=call)
                    time.sleep(own.choice((0, 0, 1e-3)))
                    inputs.call_and_check(op, rank, "two_levels")
                # What other hosts send is summed in buffers that the first calls make.
                largest = -(-70 // world) * 24 * 4
                assert (op.workspace_bytes - room >= largest) == (op_name != "ag_gemm")


@pytest.mark.parametrize("in_rounds", [False, True])
@pytest.mark.parametrize("hosts", ["aab", "abc", *more("ab", "aabb")])
def test_calls_match_float64(hosts: str, in_rounds: bool) -> None:
    run_ranks(len(hosts), many_calls, hosts, in_rounds)


def with_options(rank: int, world: int) -> None:
    """Averages, biases, dtypes, several weights and the gathered input."""
    with HOST.during("aabb"[rank]):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(rank)).bfloat16()
        w = torch.randn(12, 8, generator=torch.Generator().manual_seed(rank)).bfloat16()
        bias = torch.arange(12.0).bfloat16()
        results = []
        for knobs in (Knobs(path="one_shot"), BY_COLUMNS, Knobs(path="fused")):
            options: dict[str, Any] = {"dtype": torch.bfloat16, "tuning": knobs}
            with (
                flux.GemmAR(max_m=5, n=12, k=8 * world, **options) as ar,
                flux.GemmRS(max_m=5, n=12, k=8 * world, reduce="avg", **options) as rs,
                flux.AGGemm(max_m=5 * world, n=(12 * world, 4 * world), k=8, **options) as ag,
            ):
                (first, second), x_full = ag(x, [w, w[:4]], return_gathered=True)
                results.append([ar(x, w, bias), rs(x, w, bias), first, second, x_full])
        for one_shot, by_columns, fused in zip(*results, strict=True):
            torch.testing.assert_close(one_shot, fused, rtol=0.02, atol=0.1)
            torch.testing.assert_close(by_columns, fused, rtol=0.02, atol=0.1)
        for result, *_ in results[:2]:
            everywhere = [torch.empty_like(result) for _ in range(world)]
            dist.all_gather(everywhere, result)
            assert all(torch.equal(other, everywhere[0]) for other in everywhere)


def test_options_give_what_the_fused_path_gives() -> None:
    run_ranks(4, with_options)


def work_of_the_caller(rank: int, world: int, in_rounds: bool) -> None:
    """The last rank comes late; the others' own work is done by then."""
    knobs = Knobs(path="one_shot", comm_tile_rows=2, tile=(1, 1) if in_rounds else (99, 99))
    x, w = torch.ones(8, 4), torch.ones(4, 4)
    calls: list[str] = []
    times: list[float] = []

    def note(what: str) -> None:
        calls.append(what)
        times.append(time.monotonic())

    with (
        HOST.during("aab"[rank]),
        flux.GemmRS(max_m=24, n=4, k=4 * world, tuning=knobs) as rs,
        flux.AGGemm(max_m=24, n=4 * world, k=4, tuning=knobs) as ag,
    ):
        meanwhile, arrived = partial(note, "meanwhile"), partial(note, "arrived")
        dist.barrier()
        time.sleep(0.5 if rank == world - 1 else 0.0)
        times.append(time.monotonic())
        out = rs.overlapped(x.repeat(3, 1), w, meanwhile)
        y, x_full = ag.overlapped(x, w, meanwhile, arrived)
    assert torch.equal(out, torch.full((8, 4), 4.0 * world))
    assert torch.equal(y, torch.full((24, 4), 4.0)) and torch.equal(x_full, x.repeat(3, 1))
    assert calls == ["meanwhile", "meanwhile", "arrived"]
    if rank == 0 and not in_rounds:
        assert times[1] - times[0] < 0.25


@pytest.mark.parametrize("in_rounds", [False, True])
def test_work_of_the_caller_is_done_while_rows_are_under_way(in_rounds: bool) -> None:
    run_ranks(3, work_of_the_caller, in_rounds)


def changing_paths(rank: int, world: int, hosts: str) -> set[str]:
    """The cost model's choice, from one row to many, and back."""
    rng, paths = random.Random(5), set()
    with HOST.during(hosts[rank]), mock.patch.object(Modelled, "knobs", _by_rows):
        for op_name in OPS:
            problem = Problem(op_name, 90, (24,), 40)
            with problem.build(tuning="cache") as op:
                for call in range(20):
                    m = rng.choice((1, 2, 33, 60, 90))
                    Inputs(problem, m, world, seed=call).call_and_check(op, rank, "two_levels")
                    paths.add(op.schedule(m).knobs.path)
    return paths


def _by_rows(self: Modelled, m: int) -> Knobs:
    return self.variants[(0, 1, -1)[m % 3]]


@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_calls_may_change_between_paths(hosts: str) -> None:
    for paths in run_ranks(len(hosts), changing_paths, hosts):
        assert paths == {"fused", "unfused", "one_shot"}


def chosen(rank: int, world: int) -> list[tuple[str, bool]]:
    with (
        HOST.during("ab"[rank]),
        # Measured beside other tests, products may be so slow that communication hides as they are.
        mock.patch("flux.select.choose.product_tflops", return_value=0.1),
        flux.GemmAR(max_m=1 << 15, n=1024, k=2048) as op,
    ):
        knobs = [(m, op.schedule(m).knobs) for m in (1, 1 << 15)]
        return [(each.path, each.tile != (m, 1024)) for m, each in knobs]


def test_the_cost_model_does_not_cut_the_gemm_of_few_rows() -> None:
    for few, many in run_ranks(2, chosen):
        assert few == ("one_shot", False)
        assert many[1]


def disagreements(rank: int, world: int, hosts: str) -> None:
    """Ranks differ in M on one path and across paths, and refuse input; the op stays usable."""
    with (
        HOST.during(hosts[rank]),
        mock.patch.object(Modelled, "knobs", _by_size),
        flux.GemmAR(max_m=64, n=6, k=4 * world, timeout_s=20.0) as op,
    ):
        w = torch.ones(6, 4)
        for culprit in range(world):
            odd = rank == culprit
            for few, other in ((3, 4), (3, 60), (60, 3)):
                with pytest.raises(ValueError, match=r"ranks disagree: rank \d has M = "):
                    op(torch.ones(other if odd else few, 4), w)
            with pytest.raises((ValueError, TypeError), match="float64"):
                x = torch.ones(3, 4)
                op(x.double() if odd else x, w)
            for m in (3, 60):
                assert op(torch.ones(m, 4), w)[-1, -1] == 4 * world


def _by_size(self: Modelled, m: int) -> Knobs:
    return self.variants[-1 if m < 10 else 0]


@pytest.mark.parametrize("hosts", ["ab", "aabb", "aab"])
def test_calls_that_differ_raise_on_all_ranks_and_leave_the_op_usable(hosts: str) -> None:
    run_ranks(len(hosts), disagreements, hosts)


def supplied(rank: int, world: int) -> list[int]:
    """Products of the caller make whole rows, so that blocks of columns would wait for all."""
    x, w = torch.ones(12, 4), torch.ones(20, 4)
    rows: list[int] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[0])
        return x @ w.t()

    knobs = replace(BY_COLUMNS, comm_tile_rows=2)
    with HOST.during("ab"[rank]), flux.GemmAR(max_m=12, n=20, k=8, tuning=knobs) as op:
        right = torch.full((12, 20), 8.0)
        assert torch.equal(op(x, None, gemm=product), right)
        cut = rows[1:]  # behind a trial with one row
        assert torch.equal(op(x, w), right)
        with pytest.raises(RuntimeError, match="or only some pass gemm="):
            op(x, w if rank else None, gemm=None if rank else product)
        assert op.closed
        return cut


def test_a_supplied_product_is_cut_by_rows() -> None:
    assert run_ranks(2, supplied) == [[4, 4, 4]] * 2


def ends(rank: int, world: int, hosts: str, how: str, victim: int) -> dict[str, Any]:
    problem = Problem("gemm_ar", 8, (4,), 12)
    dist.barrier()  # a rank that starts late is none that stalls
    with HOST.during(hosts[rank]):
        op = problem.build(
            tuning=Knobs(path="one_shot"), timeout_s=60.0 if how == "killed" else 1.5
        )
        inputs = Inputs(problem, 8, world, seed=1)
        inputs.call_and_check(op, rank, "two_levels")
        dist.barrier()
        if rank == victim:
            if how == "killed":  # when the others are inside the call
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "closes":
                op.close()
            else:
                time.sleep(3.5)
            return {}
        began = time.monotonic()
        with pytest.raises(PeerTimeoutError) as raised:
            inputs.call(op, rank)
        took = time.monotonic() - began
        with pytest.raises(RuntimeError, match="is closed"):
            inputs.call(op, rank)
        return {"text": str(raised.value), "took": took}


@pytest.mark.parametrize("how", ["killed", "closes", "stalls"])
@pytest.mark.parametrize(("hosts", "victim"), [("aabb", 3), *more(("ab", 1))])
def test_a_rank_that_is_gone_is_named(hosts: str, victim: int, how: str) -> None:
    with fresh_ranks(len(hosts)) as ranks:
        ranks.start(ends, hosts, how, victim)
        outcomes = ranks.collect(30)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome is not None and outcome.ok, outcome
        result = outcome.value
        assert f"rank {victim}" in result["text"], (rank, result)
        assert result["took"] < (3.0 if how == "stalls" else 1.0) * BUSY, result
        if how == "killed":
            here = hosts[rank] == hosts[victim]
            end = "died (process" if here else f"connection to rank {victim} broke"
            assert end in result["text"], (rank, result)

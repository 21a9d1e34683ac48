"""Invalid input raises on every rank before communication, and the next valid call succeeds."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import flux
from flux import AGGemm, GemmAR, GemmRS, Knobs
from flux.core.env import CHECK
from harness import held, more, run_ranks, settled
from reference import OPS, Inputs, Problem

Refusal = (ValueError, TypeError)


def refusal(call: Callable[[], Any]) -> str:
    """Return the error message of a call that raises."""
    try:
        call()
    except Refusal as error:
        return str(error)
    raise AssertionError("was not refused")


# -- construction ----------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"max_m": 8, "n": 6, "k": 4}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_m": 0}, "max_m must be a positive integer"),
    ({"max_m": -3}, "-3"),
    ({"max_m": 2.0}, "2.0"),
    ({"max_m": None}, "None"),
    ({"max_m": 2**31}, "max_m must be"),
    ({"n": 0}, "n must be a positive integer"),
    ({"n": []}, "n must be a positive integer"),
    ({"n": 2**40}, "n must be a positive integer up to"),
    ({"n": "ab"}, "n must be a positive integer"),
    ({"n": None}, "n must be a positive integer"),
    ({"k": -1}, "k must be a positive integer"),
    ({"k": "4"}, "k must be a positive integer"),
    ({"dtype": torch.int32}, "torch.int32"),
    ({"dtype": "float32"}, "float32"),
    ({"reduce": "max"}, "'max'"),
    ({"backend": "cuda"}, "'cuda'"),
    ({"transport": "tcp"}, "'tcp'"),
    ({"tuning": "fast"}, "'fast'"),
    ({"topology": flux.Topology(3, 1, 1)}, "topology has 3 ranks"),
    ({"topology": (1, 1, 2)}, "(1, 1, 2)"),
    ({"tuning": 3}, "3"),
    ({"tuning": {"path": "fused"}}, "fused"),
    ({"timeout_s": 0}, "timeout_s must be a positive number"),
    ({"timeout_s": -1.0}, "-1.0"),
    ({"timeout_s": float("nan")}, "nan"),
    ({"timeout_s": float("inf")}, "inf"),
    ({"timeout_s": "60"}, "'60'"),
    ({"timeout_s": None}, "None"),
    ({"timeout_s": 1e30}, "timeout_s must be a positive number up to"),
]


def bad_constructions(rank: int, world: int, op: str) -> None:
    """Pass an invalid argument on rank 1: all ranks raise, and the group stays usable."""
    cls = OPS[op]
    for options, words in BAD:
        if op == "ag_gemm" and "reduce" in options:
            continue
        if rank == 1:
            text = refusal(lambda options=options: cls(**{**GOOD, **options}))
            assert words in text, (options, text)
        else:
            text = refusal(lambda: cls(**GOOD))
            assert "rank 1" in text and words in text, (options, text)
        cls(**GOOD).close()


@pytest.mark.parametrize("op", OPS)
def test_invalid_constructor_argument_on_one_rank_raises_on_all(op: str) -> None:
    run_ranks(2, bad_constructions, op)


def differing_construction(rank: int, world: int, options: dict[str, Any], words: str) -> None:
    for cls in OPS.values():
        if cls is AGGemm and "reduce" in options:
            continue
        mine = {**GOOD, **(options if rank == 2 else {})}
        text = refusal(lambda cls=cls, mine=mine: cls(**mine))
        assert "rank 2 has" in text and words in text, text
    AGGemm(**GOOD).close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_m": 9}, "max_m = 9 (rank 0: 8)"),
        ({"n": 12}, "n = (12,) (rank 0: (6,))"),
        ({"k": 5}, "k = 5 (rank 0: 4)"),
        ({"dtype": torch.float16}, "dtype = torch.float16 (rank 0: torch.float32)"),
        ({"transpose_weight": True}, "transpose_weight = True"),
        ({"reduce": "avg"}, "reduce = 'avg'"),
        ({"tuning": Knobs(direction="pull")}, "direction=pull"),
        ({"timeout_s": 5.0}, "timeout_s = 5.0"),
        ({"topology": flux.Topology(2, 1, 2)}, "topology = '2 node"),
    ],
)
def test_ranks_that_differ_are_named(options: dict[str, Any], words: str) -> None:
    run_ranks(4, differing_construction, options, words)


def differing_classes(rank: int, world: int) -> None:
    cls = (AGGemm, AGGemm, GemmRS)[rank]
    text = refusal(lambda: cls(**GOOD))
    assert "rank 2" in text and "gemm_rs" in text and "ag_gemm" in text, text
    text = refusal(lambda: (GemmAR if rank else GemmRS)(**GOOD))
    assert "rank 0" in text, text
    text = refusal(lambda: AGGemm(**GOOD) if rank else GemmRS(**{**GOOD, "k": 0}))
    assert "k must be" in text, text
    GemmAR(**GOOD).close()


def test_ranks_that_build_different_ops_raise() -> None:
    run_ranks(3, differing_classes)


def bad_for_the_world(rank: int, world: int) -> None:
    text = refusal(lambda: AGGemm(**GOOD, tuning=Knobs(swizzle="xor")))
    assert "power-of-two world, got 3" in text
    text = refusal(lambda: AGGemm(max_m=8, n=(6, 7), k=4))
    assert "divisible by the world of 3, got (6, 7)" in text
    for cls in (GemmRS, GemmAR):  # one weight
        assert "n" in refusal(lambda cls=cls: cls(max_m=8, n=(6, 6), k=4))


def test_arguments_that_do_not_fit_the_world_raise() -> None:
    run_ranks(3, bad_for_the_world)


def bad_environment(rank: int, world: int, name: str) -> None:
    before = os.environ.get(name)
    if rank == 1:
        os.environ[name] = "maybe"
    try:
        text = refusal(lambda: AGGemm(**GOOD))
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
    assert name in text and "maybe" in text, text
    AGGemm(**GOOD).close()


@pytest.mark.parametrize("name", ["FLUX_POISON", "FLUX_SPIN_US"])
def test_invalid_environment_variable_on_one_rank_raises_on_all(name: str) -> None:
    run_ranks(2, bad_environment, name, timeout=20)


def groups(rank: int, world: int) -> None:
    pair = dist.new_group([0, 1])
    for bad, kind in (("nobody", ValueError), (3, TypeError), (object(), TypeError)):
        with pytest.raises(kind) as caught:
            AGGemm(bad, **GOOD)
        assert str(bad) in str(caught.value)
    if rank == 2:
        with pytest.raises(Refusal):
            AGGemm(pair, **GOOD)
    else:
        for group in (pair, pair.group_name):
            with AGGemm(group, **GOOD) as op:
                assert op.world == 2
    with AGGemm(None, **GOOD) as op:
        assert op.world == 3
    with AGGemm(**GOOD) as op:
        assert op.world == 3
    dist.barrier()
    if rank != 2:
        dist.destroy_process_group(pair)


def test_invalid_process_groups_raise() -> None:
    run_ranks(3, groups)


def test_an_uninitialised_process_group_raises() -> None:
    assert not dist.is_initialized()
    for cls in OPS.values():
        with pytest.raises(ValueError, match="not initialised: call init_process_group"):
            cls(**GOOD)


# -- calls -----------------------------------------------------------------------------------------

PROBLEMS = {
    "ag_gemm": Problem("ag_gemm", 12, (6,), 4),
    "gemm_rs": Problem("gemm_rs", 12, (7,), 6),
    "gemm_ar": Problem("gemm_ar", 12, (7,), 6),
}
CallArguments = tuple[Any, Any, Any]


def good_call(op: Any, problem: Problem, rank: int, world: int, m: int, seed: int) -> None:
    Inputs(problem, m, world, seed).call_and_check(op, rank)


def wrong_inputs(op: Any, problem: Problem, rank: int, world: int) -> list[tuple[Any, str]]:
    """Return (invalid call, words of its error message)."""
    x, w, b = Inputs(problem, 12, world, seed=1).local(rank)
    m = {"m": 12} if problem.gathers else {}
    too_many = torch.zeros(13 if not problem.gathers else 5 + 12 // world, x.shape[1])
    cases: list[tuple[Any, str]] = [
        (lambda: op(x[:, :-1], w, b, **m), "x must be [rows,"),
        (lambda: op(x[0], w, b, **m), "x must be [rows,"),
        (lambda: op(x[None], w, b, **m), "x must be [rows,"),
        (lambda: op(x, w[:, :-1], b, **m), "weight must be"),
        (lambda: op(x, w.t(), b, **m), "weight must be"),
        (lambda: op(x, w[None], b, **m), "weight must be"),
        (lambda: op(x, w, b[:-1], **m), "bias must be"),
        (lambda: op(x, w, b[None], **m), "bias must be"),
        (lambda: op(x.double(), w, b, **m), "torch.float64"),
        (lambda: op(x, w.half(), b, **m), "torch.float16"),
        (lambda: op(x, w, b.int(), **m), "torch.int32"),
        (lambda: op(x.to("meta"), w, b, **m), "meta"),
        (lambda: op(x, w.to("meta"), b, **m), "meta"),
        (lambda: op(x, w, b.to("meta"), **m), "meta"),
        (lambda: op(x.to_sparse(), w, b, **m), "sparse"),
        (lambda: op(x.tolist(), w, b, **m), "list"),
        (lambda: op(None, w, b, **m), "None"),
        (lambda: op(x, None, b, **m), "None"),
        (lambda: op(x, w, 3.0, **m), "float"),
        (lambda: op(too_many, w, b), "max_m = 12"),
    ]
    if problem.gathers:
        cases += [
            (lambda: op(x, [w, w], [b, b], m=12), "expected 1 weight"),
            (lambda: op(x, [], m=12), "expected 1 weight"),
            (lambda: op(x, [w], [b, b], m=12), "expected 1 weight"),
            (lambda: op(x, [None], m=12), "None"),
            (lambda: op(x, w, b, m=13), "M must be in [1, max_m = 12], got 13"),
            (lambda: op(x, w, b, m=0), "M must be in [1, max_m = 12]"),
            (lambda: op(x, w, b, m=-12), "M must be in [1, max_m = 12], got -12"),
            (lambda: op(x, w, b, m=2.5), "2.5"),
            (lambda: op(x, w, b, m="12"), "12"),
            (lambda: op(x, w, b, m=5), "rows"),
            (lambda: op(x[:0], w, b), "no rows"),
        ]
    else:
        cases += [
            (lambda: op(x[:0], w, b), "M must be in [1, max_m = 12], got 0"),
            (lambda: op(x, [w], b), "list"),
        ]
    return cases


def bad_calls(rank: int, world: int, op_name: str, path: str, wrong_rank: int) -> None:
    problem = PROBLEMS[op_name]
    with problem.build(tuning=Knobs(path=path), timeout_s=5) as op:
        for number, (call, words) in enumerate(wrong_inputs(op, problem, rank, world)):
            try:
                if rank == wrong_rank:
                    text = refusal(call)
                    assert words in text, f"{text!r} lacks {words!r}"
                elif world > 1:
                    x, w, b = Inputs(problem, 12, world, seed=1).local(rank)
                    text = refusal(lambda x=x, w=w, b=b: op(x, w, b))
                    assert f"rank {wrong_rank} refused its input" in text, text
                    assert words[:20] in text, f"{text!r} lacks {words!r}"
                good_call(op, problem, rank, world, 1 + number % 12, seed=number)
            except Exception as error:
                raise AssertionError(f"case {number} ({words}): {error}") from error


@pytest.mark.parametrize("path", ["fused", "medium", "unfused"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("world", "wrong_rank"), [(1, 0), (3, 2), *more((2, 0))])
def test_invalid_call_on_one_rank_raises_on_all_ranks(
    op: str, world: int, wrong_rank: int, path: str
) -> None:
    run_ranks(world, bad_calls, op, path, wrong_rank)


def bad_everywhere(rank: int, world: int, op_name: str) -> None:
    problem = PROBLEMS[op_name]
    with problem.build(timeout_s=5) as op:
        cases = wrong_inputs(op, problem, rank, world)
        for number, (call, words) in enumerate(cases):
            assert words in refusal(call)
            if number % 5 == 4:
                good_call(op, problem, rank, world, 12, seed=number)
        # Each rank another mistake, at once.
        assert cases[rank][1] in refusal(cases[rank][0])
        good_call(op, problem, rank, world, 7, seed=99)


@pytest.mark.parametrize("op", OPS)
def test_same_invalid_call_on_all_ranks_raises(op: str) -> None:
    run_ranks(3, bad_everywhere, op)


def refused_in_a_row(rank: int, world: int, op_name: str, count: int) -> None:
    """Make invalid calls in a row: rank 0 raises without a wait and runs far ahead of others."""
    problem = PROBLEMS[op_name]
    with problem.build(timeout_s=5) as op:
        x, w, b = Inputs(problem, 12, world, seed=1).local(rank)
        if rank == 0:
            for _ in range(count):
                assert "x must be" in refusal(lambda: op(x[:, 1:], w, b))
        else:
            for _ in range(count):
                assert "rank 0 refused its input" in refusal(lambda: op(x, w, b))
        good_call(op, problem, rank, world, 12, seed=7)


@pytest.mark.parametrize("op", OPS)
def test_op_stays_usable_after_consecutive_invalid_calls(op: str) -> None:
    run_ranks(3, refused_in_a_row, op, 50)


def differing_m(rank: int, world: int, op_name: str, path: str, streams: int) -> None:
    problem = PROBLEMS[op_name]
    knobs = Knobs(path=path, copy_streams=streams)
    with problem.build(tuning=knobs, timeout_s=5) as op:
        for odd in range(world):
            m = 9 if rank == odd else 11
            text = refusal(lambda m=m: Inputs(problem, m, world, seed=0).call(op, rank))
            if rank == odd:
                assert f"rank {rank}" in text, text
            else:
                assert f"rank {odd}" in text and "9" in text and "11" in text, text
            good_call(op, problem, rank, world, 11, seed=odd)


@pytest.mark.parametrize("streams", [0, 1])
@pytest.mark.parametrize("path", ["fused", "medium", "unfused"])
@pytest.mark.parametrize("op", OPS)
def test_ranks_that_disagree_on_m_raise(op: str, path: str, streams: int) -> None:
    run_ranks(3, differing_m, op, path, streams)


def bias_on_one_rank(rank: int, world: int, op_name: str) -> None:
    problem = PROBLEMS[op_name]
    with problem.build(timeout_s=5) as op:
        x, w, b = Inputs(problem, 12, world, seed=1).local(rank)
        text = refusal(lambda: op(x, w, b if rank == 1 else None))
        assert "with bias" in text and "without bias" in text, text
        good_call(op, problem, rank, world, 12, seed=2)


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_bias_on_one_rank_only_raises(op: str) -> None:
    run_ranks(3, bias_on_one_rank, op)


def bias_is_a_local_matter(rank: int, world: int) -> None:
    problem = PROBLEMS["ag_gemm"]
    with problem.build() as op:
        inputs = Inputs(problem, 12, world, seed=1)
        inputs.biases = [inputs.biases[0] if rank == 1 else None]
        inputs.call_and_check(op, rank, gather=rank == 0)


def test_all_gather_ranks_may_differ_in_bias_and_outputs() -> None:
    run_ranks(3, bias_is_a_local_matter)


def illegal_for_some_m(rank: int, world: int, op_name: str) -> None:
    """With store = direct, tiles of 2 rows fit M = 8 but straddle owners at M = 6."""
    problem = PROBLEMS[op_name]
    with problem.build(tuning=Knobs(store="direct", tile=(2, 7)), timeout_s=5) as op:
        good_call(op, problem, rank, world, 8, seed=0)
        for refused_ranks in ([0, 1], [0], [1]):
            m = 6 if rank in refused_ranks else 8
            text = refusal(lambda m=m: Inputs(problem, m, world, seed=1).call(op, rank))
            assert "tile_m 2 straddles the chunks of 3 rows" in text, text
            good_call(op, problem, rank, world, 8, seed=2)
        # A refusal for another reason at the same time.
        x, w, b = Inputs(problem, 6, world, seed=1).local(rank)
        refusal(lambda: op(x.half() if rank else x, w, b))
        good_call(op, problem, rank, world, 8, seed=3)


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_knobs_that_are_illegal_for_one_m_raise(op: str) -> None:
    run_ranks(2, illegal_for_some_m, op)


# -- the wrong moment, process or thread -----------------------------------------------------------


def closed_op(rank: int, world: int) -> None:
    for problem in PROBLEMS.values():
        op = problem.build()
        good_call(op, problem, rank, world, 12, seed=0)
        op.close()
        for bad in (False, True):
            x, w, b = Inputs(problem, 12, world, seed=1).local(rank)
            with pytest.raises(RuntimeError, match=rf"{type(op).__name__} is closed"):
                op(None if bad else x, w, b)
        assert op.closed


@pytest.mark.parametrize("world", [1, 3])
def test_closed_op_raises(world: int) -> None:
    run_ranks(world, closed_op)


def forked(rank: int, world: int, how: str) -> None:
    for problem in PROBLEMS.values():
        op = problem.build(tuning=Knobs(copy_streams=1))
        good_call(op, problem, rank, world, 12, seed=0)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                try:
                    good_call(op, problem, rank, world, 12, seed=1)
                except RuntimeError as error:
                    os.write(write, str(error).encode())
                    code = 0
                if how == "close":
                    op.close()
                elif how == "del":
                    del op
            finally:
                os._exit(code)
        os.close(write)
        text = os.read(read, 1000).decode()
        os.close(read)
        assert os.waitpid(pid, 0)[1] == 0, "the child failed"
        assert "forked child" in text and f"built in process {os.getpid()}" in text, text
        assert not op.closed
        for seed in range(5):
            good_call(op, problem, rank, world, 12, seed=seed)
        op.close()


@pytest.mark.parametrize("how", ["leave", "close", "del"])
@pytest.mark.parametrize("world", [1, 2])
def test_call_in_a_forked_child_raises(world: int, how: str) -> None:
    run_ranks(world, forked, how)


def a_second_thread(rank: int, world: int) -> None:
    problem = PROBLEMS["ag_gemm"]
    with problem.build() as op:
        good_call(op, problem, rank, world, 12, seed=0)
        if rank == 0:
            # The first thread waits for rank 1, which comes when it is told to.
            caught: list[Exception] = []

            def first() -> None:
                try:
                    good_call(op, problem, rank, world, 12, seed=1)
                except Exception as error:
                    caught.append(error)

            thread = threading.Thread(target=first)
            thread.start()
            while op._backend.engine.epoch < 2:
                pass
            x, w, b = Inputs(problem, 12, world, seed=1).local(rank)
            with pytest.raises(RuntimeError, match="another thread is inside a call"):
                op(x, w, b)
            dist.barrier()
            thread.join()
            assert not caught, caught
        else:
            dist.barrier()
            good_call(op, problem, rank, world, 12, seed=1)
        good_call(op, problem, rank, world, 12, seed=2)


def test_second_thread_in_an_op_raises() -> None:
    run_ranks(2, a_second_thread)


def test_peer_timeout_error_is_a_runtime_error() -> None:
    assert issubclass(flux.PeerTimeoutError, RuntimeError)


# -- ranks that fail while an op is built ----------------------------------------------------------


def _alone(rank: int, world: int, where: str) -> list[str]:
    """Let rank 1 fail between two exchanges, or after the last one."""
    target = {
        "choice": "flux.ops.base.choice.choose",
        "backend": "flux.ops.base.CpuBackend",
        "memory": "flux.transport.shm.create",
        "late": "flux.ops.base.Comparison",
    }[where]
    heard = []
    with AGGemm(max_m=8, n=8, k=8):
        pass  # a group's first op opens connections of gloo and of the store, which the group keeps
    for error in (RuntimeError("a rank's own"), OverflowError("trouble")):
        before = held()
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(CHECK.during("1" if where == "late" else "0"))
            if rank == 1:
                stack.enter_context(mock.patch(target, side_effect=error))
            with pytest.raises(Exception) as raised:
                AGGemm(max_m=8, n=8, k=8, timeout_s=30.0)
        heard.append(f"{type(raised.value).__name__}: {raised.value}")
        assert time.monotonic() - begin < 10.0
        del raised
        gc.collect()
        assert settled(before) == before
    with AGGemm(max_m=8, n=8, k=8) as op:  # the group is as it was
        op(torch.zeros(8 // world, 8), torch.zeros(8 // world, 8))
    return heard


@pytest.mark.parametrize("where", ["choice", "backend", "memory", "late"])
def test_failure_of_a_rank_during_construction_raises_on_all(where: str) -> None:
    """Without a report, the others would wait for the timeout of the group: half an hour."""
    first, own = run_ranks(2, _alone, where)
    assert own == ["RuntimeError: a rank's own", "OverflowError: trouble"]
    assert first == [f"PeerFailedError: AGGemm: rank 1 failed: {error}" for error in own]

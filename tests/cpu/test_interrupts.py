"""Exceptions between any two lines of a call: from signal handlers, hooks, trace functions.

The op stays usable, or it is closed and its peers raise at once. No rank gets a wrong result.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flux import _C, AGGemm, Knobs, PeerTimeoutError
from flux.ops.pool import pool_of
from flux.transport.exchange import Exchange
from harness import BUSY, more, run_ranks
from reference import Inputs, Problem

FUSED = Knobs(copy_streams=1, comm_tile_rows=2)
UNFUSED = Knobs(path="unfused")


class Interrupt(ValueError):
    """As a JSONDecodeError of a signal handler."""


def raising_at(
    count: int, events: str, call: Callable[[], Any], where: str = "/flux/"
) -> tuple[bool, Any]:
    """Raise at the ``count``-th event in flux; return whether it came that far, and the result."""
    seen = 0

    def local(frame: Any, event: str, arg: Any) -> Any:
        nonlocal seen
        if event == events:
            seen += 1
            if seen == count:
                raise Interrupt(f"{frame.f_code.co_name}, line {frame.f_lineno}")
        return local

    def enter(frame: Any, event: str, arg: Any) -> Any:
        if where not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = events == "opcode"
        return local

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        return False, call()
    except Interrupt:
        return True, None
    finally:
        sys.settrace(before)


def interrupted_at_each(
    rank: int, world: int, op_name: str, knobs: Knobs, events: str, first: int, step: int
) -> None:
    """Interrupt rank 0 at every ``step``-th event of a call, each on an op that is open."""
    problem, op = Problem(op_name, 24, (12,), 12), None
    inputs = Inputs(problem, 24, world, seed=3)
    told = [None] * world
    for count in range(first, 100_000, step):
        if op is None or op.closed:
            op = problem.build(tuning=knobs, timeout_s=10.0)
            inputs.call_and_check(op, rank)
        x, *others = inputs.local(rank)
        x = x.clone()
        dist.barrier()
        epoch, began, out = op._backend.engine.epoch, time.monotonic(), None
        came_so_far = True
        if rank == 0:
            came_so_far, out = raising_at(count, events, lambda: op(x, *others))  # noqa: B023
            moved = op.closed or op._backend.engine.epoch != epoch
            if came_so_far and moved:
                x.fill_(1e9)  # its owner reuses it: nothing may read it any more
            elif came_so_far:
                out = op(x, *others)  # as if there had been no call
        else:
            try:
                out = op(x, *others)
            except PeerTimeoutError:
                assert op.closed
            except ValueError as error:  # the handler's, while arguments were checked
                assert "rank 0 refused its input" in str(error)
        assert time.monotonic() - began < 3.0 * BUSY, f"event {count}: noticed too late"
        if out is not None:
            inputs.check([out], rank)
        dist.all_gather_object(told, (came_so_far, op.closed))
        if any(closed for _, closed in told):
            op.close()
        if not told[0][0]:
            break
    op.close()


@pytest.mark.parametrize(
    ("op", "events", "step"),
    [("ag_gemm", "line", 11), ("gemm_ar", "line", 7), *more(("ag_gemm", "opcode", 3))],
)
def test_exception_at_any_line_leaves_the_op_usable_or_closed(
    op: str, events: str, step: int
) -> None:
    run_ranks(2, interrupted_at_each, op, FUSED, events, 3, step, timeout=100.0 * BUSY, fresh=True)


def test_exception_at_any_line_of_a_close_is_made_up_for() -> None:
    run_ranks(2, closed_at_each, timeout=60.0 * BUSY, fresh=True)


def closed_at_each(rank: int, world: int) -> None:
    x, weight = torch.ones(2, 3), torch.ones(1, 3)
    for count in range(1, 100_000, 3):
        op = AGGemm(max_m=4, n=2, k=3, timeout_s=10.0)
        came_so_far, _ = raising_at(count, "line", op.close) if rank == 0 else (True, None)
        if rank == 0:
            op.close()
            with pytest.raises(RuntimeError, match="is closed"):
                op(x, weight)
        else:
            with pytest.raises(PeerTimeoutError, match=r"closed the op|gave up"):
                op(x, weight)
        told = [None] * world
        dist.all_gather_object(told, came_so_far)
        if not told[0]:
            return


def burst(rank: int, world: int) -> None:
    """Signals whose handler raises come faster than a call ends, each at another place."""

    def raise_(*_: object) -> None:
        raise Interrupt

    signal.signal(signal.SIGALRM, raise_)
    for number in range(12):
        op = AGGemm(max_m=4, n=2, k=3, timeout_s=10.0)
        x, weight = torch.ones(2, 3), torch.ones(1, 3)
        dist.barrier()
        if rank == 0:
            for _ in range(8):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 2e-5 * (number + 1), 1e-4)
                    for _ in range(50):
                        op(x, weight)
                except (Interrupt, RuntimeError):
                    pass
                finally:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                    except Interrupt:
                        signal.setitimer(signal.ITIMER_REAL, 0)
            assert not op._inside.taken
            op.close()
            assert op.closed and op._released
        else:
            with pytest.raises((PeerTimeoutError, ValueError)):
                for _ in range(1000):
                    op(x, weight)
        dist.barrier()
        op.close()


def test_bursts_of_signals_never_lock_an_op() -> None:
    run_ranks(2, burst, timeout=60.0 * BUSY, fresh=True)


def keeps_its_type(rank: int, world: int, where: str) -> None:
    """Rank 1 comes late, so a handler of rank 0 runs while that waits."""
    group = dist.group.WORLD
    assert group is not None

    def handler(*_: object) -> None:
        raise RuntimeError("of the user")

    exchange = Exchange(group, "test", 10.0)
    exchange.all_gather(None)
    op = AGGemm(max_m=4, n=2, k=3, timeout_s=10.0, tuning=UNFUSED)
    if rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(RuntimeError, match="of the user") as caught:
            if where == "exchange":
                exchange.all_gather(None)
            else:
                op.start_gather(torch.ones(2, 3), 4)()
        assert type(caught.value) is RuntimeError
        return
    time.sleep(0.6)
    if where == "exchange":
        exchange.all_gather(None)
        with pytest.raises(PeerTimeoutError):  # rank 0 stopped: it is out of step
            exchange.all_gather(None)


@pytest.mark.parametrize("where", ["exchange", "collective"])
def test_errors_of_handlers_keep_their_type(where: str) -> None:
    run_ranks(2, keeps_its_type, where, timeout=30.0, fresh=True)


def leaves_a_functional_call(rank: int, world: int) -> None:
    """A handler's ValueError while ranks compare a call is not their disagreement."""
    pool = pool_of(None)
    pool.agree(lambda: "first")
    if rank == 0:

        def handler(*_: object) -> None:
            raise Interrupt

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupt):
            pool.agree(lambda: "second")
        assert pool._control is None
    else:
        time.sleep(0.5)
        with pytest.raises(PeerTimeoutError):
            for what in ("second", "next"):  # rank 0 has entered the second, then left
                pool.agree(lambda: what)  # noqa: B023
    dist.barrier()
    pool.agree(lambda: "third")


def test_interrupted_comparison_of_functional_calls_is_given_up() -> None:
    run_ranks(2, leaves_a_functional_call, timeout=30.0, fresh=True)


def test_one_call_at_a_time_enters_whatever_is_raised_where() -> None:
    exclusive = _C.Exclusive()

    def enter(count: int) -> None:
        assert exclusive.taken and not exclusive.try_call(enter, 0)
        with pytest.raises(RuntimeError, match="in use"):
            exclusive.call("in use", enter, 0)
        if count:
            raise Interrupt

    def guarded() -> None:
        exclusive.call("in use", enter, 0)

    with pytest.raises(Interrupt) as kept:  # its traceback refers to the frame that was inside
        exclusive.call("in use", enter, 1)
    assert not exclusive.taken and exclusive.try_call(enter, 0) and kept.tb is not None
    for count in range(1, 100_000):
        came_so_far, _ = raising_at(count, "opcode", guarded, __file__)
        assert not exclusive.taken
        if not came_so_far:
            break
    assert count > 20
    with pytest.raises(TypeError, match="needs a function"):
        exclusive.try_call()  # type: ignore[call-arg]


def test_threads_that_contend_for_a_call_do_not_hang() -> None:
    exclusive, counts, turned_away = _C.Exclusive(), list[int](), list[int]()
    stop = time.monotonic() + 0.2

    def enter() -> None:
        counts.append(1)
        time.sleep(0)  # lets go of the GIL
        assert len(counts) == 1
        counts.pop()

    def contend() -> None:
        while time.monotonic() < stop:
            if not exclusive.try_call(enter):
                turned_away.append(1)
            gc.collect(0)

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not counts and turned_away and not exclusive.taken

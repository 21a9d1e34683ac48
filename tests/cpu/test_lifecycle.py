"""Resources of an op from construction to close; several ops and groups at once."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import signal
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import flux
from flux import _C, AGGemm, GemmAR, GemmRS, Knobs
from flux.transport import exchange
from flux.transport.placement import Placement
from flux.transport.threads import Abandonable, Threads
from flux.transport.watch import Watch
from harness import (
    STRESS,
    held,
    more,
    nothing_left_in_shared_memory,
    resident_bytes,
    run_ranks,
    settled,
)
from reference import Inputs, Problem
from scripts import programs

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
THREADED = Knobs(copy_streams=1)


def warm_up() -> None:
    """Build a first op, which starts permanent resources: caches, threads of gloo."""
    with AGGemm(max_m=8, n=dist.get_world_size(), k=8, tuning=THREADED) as op:
        op(torch.zeros(1, 8), torch.zeros(1, 8))
    dist.barrier()


def _copied(rank: int, world: int) -> None:
    """A copy of an op is that op, whose memory has one owner."""
    with AGGemm(max_m=8, n=world, k=8) as op:
        assert copy.copy(op) is op and copy.deepcopy(op) is op
        with pytest.raises(TypeError, match="AGGemm cannot be pickled"):
            pickle.dumps(op)
        op(torch.zeros(8 // world, 8), torch.zeros(1, 8))


def test_copies_of_an_op_share_it() -> None:
    run_ranks(2, _copied)


def workspace(rank: int, world: int) -> dict[str, tuple[int, int]]:
    m, n, k, item = 1001, 700, 600, 4
    chunk = -(-m // world)
    blocks = (world - 1) * chunk * n * item
    needed = {
        "ag_gemm": m * k * item,
        "gemm_rs": blocks,
        "gemm_ar": blocks + chunk * n * item,  # the own result, for the peers to pull
        "unfused": 0,
    }
    sizes = {}
    for name, least in needed.items():
        op_name, path = ("gemm_rs", "unfused") if name == "unfused" else (name, "fused")
        with Problem(op_name, m, (n,), k).build(tuning=Knobs(path=path)) as op:
            sizes[name] = (op.workspace_bytes, least)
    return sizes


@pytest.mark.parametrize("world", [2, 4])
def test_workspace_is_what_the_algorithm_needs(world: int) -> None:
    for sizes in run_ranks(world, workspace):
        unfused, _ = sizes.pop("unfused")
        assert unfused <= 8192
        for name, (stated, needed) in sizes.items():
            assert needed <= stated <= 1.1 * needed, f"{name}: {stated} bytes for {needed}"


def stated_size_is_mapped(rank: int, world: int) -> None:
    warm_up()

    def mapped() -> int:
        size = 0
        with open("/proc/self/maps") as maps:
            for line in maps:
                if "/dev/shm/" in line:
                    begin, end = line.split()[0].split("-")
                    size += int(end, 16) - int(begin, 16)
        return size

    before = mapped()
    with GemmRS(max_m=300, n=500, k=4) as op:
        pages = -(-op.workspace_bytes // 4096) * 4096
        assert mapped() - before == world * pages
    assert mapped() == before


def test_workspace_bytes_is_what_is_mapped() -> None:
    run_ranks(3, stated_size_is_mapped)


def world_of_one(rank: int, world: int) -> None:
    before = held()
    for op_name in OPS:
        problem = Problem(op_name, 9, (5,), 7)
        op = problem.build()
        assert op.workspace_bytes == 0 and held() == before
        Inputs(problem, 9, 1, seed=0).call_and_check(op, 0)
        op.close()


def test_single_rank_needs_no_workspace() -> None:
    run_ranks(1, world_of_one)


def gives_back(rank: int, world: int) -> None:
    warm_up()
    gc.collect()
    before = held()
    # Either a worker, or a thread that waits for gloo's reduce_scatter, is kept between calls.
    cases = [*((op_name, THREADED) for op_name in OPS), ("gemm_rs", Knobs(path="unfused"))]
    hows = ("close", "with", "del", "exception")
    every = itertools.product(cases, hows) if STRESS > 1 else zip(cases, hows, strict=True)
    for (op_name, tuning), how in every:
        problem = Problem(op_name, 40, (50,), 60)
        op = problem.build(tuning=tuning)
        inputs = Inputs(problem, 40, world, seed=0)
        for _ in range(2):
            out = inputs.call(op, rank, gather=problem.gathers)
        during = held()
        assert during["segments"] == before["segments"] + world
        assert during["threads"] == before["threads"] + 1
        watched = world - 1  # a descriptor for each peer's process; mapped segments need none
        assert during["descriptors"] == before["descriptors"] + watched
        if how == "close":
            op.close()
            op.close()
        elif how == "with":
            with op:
                pass
        elif how == "del":
            del op  # at once: no reference cycle waits for the collector
        else:  # an exception that passes through the block
            with pytest.raises(ZeroDivisionError), op:
                _ = 1 / 0
        assert held() == before, f"{op_name} after {how}: {before} -> {held()}"
        inputs.check(out, rank)  # results outlive the op
        dist.barrier()


def test_a_thread_in_a_call_that_does_not_return_is_replaced() -> None:
    before, threads, wake = threading.active_count(), Threads(), threading.Event()

    def ident() -> int:
        call = Abandonable(threading.get_ident, threads)
        assert call.wait(5.0)
        return call.result()

    kept = ident()
    assert ident() == kept
    stuck = Abandonable(wake.wait, threads)
    assert not stuck.wait(0.01)
    assert ident() != kept and threading.active_count() == before + 2
    threads.close()
    assert threading.active_count() == before + 1
    wake.set()
    assert stuck.wait(5.0) and stuck.result()
    eventually = time.monotonic() + 5.0
    while threading.active_count() > before:
        assert time.monotonic() < eventually
        time.sleep(0.001)


def test_closing_releases_everything() -> None:
    with nothing_left_in_shared_memory():
        run_ranks(3, gives_back)


def refused_construction(rank: int, world: int) -> None:
    warm_up()
    before = held()
    for _ in range(3):
        with pytest.raises(ValueError):
            AGGemm(max_m=8, n=8, k=8 + rank)
        with pytest.raises(OSError):
            AGGemm(max_m=2**20, n=8, k=2**18)  # 1 TiB
    assert settled(before) == before


def test_failed_construction_holds_no_memory() -> None:
    with nothing_left_in_shared_memory():
        run_ranks(2, refused_construction)


def other_builds(rank: int, world: int) -> None:
    """Rank 1 is of another version, then only lays memory out in another way."""
    other = {"flux": "0.0.1", "layout": 7}
    with contextlib.ExitStack() as stack:
        if rank == 1:
            stack.enter_context(mock.patch.object(exchange, "BUILD_IDENTITY", other))
        words = r"rank 1 has flux = '0\.0\.1' \(rank 0: '.+'\), layout = 7 \(rank 0: \d+\)"
        with pytest.raises(ValueError, match=f"AGGemm: ranks disagree; {words}"):
            AGGemm(max_m=8, n=8, k=8)
    pad_bytes = _C.pad_bytes
    with contextlib.ExitStack() as stack:
        if rank == 1:
            larger = mock.patch.object(_C, "pad_bytes", lambda count: pad_bytes(count) + 4096)
            stack.enter_context(larger)
        with pytest.raises(ValueError, match=r"rank 1 has segments of \d+ bytes \(rank 0: \d+\)"):
            AGGemm(max_m=8, n=8, k=8)
    warm_up()


def test_ranks_of_different_builds_raise() -> None:
    """Without the check, ranks would read beyond the end of a segment and die of SIGBUS."""
    with nothing_left_in_shared_memory():
        run_ranks(2, other_builds)


def _close(op: Any, *_: object) -> None:
    """A signal handler."""
    op.close()


def closing_inside(rank: int, world: int, op_name: str, how: str, streams: int) -> None:
    """Rank 0 waits in a call that rank 1 never makes, and closes the op meanwhile."""
    problem = Problem(op_name, 24, (12,), 12)
    inputs = Inputs(problem, 24, world, seed=1)
    warm_up()
    before = held()
    for _ in range(2):
        op = problem.build(tuning=Knobs(copy_streams=streams), timeout_s=60.0)
        inputs.call_and_check(op, rank)
        closer = threading.Timer(0.1, op.close)
        if rank == 0:
            if how == "signal":
                signal.signal(signal.SIGALRM, partial(_close, op))
                signal.setitimer(signal.ITIMER_REAL, 0.1)
            else:
                closer.start()
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match="closed during call 2"):
                inputs.call(op, rank)
            assert time.monotonic() - begin < 10.0 and op.closed
            if how == "thread":
                closer.join()
            with pytest.raises(RuntimeError, match="is closed"):
                inputs.call(op, rank)
            op.close()
        dist.barrier()
        op.close()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    del op, closer
    gc.collect()
    assert settled(before) == before


@pytest.mark.parametrize(
    ("how", "streams"), [("thread", 1), ("signal", 0), *more(("thread", 0), ("signal", 1))]
)
@pytest.mark.parametrize("op", OPS)
def test_close_interrupts_a_call_in_progress(op: str, how: str, streams: int) -> None:
    with nothing_left_in_shared_memory():
        run_ranks(2, closing_inside, op, how, streams)


def closing_at_random(rank: int, world: int) -> None:
    """A thread closes the op somewhere in a loop of calls, which end with its error or one of a
    peer's leaving."""
    warm_up()
    for number in range(40):
        op = AGGemm(max_m=64, n=8, k=8, tuning=THREADED, timeout_s=30.0)
        x, w = torch.ones(64 // world, 8), torch.ones(8 // world, 8)
        closer = threading.Timer(0.0005 * number, op.close)
        if rank == number % world:
            closer.start()
        # A call that finds the closing thread inside says so; the next one finds the op closed.
        with pytest.raises(RuntimeError, match=r"closed|gave up|another thread is inside"):
            while True:
                op(x, w)
        if closer.ident:
            closer.join()
        dist.barrier()
        op.close()


def test_close_at_random_moments_raises_in_calls() -> None:
    with nothing_left_in_shared_memory():
        run_ranks(2, closing_at_random)


def closing_while_peers_still_read(rank: int, world: int) -> None:
    """Close on some ranks while the last call of others is still in progress."""
    for op_name in OPS:
        problem = Problem(op_name, 24, (12,), 12)
        for direction in ("push", "pull"):
            for streams in (0, 1):
                knobs = Knobs(
                    direction=direction, copy_streams=streams, comm_tile_rows=2, order="ring1d"
                )
                op = problem.build(tuning=knobs)
                if rank == world - 1:
                    op._backend.engine.set_delay(2e-3, 7)
                inputs = Inputs(problem, 24, world, seed=3)
                got = inputs.call(op, rank)
                op.close()
                inputs.check(got, rank)


@pytest.mark.parametrize("world", [2, *more(4)])
def test_a_rank_may_close_as_soon_as_it_has_its_result(world: int) -> None:
    run_ranks(world, closing_while_peers_still_read)


def memory_over_many_calls(rank: int, world: int, calls: int) -> int:
    problem = Problem("gemm_ar", 64, (256,), 64)
    with (
        problem.build(tuning=THREADED) as op,
        AGGemm(max_m=64, n=256, k=64) as gather,
    ):
        sizes = (64, 1, 33, 50)
        cases = [Inputs(problem, m, world, seed=m).local(rank) for m in sizes]
        shards = [torch.zeros(-(-m // world), 64) for m in sizes]
        weight = torch.zeros(256 // world, 64)

        def run(count: int) -> int:
            for i in range(count):
                op(*cases[i % 4])
                gather(shards[i % 4], weight)
            gc.collect()
            return resident_bytes()

        before = run(calls // 10)
        return run(calls) - before


def test_resident_memory_is_flat() -> None:
    calls = 2000 * STRESS
    for grown in run_ranks(2, memory_over_many_calls, calls, timeout=200):
        assert grown < 1 << 20, f"grew by {grown} bytes in {calls} calls"


def schedules_of_many_m(rank: int, world: int) -> int:
    with AGGemm(max_m=1500, n=2, k=1) as op:
        weight = torch.zeros(1, 1)

        def run() -> int:
            for m in range(1, 1501):
                op(torch.zeros(-(-m // world), 1)[: max(0, m - rank * -(-m // world))], weight, m=m)
            return resident_bytes()

        before = run()
        return run() - before


def test_memory_is_bounded_when_every_m_is_new() -> None:
    for grown in run_ranks(2, schedules_of_many_m):
        assert grown < 2 << 20, f"grew by {grown} bytes"


def build_and_close(rank: int, world: int) -> int:
    before = 0
    for count in range(60):
        if count == 20:
            gc.collect()
            before = resident_bytes()
        with GemmRS(max_m=256, n=1024, k=4 * world, tuning=THREADED) as op:
            op(torch.zeros(256, 4), torch.zeros(1024, 4))
    return resident_bytes() - before


def test_ops_built_repeatedly_do_not_accumulate() -> None:
    for grown in run_ranks(2, build_and_close):
        assert grown < 8 << 20, f"grew by {grown} bytes in 40 ops of 2 MiB"


def interleaved(rank: int, world: int) -> None:
    problems = [Problem(op, 20, (8,), 12) for op in (*OPS, "ag_gemm")]
    ops = [p.build(tuning=Knobs(copy_streams=i % 2)) for i, p in enumerate(problems)]
    for step in range(120):
        which = step * 7 % 4 if step % 3 else step % 4
        m = 1 + step * 5 % 20
        inputs = Inputs(problems[which], m, world, seed=step)
        inputs.check(inputs.call(ops[which], rank), rank)
        if step == 60:  # one leaves, and another one comes
            ops[3].close()
            ops[3] = problems[3].build()
    for op in ops:
        op.close()


@pytest.mark.parametrize("world", [2, 3])
def test_several_ops_on_one_group(world: int) -> None:
    run_ranks(world, interleaved)


def two_groups(rank: int, world: int) -> None:
    """Every rank is in a small group and in the whole one, with ops on both."""
    halves = [dist.new_group([1, 3]), dist.new_group([2, 0])]
    mine = halves[0] if rank % 2 else halves[1]
    inside = dist.get_rank(mine)
    problems = [Problem(op, 15, (6,), 8) for op in OPS]
    # By object, by name, and all of them.
    small = [p.build(mine if i % 2 else mine.group_name) for i, p in enumerate(problems)]
    large = [p.build() for p in problems]
    for step in range(40):
        which, m = step % 3, 1 + step * 4 % 15
        assert (small[which].rank, small[which].world) == (inside, 2)
        for op, at, size, seed in (
            (small[which], inside, 2, 50 + step + 1000 * (rank % 2)),
            (large[which], rank, world, step),
        ):
            Inputs(problems[which], m, size, seed).call_and_check(op, at)
    for op in small + large:
        op.close()
    dist.barrier()
    dist.destroy_process_group(mine)


def test_ops_of_overlapping_groups_work_together() -> None:
    run_ranks(4, two_groups)


def destroyed_group(rank: int, world: int) -> None:
    """No open op, layer or functional call keeps a destroyed group and its threads."""
    group = dist.new_group(list(range(world)))
    op = AGGemm(group, max_m=8, n=world, k=8)
    x = torch.ones(4, 8)
    want = op(x, torch.ones(1, 8))
    layer = flux.layers.ColumnParallelLinear(8, 2 * world, group=group)
    layer(x)
    flux.ops.fused_all_gather_matmul(x, [torch.ones(8, 1)], 0, group.group_name)
    dist.barrier()
    alive = weakref.ref(group)
    gc.disable()  # it is not a matter of the collector either
    dist.destroy_process_group(group)
    del group
    assert alive() is None
    gc.enable()
    assert torch.equal(op(x, torch.ones(1, 8)), want)  # its memory is its own
    with pytest.raises(RuntimeError, match=r"process group .* has been destroyed"):
        _ = op._unfused.group
    op.close()
    with pytest.raises(ValueError, match="no process group is named"):
        layer(x)
    dist.barrier()


def test_a_destroyed_group_is_released() -> None:
    run_ranks(2, destroyed_group)


def two_groups_in_threads(rank: int, world: int) -> None:
    """Run ops in different threads at once, one thread per op."""
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    problems = [Problem("ag_gemm", 16, (6,), 8), Problem("gemm_rs", 16, (6,), 8)]
    ops = [p.build(g, tuning=THREADED) for p, g in zip(problems, groups, strict=True)]
    errors: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for step in range(100):
                inputs = Inputs(problems[which], 1 + step % 16, world, seed=step)
                inputs.check(inputs.call(ops[which], rank), rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for op in ops:
        op.close()
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    if errors:
        raise errors[0]


def test_ops_in_different_threads() -> None:
    run_ranks(2, two_groups_in_threads)


def life_of_an_op(rank: int, world: int) -> None:
    op: Any = AGGemm(max_m=6, n=2 * world, k=3)
    assert (op.rank, op.world, op.closed) == (rank, world, False)
    assert repr(op).startswith("AGGemm(max_m=6,")
    assert f"rank={rank}" in repr(op) and "closed" not in repr(op)
    schedule = op.schedule(6)
    assert schedule is flux.make_schedule(
        "ag_gemm", (6, 2 * world, 3), world, rank, knobs=op.knobs, itemsize=4
    )
    for m in (0, 7, -1):
        with pytest.raises(ValueError, match=rf"M must be in \[1, 6\], got {m}"):
            op.schedule(m)
    with op as entered:
        assert entered is op
    assert op.closed and "closed" in repr(op)
    alive = weakref.ref(op)
    del op, entered
    assert alive() is None


@pytest.mark.parametrize("world", [1, 2])
def test_op_reports_schedule_and_closed_state(world: int) -> None:
    run_ranks(world, life_of_an_op)


def in_a_cycle(rank: int, world: int) -> None:
    before = held()
    op = GemmAR(max_m=8, n=8, k=world, tuning=THREADED)
    op(torch.zeros(8, 1), torch.zeros(8, 1))
    cycle: list[Any] = [op]
    cycle.append(cycle)
    del op, cycle
    gc.collect()
    assert held()["segments"] == before["segments"] and held()["threads"] <= before["threads"]


def test_garbage_collected_op_is_closed() -> None:
    run_ranks(2, in_a_cycle)


def engine_outlives_references(rank: int, world: int) -> None:
    """The collector clears the objects of a cycle in any order, so also the memory first."""
    op = AGGemm(max_m=8, n=world, k=8, tuning=THREADED)
    exchanged = exchange.Exchange(exchange.resolve_group(None), "watch", 10.0)
    watch = Watch(exchanged, Placement.together(world))
    dist.barrier()
    for owner, end in (
        (op._backend, lambda: op._backend.engine.close()),
        (watch, lambda: watch._engine.close()),
    ):
        memory = owner._memory
        assert memory is not None
        segment = weakref.ref(memory.segments[rank])
        del memory
        owner._memory = None
        gc.collect()
        assert segment() is not None  # the engine writes to it when it is closed or destroyed
        end()
        assert segment() is None


def test_memory_is_mapped_until_the_engine_is_closed() -> None:
    run_ranks(2, engine_outlives_references)


NEVER_CLOSED = """
import sys
import torch, torch.distributed as dist
import flux

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
op = flux.AGGemm(max_m=4, n=2, k=3, tuning=flux.Knobs(copy_streams=1))
assert torch.equal(op(torch.ones(2, 3), torch.ones(1, 3)), torch.full((4, 1), 3.0))
dist.barrier()
"""


def test_a_program_may_end_without_closing_its_op(tmp_path: Path) -> None:
    """The interpreter ends while the worker sleeps: no hang, no crash, no complaint."""
    with nothing_left_in_shared_memory():
        each = [(str(rank), str(tmp_path / "store")) for rank in range(2)]
        ended = programs(NEVER_CLOSED, tmp_path, each)
    assert all(one.returncode == 0 and "leaked" not in one.stderr for one in ended), ended


def ended_before_it_begins(rank: int, world: int) -> None:
    op = AGGemm(max_m=4, n=2, k=3, timeout_s=10.0)
    x, weight = torch.ones(2, 3), torch.ones(1, 3)
    if rank == 0:
        assert op._backend is not None
        op._backend.end_call()  # as close() does while a call is still checking its arguments
        with pytest.raises(RuntimeError, match="closed during call"):
            op(x, weight)
    else:
        with pytest.raises(flux.PeerTimeoutError):
            op(x, weight)


def test_a_call_that_is_ended_before_it_begins_fails() -> None:
    run_ranks(2, ended_before_it_begins)

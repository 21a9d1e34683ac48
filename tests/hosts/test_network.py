"""Ranks on several hosts: results, routes and life cycle over send and receive.

Hosts are names here (FLUX_HOST): ranks that give different ones share no memory, so everything
between them crosses the loopback. tests/hosts/test_hosts.py uses links of limited speed.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import signal
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import flux
from flux import AGGemm, GemmRS, Knobs, PeerTimeoutError, Topology
from flux.backends.cpu.slabs import SegmentLayout
from flux.core.env import HOST
from flux.core.recorder import Work
from flux.ops.pool import clear_workspaces
from flux.transport.network import Network
from harness import (
    BUSY,
    STRESS,
    fresh_ranks,
    held,
    join_group,
    more,
    nothing_left_in_shared_memory,
    run_ranks,
    settled,
)
from op_cases import Case, check_cases, meshes, random_case
from reference import Inputs, Problem
from scripts import programs, start_forked_command

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
PLACEMENTS = ("ab", "aab", "aabb", *more("aaabbc", "aaab", "abab", "abc", "aabbcc"))


def on_host(name: str) -> AbstractContextManager[None]:
    """Place ops that are built in the body on the host of this name."""
    return HOST.during(name)


def check_on_hosts(rank: int, world: int, hosts: str, cases: list[Case]) -> int:
    with on_host(hosts[rank]):
        return check_cases(rank, world, cases)


def networked(case: Case, rng: random.Random) -> Case:
    """A case with what exists between hosts: tiles are pushed; hosts as found, or any mesh."""
    world = case.topology.world if case.topology else 0
    topology = rng.choice((None, None, *(meshes(world) if world else ())))
    direction = rng.choice((None, "push"))
    return replace(case, knobs=replace(case.knobs, direction=direction), topology=topology)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("hosts", PLACEMENTS)
def test_random_cases(op: str, hosts: str) -> None:
    rng = random.Random(f"{op} {hosts}")
    cases = [networked(random_case(rng, op, len(hosts)), rng) for _ in range(3 * STRESS)]
    run_ranks(len(hosts), check_on_hosts, hosts, cases)


def every_size(rank: int, world: int, hosts: str, calls: int) -> list[str]:
    """Back-to-back calls of changing M; the results' bits."""
    digests = []
    with on_host(hosts[rank]):
        for op_name in OPS:
            problem = Problem(op_name, 60, (16,), 24)
            with problem.build(tuning=Knobs(comm_tile_rows=3)) as op:
                rng = random.Random(7)
                for call in range(calls):
                    m = rng.randint(1, 60)
                    inputs = Inputs(problem, m, world, seed=call % 5)
                    got = inputs.call(op, rank)
                    if call % 10 == 0:
                        inputs.check(got, rank)
                    digests.append(sha256(got[0].numpy().tobytes()).hexdigest())
    return digests


@pytest.mark.parametrize("hosts", ["aab", *more("ab")])
def test_back_to_back_calls_repeat_bitwise(hosts: str) -> None:
    first = run_ranks(len(hosts), every_size, hosts, 60 * STRESS, timeout=200)
    assert run_ranks(len(hosts), every_size, hosts, 60 * STRESS, timeout=200) == first


def large(rank: int, world: int, hosts: str) -> None:
    """Megabytes: slabs, several tiles under way, and the heuristic's own choice."""
    with on_host(hosts[rank]):
        for op_name, n, k in (("ag_gemm", 64, 700), ("gemm_rs", 700, 64), ("gemm_ar", 700, 64)):
            problem = Problem(op_name, 4200, (n,), k)
            with problem.build() as op:
                for m in (4200, 5, 3989):
                    Inputs(problem, m, world, seed=m).call_and_check(op, rank)


@pytest.mark.parametrize("hosts", ["ab", *more("aabb")])
def test_large_problems_match_float64(hosts: str) -> None:
    run_ranks(len(hosts), large, hosts)


def fine(rank: int, world: int, hosts: str) -> None:
    """A message per slab, and more slabs in a chunk than the heuristic's communication tiles."""
    with on_host(hosts[rank]):
        for op_name in ("gemm_rs", "gemm_ar"):
            # Rows of one element: a signal out of bounds is behind the data, too (make asan).
            problem = Problem(op_name, 900 * world, (1,), 8)
            with problem.build(tuning=Knobs(tile=(1, 64))) as op:
                for m in (900 * world, 7):
                    Inputs(problem, m, world, seed=m).call_and_check(op, rank)


@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_chunks_of_many_messages_match_float64(hosts: str) -> None:
    run_ranks(len(hosts), fine, hosts)


def too_small(rank: int, world: int) -> list[str]:
    """An op whose memory is too small for its schedules: the error of each call."""
    errors = []
    serving = SegmentLayout.serving
    with (
        on_host("ab"[rank]),
        mock.patch.object(SegmentLayout, "serving", lambda *a: replace(serving(*a), signals=8)),
    ):
        problem = Problem("gemm_rs", 64, (4,), 8)
        with problem.build(tuning=Knobs(comm_tile_rows=2), timeout_s=20.0) as op:
            schedules = dict(op._schedules)
            for m in (64, 8, 64, 16):  # 64 and 8 signals: each refusal leaves the op usable
                inputs = Inputs(problem, m, world, seed=m)
                try:
                    inputs.call_and_check(op, rank)
                    errors.append("")
                except ValueError as error:
                    errors.append(str(error))
            assert schedules == {} and set(op._schedules) == {8, 16}
    return errors


def test_a_schedule_that_needs_more_memory_is_refused_on_all_ranks() -> None:
    errors = run_ranks(2, too_small)
    assert errors[0] == errors[1]
    needs, has = (
        "the schedule needs 32 signals, 1 blocks of 32 rows",
        "memory has 8 signals, 1 blocks",
    )
    assert needs in errors[0][0] and has in errors[0][0] and errors[0][2] == errors[0][0]
    assert errors[0][1] == errors[0][3] == ""


def windowed(rank: int, world: int) -> None:
    os.environ["FLUX_WINDOW_MB"] = "0"  # two tiles at a time, the least
    try:
        large(rank, world, "ab")
    finally:
        del os.environ["FLUX_WINDOW_MB"]


def test_smallest_window_gives_correct_results() -> None:
    run_ranks(2, windowed)


@pytest.mark.parametrize(("window", "most"), [(0, 2), (100, 2), (160, 4), (10**6, 6)])
def test_bytes_in_flight_stay_within_the_window(window: int, most: int) -> None:
    from flux.transport.network import _Job, _Link
    from flux.transport.network_piece import NetworkPiece, Posted

    link: Any = SimpleNamespace(recorder=None, _window=window, _progress=0.0)
    pieces = [NetworkPiece(torch.empty(40, dtype=torch.uint8), None)] * 6
    under_way: list[int] = [0]

    def post(piece: NetworkPiece, epoch: int, number: int) -> Posted:
        under_way.append(under_way[-1] + 1)
        message: Any = SimpleNamespace(wait=lambda: None)
        return Posted(message, piece, piece.tensor, 0)

    def complete(piece: NetworkPiece, memory: torch.Tensor, epoch: int) -> None:
        under_way.append(under_way[-1] - 1)

    _Link._flow(link, _Job(1, pieces), Work.receive, post, complete)
    assert max(under_way) == most and under_way[-1] == 0


def without_shared_memory(rank: int, world: int) -> None:
    for op_name in OPS:
        problem = Problem(op_name, 30, (7,), 9)
        with problem.build(transport="send_recv") as op:
            assert op.topology == Topology(world, 1, 1)
            assert sorted(op._backend.network.bytes_sent) == [r for r in range(world) if r != rank]
            Inputs(problem, 30, world, seed=1).call_and_check(op, rank)


@pytest.mark.parametrize("world", [2, 3])
def test_transport_send_recv_needs_no_shared_memory(world: int) -> None:
    run_ranks(world, without_shared_memory)


def one_node_without_shared_memory(rank: int, world: int) -> None:
    """The topology says how rows travel, not that memory can be pulled from."""
    for op_name in OPS:
        problem = Problem(op_name, 30, (8,), 8)
        for tuning in ("cache", "off", Knobs(path="medium")):
            for topology in (Topology.flat(world), Topology(world, 1, 1)):
                for transport in ("send_recv", "shm"):
                    with problem.build(
                        tuning=tuning, transport=transport, topology=topology, timeout_s=10.0
                    ) as op:
                        Inputs(problem, 30, world, seed=1).call_and_check(op, rank)


def test_topology_does_not_say_who_shares_memory() -> None:
    run_ranks(2, one_node_without_shared_memory)


def sent_between_hosts(rank: int, world: int, hosts: str, order: str) -> dict[str, int]:
    sent = {}
    with on_host(hosts[rank]):
        for op_name in OPS:
            problem = Problem(op_name, 48, (10,), 6 * world)
            with problem.build(tuning=Knobs(order=order)) as op:
                Inputs(problem, 48, world, seed=1).call_and_check(op, rank, "two_levels")
                sent[op_name] = sum(op._backend.network.bytes_sent.values())
    return sent


@pytest.mark.parametrize("hosts", ["abab", "aabbc", *more("ab", "aab", "aaab", "aabb")])
def test_hierarchical_order_sends_the_fewest_bytes(hosts: str) -> None:
    """And direct sends what it must: every rank to every rank on another host."""
    world, others = len(hosts), len(set(hosts)) - 1
    least = {"ag_gemm": 48 * 6 * world * 4 * others, "gemm_rs": 48 * 10 * 4 * others}
    least["gemm_ar"] = 2 * least["gemm_rs"]
    for order in ("hierarchical", "direct"):
        by_rank = run_ranks(world, sent_between_hosts, hosts, order)
        total = {op: sum(sent[op] for sent in by_rank) for op in OPS}
        if order == "hierarchical":
            assert total == least
        elif world > len(set(hosts)):
            assert all(total[op] > least[op] for op in OPS)


# -- refused and disagreeing calls -----------------------------------------------------------------


def refusals(rank: int, world: int, hosts: str, tuning: Knobs | str) -> None:
    with on_host(hosts[rank]), AGGemm(max_m=8, n=2 * world, k=3, tuning=tuning) as op:
        x, w = torch.ones(2, 3), torch.ones(2, 3)
        good = op(x, w)
        with pytest.raises((ValueError, TypeError), match="float64"):
            op(x.double() if rank == 0 else x, w)
        assert torch.equal(op(x, w), good)
        for smaller in (1, 0):
            with pytest.raises(ValueError, match=r"ranks disagree: rank \d has M = "):
                op(x, w, m=2 * world - (rank == smaller))
            assert torch.equal(op(x, w), good)


@pytest.mark.parametrize("hosts", ["ab", "aab", "abab"])
def test_a_refusal_raises_on_all_ranks(hosts: str) -> None:
    """So few rows take path one_shot, if the op may choose, which compares calls by itself."""
    for tuning in ("cache", Knobs()):
        run_ranks(len(hosts), refusals, hosts, tuning)


def constructions(rank: int, world: int) -> None:
    with on_host("ab"[rank]):
        with pytest.raises(ValueError, match="2 hosts"):
            GemmRS(max_m=4, n=4, k=4, transport="shm")
        with pytest.raises(ValueError, match="push"):
            GemmRS(max_m=4, n=4, k=4, tuning=Knobs(direction="pull"))


def test_options_that_hosts_do_not_support_are_refused() -> None:
    run_ranks(2, constructions)


def functional(rank: int, world: int, hosts: str) -> None:
    with on_host(hosts[rank]):
        group = dist.group.WORLD
        assert group is not None
        x, w = torch.randn(3, 4), torch.randn(4, 5)
        x_full, (y,) = flux.ops.fused_all_gather_matmul(x, [w], 0, group.group_name)
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        assert torch.equal(x_full, torch.cat(parts))
        torch.testing.assert_close(y, torch.cat(parts) @ w)
        a = torch.randn(2 * world, 4)
        z = flux.ops.fused_matmul_reduce_scatter(a, w, "sum", 0, group.group_name)
        whole = a @ w
        dist.all_reduce(whole)
        torch.testing.assert_close(z, whole[2 * rank : 2 * rank + 2])
        clear_workspaces()


def gradients(rank: int, world: int, hosts: str) -> None:
    with on_host(hosts[rank]), AGGemm(max_m=4 * world, n=3 * world, k=5) as op:
        x = torch.randn(4, 5, requires_grad=True)
        w = torch.randn(3, 5, requires_grad=True)
        op(x, w).sum().backward()
        columns = w.detach().sum(0)
        dist.all_reduce(columns)
        assert x.grad is not None and w.grad is not None
        torch.testing.assert_close(x.grad, columns.expand(4, 5))
        clear_workspaces()


@pytest.mark.parametrize("body", [functional, gradients])
@pytest.mark.parametrize("hosts", ["aab", *more("ab")])
def test_functional_forms_and_gradients_match_float64(hosts: str, body: Any) -> None:
    run_ranks(len(hosts), body, hosts)


# -- ends ------------------------------------------------------------------------------------------


def open_and_close(rank: int, world: int, hosts: str) -> None:
    problem = Problem("gemm_ar", 8, (4,), 6)
    with on_host(hosts[rank]):
        for round_ in range(12):
            if round_ == 2:
                before = held()
            with problem.build() as op:
                Inputs(problem, 8, world, seed=round_).call_and_check(op, rank, "two_levels")
            dist.barrier()
        gc.collect()
        after = held()
        assert all(after[w] <= before[w] for w in before), (before, after)


@pytest.mark.parametrize("hosts", ["aab", *more("ab")])
def test_closed_ops_release_everything(hosts: str) -> None:
    run_ranks(len(hosts), open_and_close, hosts)


def ends(rank: int, world: int, hosts: str, how: str) -> dict[str, Any]:
    """Let the last rank die, close or stall; return error and time on the others."""
    problem = Problem("gemm_ar" if how == "killed" else "gemm_rs", 12, (4,), 12)
    with on_host(hosts[rank]):
        op = problem.build(timeout_s=60.0 if how == "killed" else 1.5)
        inputs = Inputs(problem, 12, world, seed=1)
        inputs.call_and_check(op, rank, "two_levels")
        dist.barrier()
        if rank == world - 1:
            if how == "killed":  # when the others have entered the call, too
                torch.mm = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
                inputs.call(op, rank)
            elif how == "closes":
                op.close()
            else:
                time.sleep(2.5)
            return {}
        if how == "stalls":
            time.sleep(0.2 * rank)  # rank 0 gives up first, and rank 1 because of that
        began = time.monotonic()
        with pytest.raises(PeerTimeoutError) as told:
            for _ in range(3):
                inputs.call(op, rank)
        took = time.monotonic() - began
        with pytest.raises(RuntimeError, match="is closed"):
            inputs.call(op, rank)
        gc.collect()
        threads = threading.active_count()
        form_again(problem, hosts, rank, world)
        return {"text": str(told.value), "took": took, "threads": threads}


def form_again(problem: Problem, hosts: str, rank: int, world: int) -> None:
    """Form a new group of all ranks except the last, in the same processes."""
    dist.destroy_process_group()
    join_group("again", rank, world - 1)
    with problem.build() as op:
        Inputs(problem, 12, world - 1, seed=2).call_and_check(op, rank, "two_levels")


HOWS = ("killed", "closes", "stalls")
ENDS = list(zip(("aabb", "aab", "abc"), HOWS, strict=True))
if STRESS > 1:
    ENDS = list(itertools.product(("ab", "aab", "abb", "aabb", "abc"), HOWS))


@pytest.mark.parametrize("hosts, how", ENDS)
def test_survivors_raise_in_time(hosts: str, how: str) -> None:
    world = len(hosts)
    with nothing_left_in_shared_memory(), fresh_ranks(world) as ranks:
        ranks.start(ends, hosts, how)
        outcomes = ranks.collect(30)
        for rank, outcome in enumerate(outcomes[:-1]):
            assert outcome is not None and outcome.ok, outcome
            told = outcome.value
            assert told["took"] < (0 if how == "killed" else 1.5) + 2.0 * BUSY, told
            assert re.match(rf"Gemm(RS|AR): rank {rank}, call \d+", told["text"]), told
            assert f"rank {world - 1}" in told["text"], told
            if how == "killed":
                near = hosts[rank] == hosts[-1]
                end = "died (process" if near else f"connection to rank {world - 1} broke"
                assert end in told["text"], told
            assert told["threads"] == 1, told


def gives_up_on_another(rank: int, world: int) -> None:
    """Rank 2 waits for rank 0, which has given up on rank 1."""
    with on_host("abc"[rank]), AGGemm(max_m=6, n=3, k=4, timeout_s=20.0) as op:
        x, weight = torch.ones(2, 4), torch.ones(1, 4)
        op(x, weight)
        dist.barrier()
        if rank == 0:
            op._backend.close(failed=True, culprit=1)
        elif rank == 2:
            with pytest.raises(PeerTimeoutError, match="rank 0 gave up on rank 1"):
                op(x, weight)
        dist.barrier()


def test_a_rank_that_gives_up_names_the_culprit() -> None:
    run_ranks(3, gives_up_on_another, timeout=60.0, fresh=True)


SCRIPT = """
import os, sys, torch, torch.distributed as dist, flux
rank = int(sys.argv[1])
os.environ["FLUX_HOST"] = "ab"[rank]
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
op = flux.AGGemm(max_m=4, n=2, k=3)
assert torch.equal(op(torch.ones(2, 3), torch.ones(1, 3)), torch.full((4, 1), 3.0))
print("done", flush=True)
"""


def test_a_process_may_end_without_closing(tmp_path: Path) -> None:
    ended = programs(SCRIPT, tmp_path, [(str(rank), str(tmp_path / "store")) for rank in range(2)])
    for one in ended:
        assert one.returncode == 0 and one.stdout == "done\n", one.stderr


RESTARTING = """
import os, signal, sys, time, torch, torch.distributed as dist, flux
rank, folder, hosts, restarted = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "again"
os.environ["FLUX_HOST"], world = hosts[rank], len(hosts)

def generation(name, timeout_s):
    store = dist.FileStore(f"{folder}/{name}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    op = flux.GemmAR(max_m=8, n=5, k=3 * world, timeout_s=timeout_s)
    check(op, 8)
    return op

def check(op, m):
    x = torch.full((m, 3), rank + 1.0)
    total = 3.0 * world * (world + 1) / 2
    assert torch.equal(op(x, torch.ones(5, 3)), torch.full((m, 5), total))

if not restarted:
    op = generation("first", 10.0)  # not waited for: a death is noticed at once
    dist.barrier()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in range(3):
            check(op, 7)
        raise SystemExit("the calls did not notice")
    except flux.PeerTimeoutError:
        print(f"noticed {time.monotonic() - began:.2f}", flush=True)
    dist.destroy_process_group()
op = generation("second", 20.0)  # the restarted rank imports torch first
for m in range(1, 9):
    check(op, m)
op.close()
print("done", flush=True)
"""


@pytest.mark.parametrize("hosts", ["aab", "abb", *more("ab")])
def test_a_rank_that_starts_again_joins_the_survivors(hosts: str, tmp_path: Path) -> None:
    world = len(hosts)

    script = tmp_path / "restarting.py"
    script.write_text(RESTARTING)

    def start(rank: int, how: str) -> tuple[Any, Path]:
        folder = tmp_path / f"{rank}-{how}"
        folder.mkdir()
        command = [str(script), str(rank), str(tmp_path), hosts, how]
        return start_forked_command(command, folder), folder

    with nothing_left_in_shared_memory():
        ranks = [start(rank, "first") for rank in range(world)]
        try:
            victim, _ = ranks[-1]
            victim.join(60)
            assert victim.exitcode == -signal.SIGKILL
            ranks[-1] = start(world - 1, "again")
            for rank, (process, folder) in enumerate(ranks):
                process.join(60)
                assert process.exitcode == 0, (folder / "err").read_text()
                lines = (folder / "out").read_text().splitlines()
                assert lines[-1] == "done", lines
                if rank < world - 1:
                    assert float(lines[0].removeprefix("noticed ")) < 1.5 + 2.0, lines
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def receives_first(rank: int, world: int, hosts: str) -> None:
    """gloo tells a sender over the same connection that a receive is posted: behind tiles that
    leave by it, that would arrive when they are through."""
    with on_host(hosts[rank]):
        for op_name in OPS:
            problem = Problem(op_name, 192, (512,), 512)
            with problem.build(tuning=Knobs(comm_tile_rows=32)) as op:
                network = op._backend.network
                posted: list[tuple[int, str]] = []
                channel = network._channel

                class Noting:
                    def send(self, tensor: torch.Tensor, peer: int) -> Any:
                        posted.append((peer, "send"))  # noqa: B023
                        return channel.send(tensor, peer)  # noqa: B023

                    def receive(self, tensor: torch.Tensor, peer: int) -> Any:
                        time.sleep(0.002)  # the sender would be first
                        posted.append((peer, "receive"))  # noqa: B023
                        return channel.receive(tensor, peer)  # noqa: B023

                    send_header = channel.send_header
                    receive_header = channel.receive_header

                for link in network._links:
                    link._channel = Noting()
                Inputs(problem, 192, world, seed=1).call_and_check(op, rank)
                for link in network._links:
                    link._channel = channel
                    own = [what for peer, what in posted if peer == link.peer]
                    assert "send" in own and "receive" in own, (op_name, own)
                    assert own == sorted(own), (op_name, link.peer, own)


@pytest.mark.parametrize("hosts", ["ab", "abc"])
def test_receives_are_posted_before_anything_is_sent(hosts: str) -> None:
    run_ranks(len(hosts), receives_first, hosts)


def _peer_fails_in_the_next_call(rank: int, world: int, op_name: str) -> None:
    """Rank 1 breaks its connections when its part of a call is done and rank 0 has all rows."""
    problem = Problem(op_name, 24, (16,), 8)
    with on_host("ab"[rank]):
        op = problem.build(tuning=Knobs(path="fused"), timeout_s=30.0)
    network = op._backend.network
    store = cast(Any, distributed_c10d)._get_default_store()
    if rank == 0:
        finish = network.finish

        def finish_late() -> tuple[int, str] | None:
            for job in network._links[0]._current:
                assert job.done.wait(30.0)
            store.set("all is here", "")
            store.wait(["broken"], timedelta(seconds=30))
            receiver = network._links[0]._threads[1]
            receiver.join(30.0)
            assert not receiver.is_alive() and network._links[0].problem
            failure: tuple[int, str] | None = finish()
            return failure

        network.finish = finish_late
    inputs = Inputs(problem, 24, world, 3, bias=False)
    inputs.call_and_check(op, rank)
    if rank == 1:
        store.wait(["all is here"], timedelta(seconds=30))
        op._backend.close(failed=True)
        store.set("broken", "")
    else:
        with pytest.raises(PeerTimeoutError):
            inputs.call(op, rank)
    op.close()
    dist.barrier()


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_call_with_all_rows_received_survives_a_peer_failure(op: str) -> None:
    run_ranks(2, _peer_fails_in_the_next_call, op, timeout=60.0, fresh=True)


def _fail(of: object, backend: object) -> None:
    if backend is not None:
        raise OSError("no")


def _interrupted_end(rank: int, world: int, where: str) -> None:
    """Ctrl-C arrives while an op is closed, or given up, whose threads and memory are left then."""
    with on_host("ab"[rank]):
        AGGemm(max_m=8, n=8, k=8).close()
        before = held()
        break_off = Network._break_off
        interrupts = [KeyboardInterrupt()]

        def interrupted(network: Network) -> None:
            if interrupts:
                raise interrupts.pop()
            break_off(network)

        with mock.patch.object(Network, "_break_off", interrupted):
            if where == "close":
                op = AGGemm(max_m=8, n=8, k=8)
                with pytest.raises(KeyboardInterrupt):
                    op.close()
                assert held() != before, "nothing was left to give back"
                op.close()
                assert op.closed
            else:
                with (
                    mock.patch("flux.ops.base.UnfusedBackend.watched", property(None, _fail)),
                    pytest.raises((OSError, KeyboardInterrupt)),
                ):
                    AGGemm(max_m=8, n=8, k=8)
        assert not interrupts
        gc.collect()
        after = settled(before)
        assert after == before, f"{before} -> {after}"
    dist.barrier()


@pytest.mark.parametrize("where", ["close", "construction"])
def test_interrupted_close_is_completed_later(where: str) -> None:
    run_ranks(2, _interrupted_end, where, timeout=60.0, fresh=True)

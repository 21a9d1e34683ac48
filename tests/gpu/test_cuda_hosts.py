"""The CUDA backend on several hosts: processes with an emulated device each. Those of a host share
memory, and the others send and receive by an emulated NCCL (emulated_nccl.cpp)."""

from __future__ import annotations

import gc
import itertools
import os
import random
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import flux
from emulated import EmulatedDevice
from emulated_processes import Emulated, run
from flux import Knobs, PeerTimeoutError, Topology
from flux.core.errors import PeerFailedError
from flux.ops import executor
from flux.transport import nodes
from flux.transport.placement import RankPlace
from flux.transport.virtual import VirtualWorld
from flux.ulysses import AllToAllGemm, GemmAllToAll
from harness import STRESS, more
from matrix import OPS
from op_cases import Case, random_cases
from reference import Inputs, Problem
from ulysses_cases import UlyssesCase, UlyssesInputs
from virtual_cases import check_same_bits, checked_calls, on_one_device

BF16 = torch.bfloat16


@pytest.fixture
def library(emulator: Path) -> Path:
    return emulator


def _cases(rank: int, world: int, library: Path, cases: list[Case], lanes: int) -> int:
    here = Emulated(rank, library, rank // lanes)
    calls = 0
    for case in (on_one_device(here.device, c, world) for c in cases):
        here.device.set_delay(int(case.delay_s * 1e7))
        with case.problem.build(tuning=case.knobs, backend="cuda") as op:
            for call in case.calls:
                call.check(case.problem, op, rank, world, "two_levels")
                calls += 1
    here.close()
    return calls


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("hosts", "lanes"), [(2, 2), *more((2, 1), (3, 1))])
def test_random_cases(library: Path, op: str, hosts: int, lanes: int) -> None:
    world = hosts * lanes
    cases = [
        Case(c.problem, c.knobs, c.calls, c.delay_s)
        for c in random_cases(70 + OPS.index(op), op, world, 3 * STRESS)
    ]
    assert run(world, _cases, library, cases, lanes) == [sum(len(c.calls) for c in cases)] * world


def _heads(rank: int, world: int, library: Path) -> None:
    here = Emulated(rank, library, rank // 2)
    here.device.set_delay(300)
    for seed, lengths in enumerate(((6, 6, 6, 6), (5, 0, 2, 9))):
        case = UlyssesCase(lengths, (8, 4, 4), 8, 16, dtype=BF16, bias=seed == 0)
        inputs = UlyssesInputs(case, seed)
        for kind, given, check in (
            (GemmAllToAll, inputs.projected(rank), inputs.check_projected),
            (AllToAllGemm, inputs.given(rank), inputs.check_output),
        ):
            for tuning in ("cache", Knobs(path="unfused"), Knobs(comm_tile_rows=2)):
                with case.build(kind, backend="cuda", tuning=tuning) as op:
                    outs = [op(*given) for _ in range(3)]
                    op.wait()
                    here.device.finish()
                for out in outs:
                    check(out, rank)
    here.close()


def test_heads_cross_between_hosts(library: Path) -> None:
    run(4, _heads, library)


def _everything(op: str, world: int) -> tuple[Problem, list[Inputs]]:
    rng = random.Random(5)
    p = Problem(op, 33, (13,), 10, BF16)
    return p, [Inputs(p, rng.randint(1, 33), world, seed=s) for s in range(40)]


def _stress(rank: int, world: int, library: Path, op: str) -> list[list[torch.Tensor]]:
    """Back to back, M changing; results by call. One host, where nobody is to share memory but the
    ranks of a node."""
    here = Emulated(rank, library, 0)
    here.device.set_delay(500)
    p, everything = _everything(op, world)
    options = {"transport": "send_recv", "topology": Topology(2, 1, world // 2)}
    with p.build(tuning=Knobs(comm_tile_rows=3), backend="cuda", **options) as made:
        outs = [inputs.call(made, rank) for inputs in everything]
        made.wait()
    for inputs, got in zip(everything, outs, strict=True):
        inputs.check(got, rank, "two_levels")
    here.close()
    return outs


def _pairs(rank: int, world: int, library: Path) -> None:
    """Four GPUs of one host, of which 0 and 1, and 2 and 3, are joined by a bridge."""
    here = Emulated(rank, library, 0)
    reaches = {f"gpu {other}": other // 2 == rank // 2 for other in range(world)}
    executor.place_here = lambda gpu: RankPlace("here", f"gpu {rank}", reaches)  # type: ignore
    p = Problem("gemm_rs", 9, (8,), 8, BF16)
    with p.build(backend="cuda") as op:
        assert op.topology == Topology(2, 1, 2), "two nodes, though nobody has said so"
        Inputs(p, 9, world, seed=1).call_and_check(op, rank, "two_levels")
    here.close()


def test_gpus_without_p2p_form_separate_nodes(library: Path) -> None:
    run(4, _pairs, library)


@pytest.mark.parametrize("op", OPS)
def test_processes_give_the_bits_of_virtual_nodes(library: Path, op: str) -> None:
    world = 4
    processes = run(world, _stress, library, op)
    p, everything = _everything(op, world)
    device = EmulatedDevice(library)
    ranks, knobs = VirtualWorld(world, device, nodes=2), Knobs(comm_tile_rows=3)
    by_call = checked_calls(ranks, p, everything, "two_levels", tuning=knobs)
    device.close()
    check_same_bits(processes, list(zip(*by_call, strict=True)))


def _alone(rank: int, world: int, library: Path) -> None:
    """transport='send_recv' on one host: every rank is a node."""
    here = Emulated(rank, library, 0)
    for op in OPS:
        p, everything = _everything(op, world)
        with p.build(backend="cuda", transport="send_recv") as made:
            assert made._backend.nodes == world
            for inputs in everything[:3]:
                inputs.call_and_check(made, rank, "two_levels")
    here.close()


def test_ranks_without_shared_memory(library: Path) -> None:
    run(3, _alone, library)


def _late(rank: int, world: int, library: Path, op: str, how: str) -> None:
    """Make a call on rank 0 only."""
    here = Emulated(rank, library, rank)
    p = Problem(op, 16, (8,), 8, BF16)
    made = p.build(backend="cuda", timeout_s=0.5)
    begin = time.monotonic()
    if rank == 0:
        Inputs(p, 16, world, seed=1).call(made, rank)
        if how == "wait":
            with pytest.raises(PeerTimeoutError, match="rank 0"):
                made.wait()
        made.close()
        assert time.monotonic() - begin < 10
    dist.barrier()
    made.close()
    with p.build(backend="cuda", timeout_s=20) as again:
        Inputs(p, 16, world, seed=2).call_and_check(again, rank, "two_levels")
    here.close()


@pytest.mark.parametrize(
    ("op", "how"),
    [("gemm_ar", "wait"), ("ag_gemm", "close"), *more(*itertools.product(OPS, ("wait", "close")))],
)
def test_a_rank_that_does_not_call_is_noticed(library: Path, op: str, how: str) -> None:
    run(2, _late, library, op, how)


def _does_not_connect(rank: int, world: int, library: Path) -> None:
    """A rank that dies while the op is built."""
    here = Emulated(rank, library, rank)
    p = Problem("gemm_rs", 16, (8,), 8, BF16)
    if rank == 1:
        nodes._C = Broken  # type: ignore
    with pytest.raises(PeerTimeoutError if rank == 0 else ZeroDivisionError):
        p.build(backend="cuda", timeout_s=0.5)
    nodes._C = flux._C
    here.close()


class Broken:
    """Takes the place of flux._C in flux.transport.nodes."""

    PeerLostError = flux._C.PeerLostError

    @staticmethod
    def NcclRemote(**_: object) -> None:
        raise ZeroDivisionError


def test_a_rank_that_does_not_connect_is_noticed(library: Path) -> None:
    run(2, _does_not_connect, library)


STEPS = {
    "meets": "flux.ops.base.places_of",
    "opens": "flux.ops.base.open_gpus",
    "joins its node": "flux.transport.nodes.SymmMem",
    "looks for multicast": "flux.transport.symm_mem._has_multicast",
    "chooses": "flux.ops.base.choice.choose",
    "loads kernels": "flux.backends.cuda.backend.CudaBackend._load",
    "allocates": "flux.transport.symm_mem._map_everywhere",
    "zeroes": "emulated.EmulatedDevice.synchronize",
    "connects nodes": "flux.transport.nodes.Nodes.remote",
    "ends": "flux.backends.cuda.backend.CudaBackend._native",
}


def _fails_alone(rank: int, world: int, library: Path, culprit: int) -> list[tuple[str, str]]:
    """One rank fails at each step in turn, on a group that waits half an hour."""
    here = Emulated(rank, library, rank // 2)
    group = dist.new_group(timeout=timedelta(minutes=30))
    p = Problem("gemm_rs", 16, (8,), 8, BF16)
    heard = []
    for step, target in STEPS.items():
        cause = ZeroDivisionError(f"while it {step}")
        begin = time.monotonic()
        fails = mock.patch(target, side_effect=cause) if rank == culprit else nullcontext()
        with fails, pytest.raises((ZeroDivisionError, PeerFailedError)) as raised:
            p.build(group, backend="cuda", timeout_s=60)
        assert time.monotonic() - begin < 15, step
        heard.append((step, str(raised.value)))
        del raised, cause, fails  # their tracebacks hold what was built
    gc.collect()
    with p.build(group, backend="cuda") as op:  # both groups are as they were
        Inputs(p, 16, world, seed=1).call_and_check(op, rank, "two_levels")
    here.close()
    return heard


@pytest.mark.parametrize("culprit", [2, *more(1)])
def test_a_failure_on_one_rank_raises_on_all_nodes(library: Path, culprit: int) -> None:
    """Its own node waits for it in a group of the node, the others in that of all."""
    for rank, heard in enumerate(run(4, _fails_alone, library, culprit)):
        for step, text in heard:
            named = f"GemmRS: rank {culprit} failed: ZeroDivisionError: "
            assert text == (named if rank != culprit else "") + f"while it {step}"


def _nccl_fails(rank: int, world: int, library: Path) -> None:
    here = Emulated(rank, library, rank)
    p = Problem("ag_gemm", 16, (8,), 8, BF16)
    for code, error in ((6, PeerTimeoutError), (3, RuntimeError)):
        made = p.build(backend="cuda", timeout_s=1.0)
        if rank == 0:
            here.nccl.emulated_nccl_fail(code)
            with pytest.raises(error, match=r"ncclGroupEnd failed: emulated failure"):
                Inputs(p, 16, world, seed=1).call(made, rank)
            assert made.closed
        dist.barrier()
        made.close()
    here.close()


def test_errors_of_nccl_are_raised(library: Path) -> None:
    run(2, _nccl_fails, library)


def _refused(rank: int, world: int, library: Path) -> None:
    here = Emulated(rank, library, rank // 2)
    p = Problem("gemm_rs", 16, (8,), 8, BF16)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"transport": "symm_mem"}, "on 2 hosts, and transport='symm_mem' serves one"),
        (
            {"topology": Topology.flat(world)},
            "share memory in 2 nodes of 2, and the topology has 1",
        ),
        ({"topology": Topology(4, 1, 1)}, "share memory in 2 nodes of 2, and the topology has 4"),
        (
            {"tuning": Knobs(reduce="in_flight")},
            "in_flight needs memory that all ranks can address",
        ),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            p.build(backend="cuda", **options)
    here.device.identity = "the same"
    with pytest.raises(ValueError, match="ranks 0 and 1 are both on the same"):
        p.build(backend="cuda")
    os.environ["FLUX_HOST"] = str(rank % 2)
    with pytest.raises(
        ValueError, match="the same number of ranks on each host, numbered one host"
    ):
        p.build(backend="cuda")
    here.close()


def test_options_unsupported_on_several_hosts_raise(library: Path) -> None:
    run(4, _refused, library)


def _no_device(rank: int, world: int) -> None:
    os.environ["FLUX_HOST"] = str(rank)
    with pytest.raises(ValueError, match="rank 0: backend cuda needs a CUDA device"):
        flux.AGGemm(max_m=8, n=8, k=8, dtype=BF16, backend="cuda")


def test_host_without_devices_raises() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    run(2, _no_device)


def test_missing_nccl_library_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "NCCL", "libnosuchnccl.so.2")
    assert "ranks that share no memory need NCCL: libnosuchnccl.so.2" in nodes.lacks_nccl()
    with pytest.raises(RuntimeError, match="cannot open the NCCL library"):
        flux._C.nccl_unique_id("libnosuchnccl.so.2")
    with pytest.raises(RuntimeError, match="the NCCL library has no ncclGetUniqueId"):
        flux._C.nccl_unique_id("libc.so.6")

"""The CUDA backend in several processes: each has an emulated device of its own, and their memory
is shared, as GPUs of one host share theirs. On real GPUs: test_gpu_processes.py."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flux
from emulated_processes import apart_from_cpus, emulate, run
from flux import PeerDiedError, PeerTimeoutError
from flux.backends.cuda.waits import GRACE_S
from flux.layers import ColumnParallelLinear, RowParallelLinear, UlyssesAttention, close_pools
from flux.transport import symm_mem
from flux.transport.watch import LOOK_S
from harness import BUSY, STRESS, fresh_ranks
from matrix import OPS
from op_cases import Case, random_cases
from ptx_machine.gpu import LIBRARY
from reference import Inputs, Problem
from virtual_cases import on_one_device

BF16 = torch.bfloat16


@pytest.fixture
def library(emulator: Path) -> Path:
    return emulator


def _cases(rank: int, world: int, library: Path, cases: list[Case]) -> int:
    device = emulate(rank, library)
    calls = 0
    for case in (on_one_device(device, c, world) for c in cases):
        device.set_delay(int(case.delay_s * 1e7))
        options = {"tuning": case.knobs, "topology": case.topology, "backend": "cuda"}
        with case.problem.build(**options) as op:
            for call in case.calls:
                call.check(case.problem, op, rank, world)
                calls += 1
    device.set_delay(0)
    assert not device.error()
    device.close()
    assert device.streams() == 0
    return calls


def _trained(rank: int, world: int, sequence: bool) -> list[torch.Tensor]:
    """Results and gradients of an MLP, of steps with several M."""
    torch.manual_seed(0)
    whole = torch.nn.Linear(12, 16), torch.nn.Linear(16, 12)
    up, down = (
        kind.from_linear(linear.bfloat16(), sequence_parallel=sequence)
        for kind, linear in zip((ColumnParallelLinear, RowParallelLinear), whole, strict=True)
    )
    seen = []
    for m in (24, 14, 2):
        x = torch.randn(m, 12).bfloat16()
        x = x[rank * m // world : (rank + 1) * m // world] if sequence else x
        x.requires_grad_()
        z = down(torch.relu(up(x)))
        z.backward(torch.linspace(-1, 1, z.numel()).view_as(z).bfloat16())
        of_step = [z.detach(), x.grad, *(p.grad for p in (*up.parameters(), *down.parameters()))]
        seen += [tensor.clone() for tensor in of_step if tensor is not None]
        up.zero_grad()
        down.zero_grad()
    close_pools()
    return seen


def _attended(rank: int, world: int, kv_heads: int) -> list[torch.Tensor]:
    """Results and gradients of attention whose ranks share the sequence."""
    torch.manual_seed(0)
    sizes = {"kv_heads": kv_heads, "head_dim": 8, "max_tokens": 2 * 24, "bias": True}
    attention = UlyssesAttention(24, world, **sizes, dtype=BF16)  # type: ignore[arg-type]
    seen = []
    for parts in ([24 // world] * world, [24 // world - 1, *[1] * (world - 1)]):
        own = slice(sum(parts[:rank]), sum(parts[: rank + 1]))
        x = torch.randn(2, sum(parts), 24).bfloat16()[:, own].requires_grad_()
        y = attention(x, parts)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).bfloat16())
        of_step = [y.detach(), x.grad, *(p.grad for p in attention.parameters())]
        seen += [tensor.clone() for tensor in of_step if tensor is not None]
        attention.zero_grad()
    attention.close()
    close_pools()
    return seen


@pytest.mark.parametrize("sequence", [True, False])
def test_layers_train_as_on_cpus(library: Path, sequence: bool) -> None:
    """A backward multiplies by weights in the other order, with kernels of its own."""
    for of_rank in run(2, apart_from_cpus, library, None, 2, _trained, sequence):
        assert len(of_rank) == 18 and max(of_rank) < 0.01, of_rank


@pytest.mark.parametrize(
    ("world", "hosts", "kv_heads"), [(2, 1, 2), (4, 1, 2), (2, 1, 1), (4, 2, 2)]
)
def test_attention_of_parts_of_a_sequence_trains_as_on_cpus(
    library: Path, world: int, hosts: int, kv_heads: int
) -> None:
    ranks = run(world, apart_from_cpus, library, None, world // hosts, _attended, kv_heads)
    for of_rank in ranks:
        assert len(of_rank) == 12 and max(of_rank) < 0.02, of_rank


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 4])
def test_random_cases(library: Path, op: str, world: int) -> None:
    cases = random_cases(30 + OPS.index(op), op, world, 2 * STRESS)
    assert run(world, _cases, library, cases) == [sum(len(c.calls) for c in cases)] * world


def _checked_capture(rank: int, world: int, library: Path) -> None:
    os.environ["FLUX_CHECK"] = "1"
    device = emulate(rank, library)
    p = Problem("gemm_rs", 8, (8,), 8, BF16)
    with p.build(backend="cuda") as op:
        inputs = Inputs(p, 8, world, seed=1)
        with device.capture() as graph, pytest.raises(ValueError, match="unset FLUX_CHECK"):
            inputs.call(op, rank)
        graph.close()
        inputs.call_and_check(op, rank)
    device.close()


def test_calls_that_are_compared_are_not_captured(library: Path) -> None:
    run(2, _checked_capture, library)


def _no_kernel(rank: int, world: int, library: Path) -> None:
    device = emulate(rank, library)
    if rank == 1:
        device.registry.kernels.clear()
    with pytest.raises(ValueError, match="no built kernel" if rank == 1 else "rank 1 refused"):
        flux.GemmRS(max_m=8, n=8, k=8, dtype=BF16, backend="cuda")


def test_a_rank_without_a_kernel_raises_on_all_ranks(library: Path) -> None:
    run(2, _no_kernel, library)


def _late(rank: int, world: int, kernels: Path) -> None:
    device = emulate(rank, LIBRARY, kernels)
    p = Problem("gemm_rs", 16, (16,), 16, BF16)
    op = p.build(backend="cuda", timeout_s=0.5)
    if rank == 0:
        Inputs(p, 16, world, seed=1).call(op, rank)
        with pytest.raises(PeerTimeoutError, match=r"rank 0 waited more than 0\.5 s"):
            op.wait()
    dist.barrier()
    if rank == 1:
        with pytest.raises(PeerTimeoutError, match="rank 1: rank 0 gave up in call 1"):
            op.wait()
    op.close()
    device.close()


def test_a_rank_that_does_not_call_is_noticed(ptx_kernels: Path) -> None:
    run(2, _late, ptx_kernels)


def _dies(rank: int, world: int, kernels: Path, when: str) -> dict[str, Any]:
    """The last rank is killed before its second call; when the others wait, or have yet to call."""
    emulate(rank, LIBRARY, kernels)
    p = Problem("gemm_rs", 24, (24,), 24, BF16)
    op = p.build(backend="cuda", timeout_s=60.0)
    inputs = Inputs(p, 24, world, seed=1)
    inputs.call(op, rank)
    op.wait()
    dist.barrier()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    process = op._backend.watch._memory.processes
    if when == "before":
        while not process.ended(world - 1):
            time.sleep(0.01)
        time.sleep(LOOK_S)
    began = time.monotonic()
    with pytest.raises(PeerDiedError) as raised:
        inputs.call(op, rank)
        assert when == "inside", "the call began without a rank"
        op.wait()
    assert op.closed
    return {"text": str(raised.value), "took": time.monotonic() - began}


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_rank_that_dies_is_noticed_at_once(ptx_kernels: Path, when: str) -> None:
    with fresh_ranks(3) as ranks:
        ranks.start(_dies, ptx_kernels, when)
        for rank, outcome in enumerate(ranks.collect(60)[:-1]):
            assert outcome is not None and outcome.ok, outcome
            words = rf"GemmRS: rank {rank}, .* rank 2 died \(process {ranks.pids[2]} ended\)"
            assert re.match(words, outcome.value["text"]), outcome.value
            assert outcome.value["took"] < 3.0 * BUSY, outcome.value


def _done_and_gone(rank: int, world: int, library: Path) -> None:
    device = emulate(rank, library)
    p = Problem("gemm_rs", 16, (8,), 8, BF16)
    op = p.build(backend="cuda", timeout_s=60.0)
    inputs = Inputs(p, 16, world, seed=1)
    got = inputs.call(op, rank)
    if rank == 1:
        op.close()
        os._exit(0)
    process = op._backend.watch._memory.processes

    def other_work() -> None:
        while not process.ended(1):
            time.sleep(0.01)
        time.sleep(2 * GRACE_S)

    device.enqueue(other_work)
    op.wait()
    inputs.check(got, rank)
    op.close()
    device.close()


def test_a_rank_that_closed_the_op_may_end(library: Path) -> None:
    """Although the stream of another one is busy for long afterwards."""
    with fresh_ranks(2) as ranks:
        ranks.start(_done_and_gone, library)
        outcome = ranks.collect(60)[0]
        assert outcome is not None and outcome.ok, outcome


def _in_another_order(rank: int, world: int, library: Path, backend: str) -> None:
    os.environ["FLUX_CHECK"] = "1"
    if backend == "cuda":
        emulate(rank, library)
    ps = [Problem(op, 8, (8,), 8, BF16) for op in ("ag_gemm", "gemm_rs")]
    ops = [p.build(backend=backend) for p in ps]
    inputs = [Inputs(p, 8, world, seed=1) for p in ps]
    for op, of_op in zip(ops, inputs, strict=True):
        got = of_op.call(op, rank)
        op.wait()
        of_op.check(got, rank)
    first = rank % 2
    with pytest.raises(ValueError, match=r"different calls: rank 1 call 2 of GemmRS 2 .*rank 0"):
        inputs[first].call(ops[first], rank)
    for op in ops:
        op.close()
    refusing = ps[1].build(backend=backend)
    x, weight, bias = inputs[1].local(rank)
    with pytest.raises(ValueError, match="weight must be" if rank == 0 else "rank 0 refused"):
        refusing(x, weight[:3] if rank == 0 else weight, bias)
    got = inputs[1].call(refusing, rank)
    refusing.wait()
    inputs[1].check(got, rank)
    refusing.close()


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_ranks_that_call_ops_in_different_order_raise(library: Path, backend: str) -> None:
    run(2, _in_another_order, library, backend)


def test_the_backend_must_have_a_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    run(2, _without_device)


def _without_device(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="rank 0: backend cuda needs a CUDA device"):
        flux.AGGemm(max_m=8, n=8, k=8, dtype=BF16, backend="cuda")
    with pytest.raises(ValueError, match=r"backend cuda, transport must be None or 'symm_mem'"):
        flux.AGGemm(max_m=8, n=8, k=8, dtype=BF16, backend="cuda", transport="shm")


def _pair(group: str = "some") -> Any:
    """An exchange of two ranks that say the same."""
    return SimpleNamespace(
        rank=0,
        world=2,
        label="AGGemm",
        group=SimpleNamespace(group_name=group),
        all_gather=lambda value: [value] * 2,
    )


def test_symmetric_memory_does_not_come_from_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's pool hands out freed blocks again, others on other ranks (pytorch #190977)."""
    asked = []

    class Direct:
        @staticmethod
        def empty_strided_p2p(
            size: Any, stride: Any, dtype: torch.dtype, device: Any
        ) -> torch.Tensor:
            asked.append((*size, *stride))
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def rendezvous(own: torch.Tensor, group: str) -> Any:
        assert group == "some" and own.storage_offset() == 0
        return SimpleNamespace(get_buffer=lambda rank, size, dtype: own.view(dtype).view(size))

    def pooled(*_: object, **__: object) -> None:
        raise AssertionError("memory of torch's pool")

    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory", Direct)
    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", rendezvous)
    monkeypatch.setattr("torch.distributed._symmetric_memory.empty", pooled)
    device = SimpleNamespace(torch_device=torch.device("cpu"))
    _, buffers = symm_mem._map_everywhere(_pair(), device, 512)  # type: ignore[arg-type]
    assert asked == [(512, 1)] and [b.numel() for b in buffers] == [512, 512]


@pytest.mark.parametrize("apart", [False, True])
def test_ranks_that_share_a_gpu_try_no_multicast(
    monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """A device cannot be in a multicast group twice, and torch raises."""
    attempts = []

    def mapped(*_: object) -> Any:
        attempts.append(True)
        return (None, SimpleNamespace(multicast_ptr=1)), []

    monkeypatch.setattr(symm_mem, "_has_multicast", lambda device: True)
    monkeypatch.setattr(symm_mem, "_map_everywhere", mapped)
    exchange = _pair()
    if apart:
        exchange.all_gather = lambda value: ["gpu", "another"] if value == "gpu" else [value] * 2
    device = SimpleNamespace(identity="gpu", sm_count=8)
    assert symm_mem.SymmMem(exchange, device).multicast is apart  # type: ignore[arg-type]
    assert bool(attempts) is apart

"""One rank on the GPU, its peers' memory in the host: on the emulated device, whose streams are
threads. What is judged is the result of the real rank, and what its peers were sent.

Tests that make hundreds of calls have stand-in kernels. More with flux's: test_gpu_loopback.py.
"""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch

from emulated import EmulatedDevice
from flux import Knobs
from flux.transport.base import first_signal
from flux.transport.loopback import LoopbackWorld, PinnedPool
from flux.transport.virtual import VirtualWorld
from harness import STRESS
from loopback_cases import call, check_call, provide
from reference import Inputs, Problem
from virtual_cases import check_same_bits, knobs_of, topology_of

BF16 = torch.bfloat16
OPS = ("ag_gemm", "gemm_rs", "gemm_ar")


pytestmark = pytest.mark.usefixtures("poisoned")


def problem(op: str, max_m: int, n: int = 13, k: int = 10, **options: object) -> Problem:
    return Problem(op, max_m, (n,), k, BF16, **options)  # type: ignore[arg-type]


def aligned(op: str, max_m: int) -> Problem:
    """A problem that flux's kernels of the minimal set do on 2, 3, 4 or 8 ranks."""
    return Problem(op, max_m, (192,), 192, BF16)


def call_on_and_on(
    ranks: LoopbackWorld, op: Any, everything: list[Inputs]
) -> list[list[torch.Tensor]]:
    """Make calls back to back; return the results when all are done."""
    outs = [call(ranks, op, inputs) for inputs in everything]
    op.wait()
    return outs


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_random_cases(device: EmulatedDevice, op: str, world: int) -> None:
    rng = random.Random(f"{op} {world}")
    for _ in range(2 * STRESS):
        topology, knobs = topology_of(rng, world), knobs_of(rng, world)
        device.set_delay(rng.choice([0, 1000]))
        p = problem(
            op,
            rng.randint(1, 40),
            rng.randint(world, 30),
            rng.randint(world, 20),
            reduce="sum" if op == "ag_gemm" else rng.choice(["sum", "avg"]),
        )
        with (
            LoopbackWorld(world, device) as ranks,
            p.build(ranks.rank(), tuning=knobs, topology=topology) as built,
        ):
            for seed in range(4):
                m, bias = rng.randint(1, p.max_m), rng.random() < 0.5
                inputs = Inputs(p, m, world, seed, bias=bias)
                check_call(ranks, built, inputs, p.gathers and rng.random() < 0.5)


@pytest.mark.parametrize("order", ["direct", "ring1d", "ring2d", "hierarchical", "numa"])
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_every_order_matches_float64(a100: EmulatedDevice, order: str, direction: str) -> None:
    a100.set_delay(300)
    rng = random.Random(order + direction)
    p = aligned("ag_gemm", 37)
    for world in (4, 8):
        knobs = Knobs(order=order, direction=direction, comm_tile_rows=2)
        with (
            LoopbackWorld(world, a100) as ranks,
            p.build(ranks.rank(), tuning=knobs, topology=topology_of(rng, world)) as built,
        ):
            for seed, m in enumerate((37, 5, 32)):
                inputs = Inputs(p, m, world, seed)
                check_call(ranks, built, inputs, gather=True)


def test_kernels_sum_own_rows(device: EmulatedDevice) -> None:
    p = problem("gemm_rs", 37)
    knobs = Knobs(reduce="in_kernel")
    with LoopbackWorld(4, device) as ranks, p.build(ranks.rank(), tuning=knobs) as built:
        for seed, m in enumerate((37, 5, 32)):
            check_call(ranks, built, Inputs(p, m, 4, seed))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_back_to_back_calls_repeat_bitwise(device: EmulatedDevice, op: str, direction: str) -> None:
    """Nothing waits between calls; M and all inputs change, so buffers are reused at once."""
    world, p = 4, problem(op, 33)
    rng = random.Random(3)
    everything = [Inputs(p, rng.randint(1, 33), world, seed=i) for i in range(25)]
    results = []
    for delay in (0, 1000):
        device.set_delay(delay)
        with LoopbackWorld(world, device) as ranks:
            knobs = Knobs(direction=direction, comm_tile_rows=3)
            with p.build(ranks.rank(), tuning=knobs) as built:
                outs = call_on_and_on(ranks, built, everything)
        for inputs, out in zip(everything, outs, strict=True):
            inputs.check(out, 0)
        results.append(outs)
    check_same_bits([results[0]], [results[1]])


@pytest.mark.parametrize("poison", ["0", "1"])
@pytest.mark.parametrize("direction", ["push", "pull"])
@pytest.mark.parametrize("op", OPS)
def test_buffers_are_free_before_they_are_reused(
    device: EmulatedDevice,
    op: str,
    direction: str,
    poison: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One tile per call, so that a delay lets an agent, or rank 0, run whole calls ahead."""
    monkeypatch.setenv("FLUX_POISON", poison)
    p = problem(op, 8, n=16 if op == "ag_gemm" else 8, k=4)
    everything = [Inputs(p, 8, 2, seed=i) for i in range(100)]
    device.set_delay(3000)
    with (
        LoopbackWorld(2, device) as ranks,
        p.build(ranks.rank(), tuning=Knobs(direction=direction)) as built,
    ):
        outs = call_on_and_on(ranks, built, everything)
    for inputs, out in zip(everything, outs, strict=True):
        inputs.check(out, 0)


@pytest.mark.parametrize("poison", ["0", "1"])
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_peers_receive_the_rows_of_each_call(
    device: EmulatedDevice, direction: str, poison: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the peer holds is kept after every call, in the order of the stream that wrote it."""
    monkeypatch.setenv("FLUX_POISON", poison)
    p = problem("ag_gemm", 8, n=16, k=4)
    everything = [Inputs(p, 8, 2, seed=i) for i in range(100)]
    kept = torch.zeros(len(everything), 4, 4, dtype=BF16)
    device.set_delay(3000)
    with (
        LoopbackWorld(2, device) as ranks,
        p.build(ranks.rank(), tuning=Knobs(direction=direction)) as built,
    ):
        backend = built._backend
        writer = ranks.agents[1] if direction == "pull" else backend.native.copy_stream
        for inputs, rows in zip(everything, kept, strict=True):
            call(ranks, built, inputs)
            device.driver.copy(writer, rows.data_ptr(), backend.data[1], 4 * 4 * 2)
        built.wait()
        ranks.finish(ranks.agents.values())
    for inputs, rows in zip(everything, kept, strict=True):
        assert torch.equal(rows, inputs.x[:4])


def test_pinned_buffers_are_used_again(device: EmulatedDevice) -> None:
    device.set_delay(0)
    p = problem("gemm_rs", 16)
    with LoopbackWorld(2, device) as ranks, p.build(ranks.rank()) as built:
        made = []
        peers = built._backend.peers
        for pool in (peers._sets, peers._words):
            make = pool._make
            pool._make = lambda make=make: made.append(1) or make()
        for seed in range(20):
            inputs = Inputs(p, 16, 2, seed)
            out = call(ranks, built, inputs)
            built.wait()
            ranks.finish(ranks.agents.values())
            inputs.check(out, 0)
        assert len(made) <= 4


def test_closing_gives_the_memory_back(device: EmulatedDevice) -> None:
    device.set_delay(0)
    for op in OPS:
        p = problem(op, 16)
        with LoopbackWorld(2, device) as ranks:
            built = p.build(ranks.rank())
            inputs = Inputs(p, 16, 2, seed=1)
            out = call(ranks, built, inputs)
            peers = built._backend.peers
            held = [*peers.memory.pads, *peers.memory.data, peers._provided.rows, peers.finished]
            memory = [weakref.ref(tensor) for tensor in held]
            del peers, held
            gc.disable()
            try:
                built.close()
                assert [m() for m in memory] == [None] * len(memory)
            finally:
                gc.enable()
            device.finish()
            inputs.check(out, 0)


def test_pool_reuses_finished_buffers_in_order() -> None:
    over = 0
    pool = PinnedPool(lambda: torch.zeros(1), lambda epoch: epoch <= over)
    first, second = pool.take(), pool.take()
    pool.give(first, 1)
    pool.give(second, 2)
    assert pool.take() is not first
    over = 1
    assert pool.take() is first
    assert pool.take() is not second


def test_results_are_correct_when_epochs_wrap(a100: EmulatedDevice) -> None:
    a100.set_delay(300)
    for op in OPS:
        p = aligned(op, 9)
        with LoopbackWorld(3, a100) as ranks, p.build(ranks.rank()) as built:
            start = 2**32 - 3
            built._backend.native.epoch = start
            for pad in built._backend.peers.memory.pads:
                pad[: 2 * 3] = start - 2**32  # entries and 'done'; the status behind them stays
                pad[first_signal(3) :] = start - 2**32
            built._backend.peers.finished.fill_(start - 2**32)
            everything = [Inputs(p, 9 - i % 3, 3, seed=i) for i in range(8)]
            for inputs, out in zip(
                everything, call_on_and_on(ranks, built, everything), strict=True
            ):
                inputs.check(out, 0)


def test_provided_data_stays_for_later_calls(a100: EmulatedDevice) -> None:
    a100.set_delay(300)
    for op in OPS:
        p = aligned(op, 9)
        with LoopbackWorld(2, a100) as ranks, p.build(ranks.rank()) as built:
            inputs = Inputs(p, 9, 2, seed=4)
            provide(ranks, built, inputs)
            outs = [inputs.call(built, 0) for _ in range(3)]
            built.wait()
            for out in outs:
                inputs.check(out, 0)


def test_several_ops_share_a_world(a100: EmulatedDevice) -> None:
    a100.set_delay(300)
    ps = [aligned(op, 20) for op in OPS]
    with LoopbackWorld(3, a100) as ranks:
        ops = [p.build(ranks.rank()) for p in ps]
        everything = [Inputs(p, 17 - i, 3, seed=i) for i in range(2) for p in ps]
        outs = [call(ranks, ops[i % 3], inputs) for i, inputs in enumerate(everything)]
        for op in ops:
            op.wait()
        for inputs, out in zip(everything, outs, strict=True):
            inputs.check(out, 0)
        for op in ops:
            op.close()


def test_call_without_provided_peer_data_raises(device: EmulatedDevice) -> None:
    device.set_delay(0)
    for op in OPS:
        p = problem(op, 16)
        with LoopbackWorld(2, device) as ranks, p.build(ranks.rank()) as built:
            inputs, other = Inputs(p, 16, 2, seed=1), Inputs(p, 15, 2, seed=1)
            with pytest.raises(ValueError, match=r"the peers have no data: .* with M = 16"):
                inputs.call(built, 0)
            provide(ranks, built, inputs)
            with pytest.raises(ValueError, match="provided for M = 16, got a call with M = 15"):
                other.call(built, 0)
            assert built._backend.native.epoch == 0
            inputs.call_and_check(built, 0)


def test_provided_data_is_checked(device: EmulatedDevice) -> None:
    gather, scatter, reduce = (problem(op, 16, n=6, k=4) for op in OPS)
    rows, wide = torch.zeros(8, 4, dtype=BF16), torch.zeros(8, 6, dtype=BF16)
    with LoopbackWorld(2, device) as ranks, LoopbackWorld(2, device) as others:
        op = gather.build(ranks.rank())
        with pytest.raises(ValueError, match=r"M must be in \[1, 16\], got 17"):
            ranks.provide(op, 17, [rows])
        with pytest.raises(ValueError, match=r"rows must be 1 tensors, .* ranks 1 to 1, got 2"):
            ranks.provide(op, 16, [rows, rows])
        with pytest.raises(ValueError, match=r"rows of rank 1 must be \[7, 4\], got \[8, 4\]"):
            ranks.provide(op, 15, [rows])
        with pytest.raises(TypeError, match=r"must be torch.bfloat16, got torch.float32"):
            ranks.provide(op, 16, [rows.float()])
        with pytest.raises(ValueError, match=r"results are for GemmAR, .* got some"):
            ranks.provide(op, 16, [rows], [rows])
        with pytest.raises(ValueError, match="needs an open op of this LoopbackWorld"):
            others.provide(op, 16, [rows])
        op.close()
        with pytest.raises(ValueError, match="needs an open op of this LoopbackWorld"):
            ranks.provide(op, 16, [rows])
        with (
            scatter.build(ranks.rank()) as op,
            pytest.raises(ValueError, match=r"rows of rank 1 must be \[8, 6\], got \[8, 4\]"),
        ):
            ranks.provide(op, 16, [rows])
        with reduce.build(ranks.rank()) as op:
            with pytest.raises(ValueError, match=r"results are for GemmAR, .* got none"):
                ranks.provide(op, 16, [wide])
            with pytest.raises(ValueError, match=r"results of rank 1 must be \[7, 6\]"):
                ranks.provide(op, 15, [wide], [wide])


def test_loopback_world_rejects_other_transports_and_backends(device: EmulatedDevice) -> None:
    p = problem("gemm_rs", 8)
    with LoopbackWorld(2, device) as ranks:
        p.build(ranks.rank(), transport="loopback", backend="cuda").close()
        for options, message in (
            (
                {"transport": "virtual"},
                "a LoopbackWorld and backend cuda, transport must be None or 'loop",
            ),
            ({"backend": "cpu"}, "a rank of a LoopbackWorld, backend must be None or 'cuda'"),
            ({"tuning": Knobs(path="unfused")}, "needs a process group, got a rank of a Loopback"),
            ({"tuning": Knobs(reduce="in_flight")}, "simulated peers do not add"),
        ):
            with pytest.raises(ValueError, match=message):
                p.build(ranks.rank(), **options)
    with pytest.raises(ValueError, match="a loopback world has 2 to 15 ranks, got 1"):
        LoopbackWorld(1, device)
    with (
        VirtualWorld(2, device) as virtual,
        p.build(virtual.rank(0)) as op,
        LoopbackWorld(2, device) as ranks,
        pytest.raises(ValueError, match="needs an open op of this LoopbackWorld"),
    ):
        ranks.provide(op, 8, [torch.zeros(4, 13, dtype=BF16)])

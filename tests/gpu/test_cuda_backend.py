"""The CUDA backend with all ranks on one device: an emulated one here (ptx_machine/gpu), whose
streams are threads, with the same schedules, copies, signals, epochs and flags as on a GPU.

Most tests make hundreds of calls, or need kernels for every dtype and layout: with stand-ins, whose
calls take a millisecond. With flux's kernels: test_gpu.py.
"""

from __future__ import annotations

import gc
import os
import random
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

import flux
from emulated import EmulatedDevice
from flux import Knobs, PeerTimeoutError
from flux.select import kernel as kernel_choice
from flux.transport import device as device_module
from flux.transport.virtual import VirtualWorld
from harness import BUSY, STRESS
from matrix import OPS, every_combination_of_knobs, every_dtype_layout_and_weight_order
from model.recording import ApartWorld
from op_cases import Call, Case, random_cases
from reference import Inputs, Problem, lay_out
from virtual_cases import (
    built,
    call_all,
    check_all,
    check_cases,
    check_same_bits,
    checked_calls,
    finish,
)

BF16 = torch.bfloat16


pytestmark = pytest.mark.usefixtures("poisoned")


def problem(op: str, max_m: int, n: int = 13, k: int = 10, **options: object) -> Problem:
    return Problem(op, max_m, (n,), k, BF16, **options)  # type: ignore[arg-type]


def aligned(op: str, max_m: int) -> Problem:
    """A problem that flux's kernels of the minimal set do on two or three ranks."""
    return Problem(op, max_m, (48,), 48, BF16)


def path_of(nodes: int) -> str:
    """How results are rounded on so many nodes."""
    return "fused" if nodes == 1 else "two_levels"


def check(device: EmulatedDevice, world: int, cases: Sequence[Case]) -> None:
    calls = 0
    for case in cases:
        device.set_delay(int(case.delay_s * 1e7))
        calls += check_cases(device, world, [case])
    assert calls == sum(len(case.calls) for case in cases)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_random_cases(device: EmulatedDevice, op: str, world: int) -> None:
    count = {2: 20, 8: 4}.get(world, 10) * STRESS
    check(device, world, random_cases(10 + OPS.index(op), op, world, count))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 4])
def test_every_combination_of_knobs(device: EmulatedDevice, op: str, world: int) -> None:
    check(device, world, every_combination_of_knobs(op, world)[:: world // 2])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("path", ["fused", "medium"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_dtype_layout_and_weight_order(
    device: EmulatedDevice, op: str, world: int, path: str
) -> None:
    check(device, world, every_dtype_layout_and_weight_order(op, path))


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
@pytest.mark.parametrize("apart", [False, True], ids=["one device", "a device each"])
def test_partials_that_copies_take_to_their_owners(
    device: EmulatedDevice, op: str, apart: bool
) -> None:
    """A GEMM, or one for each owner's rows; tiles and chunks that do not fit each other."""
    p = problem(op, 30, n=24, k=8)
    everything = [Inputs(p, m, 3, seed=m) for m in (30, 7, 1, 30, 29)]
    ranks = ApartWorld if apart else VirtualWorld
    by_copies = Knobs(sends="copies")
    for knobs in (by_copies, replace(by_copies, comm_tile_rows=4), Knobs(path="medium")):
        checked_calls(ranks(3, device), p, everything, tuning=knobs)


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
@pytest.mark.parametrize("world", [2, 4])
def test_in_flight_reduction_is_exact(device: EmulatedDevice, op: str, world: int) -> None:
    """Inputs are small integers, whose sums are exact in any order."""
    device.set_delay(1000)
    p = problem(op, 30, n=24, k=4 * world)
    everything = [Inputs(p, m, world, seed=m) for m in (30, 7, 1, 30, 29)]
    for inputs in everything:
        inputs.x.round_()
        inputs.weights[0].clamp_(-2, 2).round_()
    checked_calls(VirtualWorld(world, device), p, everything, tuning=Knobs(reduce="in_flight"))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_kernels_sum_own_rows(device: EmulatedDevice, world: int) -> None:
    """The same bits as a reduction that follows; tiles that straddle owners, ranks without rows."""
    device.set_delay(300)
    for columns, reduce in ((24, "sum"), (13, "avg")):  # rows of whole 16 bytes, and others
        p = problem("gemm_rs", 41, n=columns, k=4 * world, reduce=reduce)
        everything = [Inputs(p, m, world, seed=m, bias=m % 2 == 0) for m in (41, 1, 16, 40, 3)]
        outs = [
            checked_calls(VirtualWorld(world, device), p, everything, tuning=Knobs(reduce=sums))
            for sums in ("in_kernel", "local")
        ]
        check_same_bits(*outs)


def test_what_kernels_cannot_sum_is_refused(device: EmulatedDevice) -> None:
    for op, nodes, more, message in (
        ("gemm_ar", 1, {}, "reduce = in_kernel is for GemmRS"),
        ("ag_gemm", 1, {}, "reduce = in_kernel is for GemmRS"),
        ("gemm_rs", 2, {}, "reduce = in_kernel needs memory that all ranks can address"),
        ("gemm_rs", 1, {"path": "medium"}, "needs path fused and sends stores"),
        ("gemm_rs", 1, {"sends": "copies"}, "needs path fused and sends stores"),
    ):
        knobs = Knobs(reduce="in_kernel", **more)
        p = problem(op, 16)
        with VirtualWorld(2, device, nodes) as ranks, pytest.raises(ValueError, match=message):
            p.build(ranks.rank(0), tuning=knobs)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_an_activation_without_a_fused_kernel_runs_after_the_gemm(
    device: EmulatedDevice, activation: str, recwarn: pytest.WarningsRecorder
) -> None:
    """Only silu has a fused kernel."""
    kernel_choice._warned.clear()
    device.set_delay(500)
    p = problem("ag_gemm", 20, activation=activation)
    for _ in range(2):
        check(device, 2, [Case(p, Knobs(), (Call(20, 1), Call(7, 2)))])
    said = [str(w.message) for w in recwarn if "as a separate kernel" in str(w.message)]
    assert len(said) == (activation == "gelu")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("direction", "world", "nodes"),
    [("push", 4, 1), ("pull", 4, 1), ("push", 4, 2), ("pull", 4, 2), ("push", 3, 3)],
)
def test_back_to_back_calls_repeat_bitwise(
    device: EmulatedDevice, op: str, direction: str, world: int, nodes: int
) -> None:
    """Nothing waits between calls; M changes, so buffers and boxes are reused at once."""
    p, rng = problem(op, 33), random.Random(3)
    sizes = [rng.randint(1, 33) for _ in range(15)]
    everything = [Inputs(p, m, world, seed=i) for i, m in enumerate(sizes)]
    knobs, path = Knobs(direction=direction, comm_tile_rows=3), path_of(nodes)
    results = []
    for delay in (0, 1000):
        device.set_delay(delay)
        ranks = VirtualWorld(world, device, nodes)
        results.append(checked_calls(ranks, p, everything, path, tuning=knobs))
    check_same_bits(*results)


@pytest.mark.parametrize("poison", ["0", "1"])
@pytest.mark.parametrize(
    ("op", "direction", "nodes"),
    [
        *((op, direction, 1) for op in OPS for direction in ("push", "pull")),
        *((op, "push", 2) for op in OPS),
        ("ag_gemm", "pull", 2),
    ],
)
def test_buffers_are_free_before_they_are_reused(
    device: EmulatedDevice,
    op: str,
    direction: str,
    nodes: int,
    poison: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One tile per rank and call, so that a delay lets a rank run a whole call ahead of a copy.

    Streams have places for what all calls of a rank put there.
    """
    monkeypatch.setenv("FLUX_POISON", poison)
    p = problem(op, 8, n=16 if op == "ag_gemm" else 8, k=4)
    world, count = (2, 80) if nodes == 1 else (4, 40)
    everything = [Inputs(p, 8, world, seed=i) for i in range(count)]
    device.set_delay(3000)
    ranks, knobs = VirtualWorld(world, device, nodes), Knobs(direction=direction)
    checked_calls(ranks, p, everything, path_of(nodes), tuning=knobs)


def test_a_closed_op_goes_without_a_collection(device: EmulatedDevice) -> None:
    """Collected, its kernels would go at some later time, in the midst of another op's call."""
    with VirtualWorld(2, device) as ranks:
        op = aligned("ag_gemm", 20).build(ranks.rank(0))
        backend = weakref.ref(op._backend)
        op.close()
        gc.disable()
        try:
            del op
            assert backend() is None
        finally:
            gc.enable()


def test_several_ops_share_a_world(a100: EmulatedDevice) -> None:
    a100.set_delay(100)
    world = 3
    ps = [aligned(op, 20) for op in OPS]
    with VirtualWorld(world, a100) as ranks, ExitStack() as stack:
        ops = [stack.enter_context(built(ranks, p)) for p in ps]
        inputs = [Inputs(p, 17, world, seed=1) for p in ps]
        outs = [call_all(ranks, ops[i], inputs[i]) for _ in range(2) for i in range(3)]
        finish(a100)
        check_all(2 * inputs, outs)


def test_several_weights_share_one_gather(a100: EmulatedDevice) -> None:
    a100.set_delay(0)
    p = Problem("ag_gemm", 24, (16, 32), 48, BF16)
    with VirtualWorld(2, a100) as ranks, built(ranks, p) as ops:
        inputs = Inputs(p, 19, 2, seed=5)
        outs = call_all(ranks, ops, inputs, gather=True)
        finish(a100)
        check_all([inputs], [outs])


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_a_timeout_does_not_corrupt_a_slow_peer(
    a100: EmulatedDevice, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is held up behind call 1 until rank 0 has given up waiting for it in call 2. By then
    rank 0 may have written to memory that rank 1 still used: rank 1 has to hear of it."""
    from ptx_machine import cuda_device

    monkeypatch.setattr(cuda_device(), "races", False)  # that write has no order
    a100.set_delay(0)
    p = aligned(op, 16)
    first, second = (Inputs(p, 16, 2, seed=s) for s in (1, 2))
    gate = torch.zeros(1, dtype=torch.int32)
    with VirtualWorld(2, a100) as ranks, built(ranks, p, timeout_s=0.3 * BUSY) as ops:

        def calls(r: int) -> list[torch.Tensor]:
            outs = first.call(ops[r], r)
            if r == 0:
                second.call(ops[0], 0)
            else:
                a100.driver.await_signal(a100.current_stream(), gate.data_ptr(), 1)
            return outs

        outs = ranks.run(calls)
        try:
            with pytest.raises(PeerTimeoutError, match=r"rank 0 waited more|a stream waited"):
                ops[0].wait()
        finally:
            gate.fill_(1)
        with pytest.raises(PeerTimeoutError, match="rank 1: rank 0 gave up in call 2"):
            ops[1].wait()
        a100.finish()
        first.check(outs[1], 1)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_a_peer_may_give_up_while_a_wait_fails(a100: EmulatedDevice, op: str) -> None:
    """A kernel claims the status of its rank while peers write there: neither is ordered first."""
    a100.set_delay(0)
    p = aligned(op, 16)
    with VirtualWorld(2, a100) as ranks, built(ranks, p, timeout_s=0.3 * BUSY) as ops:
        ranks.run(lambda r: Inputs(p, 16, 2, seed=1).call(ops[r], r) if r == 0 else None)
        time.sleep(0.1 * BUSY)
        status = ops[0]._backend.pads[0] + 2 * ranks.world * 4
        for word in (2, 3, 0):  # zeros, as if the peer's own words came a moment later
            a100.driver.signal(ranks.streams[1], status + 8 * word, 0)
        with pytest.raises(PeerTimeoutError, match=r"rank 0 waited more"):
            ops[0].wait()


@pytest.mark.parametrize("op", OPS)
def test_cached_call_is_reused_only_for_identical_arguments(h200: EmulatedDevice, op: str) -> None:
    """Same weight and bias objects, other contents; then each thing that makes a call another."""
    h200.set_delay(0)
    p = aligned(op, 12)
    with VirtualWorld(2, h200) as ranks, built(ranks, p) as ops:
        inputs = Inputs(p, 12, 2, seed=1)
        local = [list(inputs.local(r)) for r in range(2)]

        def call(m: int | None = None) -> list[torch.Tensor]:
            options = {"m": m} if p.gathers else {}
            outs = ranks.run(lambda r: ops[r](*local[r], **options))
            h200.finish()
            check_all([inputs], [outs])
            return outs

        def repeats() -> int:
            return sum(op._backend.repeats for op in ops)

        call()
        assert repeats() == 0
        for seed in (2, 3):  # other contents
            fresh = Inputs(p, 12, 2, seed=seed)
            inputs.x, inputs.weights, inputs.biases = fresh.x, fresh.weights, fresh.biases
            for r in range(2):
                for mine, new in zip(local[r], inputs.local(r), strict=True):
                    mine.copy_(new)
            call(12 if seed == 3 and p.gathers else None)
        assert repeats() == 4
        others = [local[r][1].clone() for r in range(2)]
        for _ in range(2):  # two layers that share the op, in turns
            for r in range(2):  # another object, the same contents
                local[r][1], others[r] = others[r], local[r][1]
            call()
        assert repeats() == 6
        for r in range(2):  # the same object, elsewhere
            local[r][1].data = local[r][1].clone()
        call()
        for r in range(2):  # no bias
            local[r][2] = None
        inputs.biases = [None]
        call()
        assert repeats() == 6
        call()
        assert repeats() == 8
        for r in range(2):  # another stride of x
            local[r][0] = lay_out(local[r][0], "inside")
        call()
        assert repeats() == 8
        small = Inputs(p, 7, 2, seed=4, bias=False)
        outs = call_all(ranks, ops, small)
        h200.finish()
        check_all([small], [outs])
        with pytest.raises(TypeError):
            ops[0](local[0][0].float(), local[0][1])
        assert repeats() == 8
        weight = local[0][1].requires_grad_()
        assert ops[0]._again(local[0][0], weight, None, None) is None


def test_cached_calls_do_not_keep_tensors_alive(device: EmulatedDevice) -> None:
    device.set_delay(0)
    p = problem("gemm_rs", 8)
    with VirtualWorld(2, device) as ranks, built(ranks, p) as ops:
        inputs = Inputs(p, 8, 2, seed=1)
        local = [inputs.local(r) for r in range(2)]
        ranks.run(lambda r: ops[r](*local[r]))
        device.finish()
        weight = weakref.ref(local[0][1])
        local.clear()
        gc.collect()
        assert weight() is None


def test_the_device_of_an_op_need_not_be_the_current_one(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.set_delay(0)
    p = problem("ag_gemm", 8)
    monkeypatch.setattr(device, "current", False)
    seen: list[bool] = []
    kernel = flux._C.Kernel

    def load(library: str, symbol: str, file: str) -> flux._C.Kernel:
        seen.append(device.current)
        return kernel(library, symbol, file)

    monkeypatch.setattr(flux._C, "Kernel", load)
    with VirtualWorld(2, device) as ranks, built(ranks, p) as ops:
        assert len(seen) == 2
        for op in ops:
            op._backend.native = Watched(op._backend.native, lambda: seen.append(device.current))
        inputs = Inputs(p, 8, 2, seed=1)
        outs = call_all(ranks, ops, inputs)
        finish(device)
        check_all([inputs], [outs])
    assert seen and all(seen) and device.made > 0


class Watched:
    """The native op with its calls recorded."""

    def __init__(self, native: object, called: Callable[[], None]) -> None:
        self._native, self._called = native, called

    def __getattr__(self, name: str) -> object:
        attribute = getattr(self._native, name)
        if callable(attribute) and name != "require_room":  # which asks nothing of the device
            self._called()
        return attribute


def test_ranks_must_build_the_same(device: EmulatedDevice) -> None:
    with VirtualWorld(2, device) as ranks:
        first = flux.AGGemm(ranks.rank(0), max_m=8, n=4, k=4, dtype=BF16)
        with pytest.raises(ValueError, match=r"ranks disagree; rank 1 has n = \(6,\)"):
            flux.AGGemm(ranks.rank(1), max_m=8, n=6, k=4, dtype=BF16)
        first.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "needs one of bfloat16, float16, float8_e4m3fn"),
        ({"backend": "cpu"}, "backend must be None or 'cuda'"),
        ({"transport": "shm"}, "transport must be None or 'virtual'"),
        ({"tuning": Knobs(path="unfused")}, "path = unfused needs a process group"),
    ],
)
def test_options_unsupported_on_virtual_ranks_raise(
    device: EmulatedDevice, options: dict[str, object], message: str
) -> None:
    with VirtualWorld(2, device) as ranks, pytest.raises(ValueError, match=message):
        arguments = {"dtype": BF16, **options}
        flux.GemmRS(ranks.rank(0), max_m=8, n=4, k=4, **arguments)  # type: ignore[arg-type]


def test_invalid_world_and_rank_raise(device: EmulatedDevice) -> None:
    with pytest.raises(ValueError, match="1 to 15 ranks, got 0"):
        VirtualWorld(0, device)
    with VirtualWorld(2, device) as ranks, pytest.raises(ValueError, match=r"in \[0, 2\), got 2"):
        ranks.rank(2)


def test_a_kernel_of_another_abi_is_refused(device: EmulatedDevice) -> None:
    library = str(device.registry.kernels["flux_emulated_ag_gemm_nk"].library)
    version = flux._C.ABI_VERSION
    message = f"version {version + 1} of the kernel ABI, this is {version}: build it"
    with pytest.raises(RuntimeError, match=message):
        flux._C.Kernel(library, "flux_emulated_old")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_world_without_a_device_raises() -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        VirtualWorld(2)


@pytest.mark.parametrize(
    ("initialised", "given", "fine"), [(0, None, 1), (1, "32", 1), (1, "1", 0)]
)
def test_hardware_queues_are_set_to_32_or_raise(
    initialised: int, given: str | None, fine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(initialised))
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    if fine:
        device_module._want_queues(32)
        assert os.environ[name] == "32"
    else:
        with pytest.raises(RuntimeError, match=f"{name} is 1: set it to 32"):
            device_module._want_queues(32)

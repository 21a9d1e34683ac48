"""Calls on a GPU among what else torch does there: `pytest -m gpu`, after `make kernels`.

What an emulated device can show is in test_interop.py; this is for torch's own streams, allocator
and compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flux.transport.device import CudaDevice
from flux.transport.virtual import VirtualWorld
from gpu_cases import OnDevice, cuda_device
from matrix import OPS
from reference import Problem
from virtual_cases import call_all, drop_at_once, run_ready

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return cuda_device()


@pytest.fixture
def world(device: CudaDevice) -> Iterator[VirtualWorld]:
    with VirtualWorld(2, device) as ranks:
        yield ranks


def problem(op: str, n: tuple[int, ...] = (1024,)) -> Problem:
    return Problem(op, 512, n, 512, torch.bfloat16)


def build(world: VirtualWorld, p: Problem) -> list[Any]:
    return [p.build(world.rank(r), timeout_s=60.0) for r in range(2)]


def check(ops: list[Any], calls: list[tuple[OnDevice, list[Any]]]) -> None:
    for made in ops:
        made.wait()
    for inputs, outs in calls:
        for r in range(2):
            inputs.check(outs[r] if isinstance(outs[r], list) else [outs[r]], r)
    for made in ops:
        made.close()


@pytest.mark.parametrize("op", OPS)
def test_calls_on_changing_streams_match_float64(world: VirtualWorld, op: str) -> None:
    """Each call uses other torch streams; only the op orders them."""
    ops, p = build(world, problem(op)), problem(op)
    streams = [[torch.cuda.Stream() for _ in range(3)] for _ in range(2)]
    calls = []
    for number in range(9):
        inputs = OnDevice(p, 512, 2, seed=number)
        local = [inputs.local(r) for r in range(2)]
        torch.cuda.synchronize()
        outs = []
        for r in range(2):
            with torch.cuda.stream(streams[r][number % 3]):
                outs.append(ops[r](*local[r]))
        calls.append((inputs, outs))
        del local
    torch.cuda.synchronize()
    check(ops, calls)


@pytest.mark.parametrize("op", OPS)
def test_tensors_dropped_after_the_call_do_not_change_results(world: VirtualWorld, op: str) -> None:
    ops, p = build(world, problem(op)), problem(op)
    everything = [OnDevice(p, 512, 2, seed=seed) for seed in range(4)]
    kept = drop_at_once(world, ops, 5 * everything, len(everything))
    check(ops, [(inputs, [kept[r][i] for r in range(2)]) for i, inputs in enumerate(everything)])


def test_copies_of_weights_with_gaps_do_not_share_memory(world: VirtualWorld) -> None:
    p = problem("ag_gemm", (1024, 1024, 1024))
    ops = build(world, p)
    calls = []
    for seed in range(3):
        inputs = OnDevice(p, 512, 2, seed=seed)
        ready = [inputs.ready(r, layout="strided") for r in range(2)]
        outs = run_ready(world, ops, ready)
        calls.append((inputs, outs))
    check(ops, calls)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", ["transposed", "strided", "inside"])
def test_inputs_with_gaps_match_float64(world: VirtualWorld, op: str, layout: str) -> None:
    """`inside` also begins where TMA cannot load."""
    ops, inputs = build(world, problem(op)), OnDevice(problem(op), 512, 2, seed=1)
    outs = run_ready(world, ops, [inputs.ready(r, layout=layout) for r in range(2)])
    check(ops, [(inputs, outs)])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_calls_work_in_modes_without_gradients(world: VirtualWorld, op: str, mode: Any) -> None:
    ops = build(world, problem(op))
    with mode():
        inputs = OnDevice(problem(op), 512, 2, seed=1)
        local = [inputs.local(r) for r in range(2)]
        for _ in range(2):
            outs = world.run(lambda r: ops[r](*local[r]))
    check(ops, [(inputs, outs)])


@pytest.mark.parametrize("op", OPS)
def test_compiled_call_has_no_graph_break(world: VirtualWorld, op: str) -> None:
    ops, inputs = build(world, problem(op)), OnDevice(problem(op), 512, 2, seed=1)
    local = [inputs.local(r) for r in range(2)]
    compiled = [
        torch.compile(
            lambda *given, made=made: made(*given) * 1, fullgraph=True, backend="aot_eager"
        )
        for made in ops
    ]
    with torch.no_grad():
        for _ in range(2):
            outs = world.run(lambda r: compiled[r](*local[r]))
    check(ops, [(inputs, outs)])


@pytest.mark.parametrize("op", OPS)
def test_tensors_on_another_device_are_refused(world: VirtualWorld, op: str) -> None:
    ops, inputs = build(world, problem(op)), OnDevice(problem(op), 512, 2, seed=1)
    x, weight, bias = inputs.local(0)
    with pytest.raises(ValueError, match=r"x must be on cuda:\d+, got cpu"):
        ops[0](x.cpu(), weight, bias)
    if torch.cuda.device_count() > 1:
        other = (ops[0]._backend.device.index + 1) % torch.cuda.device_count()
        with pytest.raises(ValueError, match=rf"weight must be on cuda:\d+, got cuda:{other}"):
            ops[0](x, weight.to(f"cuda:{other}"), bias)
    outs = call_all(world, ops, inputs)  # nothing has happened
    check(ops, [(inputs, outs)])

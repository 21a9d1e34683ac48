"""Calls on a GPU among what else torch does there: `pytest -m gpu`, after `make kernels`. Without a
GPU, on the PTX machine (ptx_machine/), except what needs torch's own allocator, compiler or
devices: tests with the fixture ``cuda_world``. Rules of the host code are in test_interop.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flux.transport.device import Device
from flux.transport.virtual import VirtualWorld
from gpu_cases import OnDevice, cuda_device, gpu_of_one_arch, inputs_on, of, streams_on
from matrix import OPS
from reference import Problem, lay_out
from virtual_cases import Transferred, call_all, drop_at_once, finish, run_ready

pytestmark = pytest.mark.timeout(300)

gpu = gpu_of_one_arch()


@pytest.fixture
def world(gpu: Device) -> Iterator[VirtualWorld]:
    with VirtualWorld(2, gpu) as ranks:
        yield ranks


@pytest.fixture
def cuda_world() -> Iterator[VirtualWorld]:
    with VirtualWorld(2, cuda_device()) as ranks:
        yield ranks


def rows(device: Device) -> int:
    return of(device, 512, 150)


def problem(device: Device, op: str, weights: int = 1) -> Problem:
    n, k = of(device, (1024, 512), (128, 64))
    return Problem(op, rows(device), (n,) * weights, k, torch.bfloat16)


def build(world: VirtualWorld, p: Problem) -> list[Any]:
    return [p.build(world.rank(r), timeout_s=60.0) for r in range(2)]


def check(ops: list[Any], calls: list[tuple[Transferred, list[Any]]]) -> None:
    for made in ops:
        made.wait()
    for inputs, outs in calls:
        for r in range(2):
            inputs.check(outs[r] if isinstance(outs[r], list) else [outs[r]], r)
    for made in ops:
        made.close()


@pytest.mark.parametrize("op", OPS)
def test_calls_on_changing_streams_match_float64(world: VirtualWorld, op: str) -> None:
    """Each call uses other streams of the caller; only the op orders them."""
    device = world.device
    p = problem(device, op)
    ops = build(world, p)
    everything = [inputs_on(device)(p, p.max_m, 2, seed) for seed in range(of(device, 9, 4))]
    ready = [[inputs.ready(r) for r in range(2)] for inputs in everything]
    finish(device)
    outs: list[list[Any]] = []
    with streams_on(device, 3) as of_rank_0, streams_on(device, 3) as of_rank_1:
        for number, calls in enumerate(ready):
            outs.append([])
            for r, streams in enumerate((of_rank_0, of_rank_1)):
                with streams[number % 3]():
                    outs[-1].append(calls[r](ops[r]))
        check(ops, list(zip(everything, outs, strict=True)))


def test_copies_of_weights_with_gaps_do_not_share_memory(world: VirtualWorld) -> None:
    device = world.device
    p = problem(device, "ag_gemm", weights=3)
    ops = build(world, p)
    calls = []
    for seed in range(of(device, 3, 2)):
        inputs = inputs_on(device)(p, p.max_m, 2, seed=seed)
        ready = [inputs.ready(r, layout="strided") for r in range(2)]
        outs = run_ready(world, ops, ready)
        calls.append((inputs, outs))
    check(ops, calls)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", ["transposed", "strided", "inside"])
def test_inputs_with_gaps_match_float64(world: VirtualWorld, op: str, layout: str) -> None:
    """`inside` also begins where TMA cannot load."""
    p = problem(world.device, op)
    ops, inputs = build(world, p), inputs_on(world.device)(p, p.max_m, 2, seed=1)
    outs = run_ready(world, ops, [inputs.ready(r, layout=layout) for r in range(2)])
    check(ops, [(inputs, outs)])


def test_bias_with_gaps_matches_float64(world: VirtualWorld) -> None:
    p = problem(world.device, "gemm_rs")
    ops, inputs = build(world, p), inputs_on(world.device)(p, p.max_m, 2, seed=1)
    local = [inputs.local(r) for r in range(2)]
    biases = [lay_out(bias[:, None], "strided")[:, 0] for _, _, bias in local]
    outs = world.run(lambda r: ops[r](*local[r][:2], biases[r]))
    check(ops, [(inputs, outs)])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_calls_work_in_modes_without_gradients(world: VirtualWorld, op: str, mode: Any) -> None:
    p = problem(world.device, op)
    ops = build(world, p)
    with mode():
        inputs = inputs_on(world.device)(p, p.max_m, 2, seed=1)
        local = [inputs.local(r) for r in range(2)]
        for _ in range(2):
            outs = world.run(lambda r: ops[r](*local[r]))
        assert all(made._backend.repeats == 1 for made in ops)
        assert all(out.is_inference() == torch.is_inference_mode_enabled() for out in outs)
    again = world.run(lambda r: ops[r](*local[r]))  # such tensors may be used outside, too
    check(ops, [(inputs, outs), (inputs, again)])


# -- torch's own allocator, compiler and devices ---------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_tensors_dropped_after_the_call_do_not_change_results(
    cuda_world: VirtualWorld, op: str
) -> None:
    """Only torch's CUDA allocator hands memory out again in the order of streams."""
    p = problem(cuda_world.device, op)
    ops = build(cuda_world, p)
    everything = [OnDevice(p, p.max_m, 2, seed=seed) for seed in range(4)]
    kept = drop_at_once(cuda_world, ops, 5 * everything, len(everything))
    check(ops, [(inputs, [kept[r][i] for r in range(2)]) for i, inputs in enumerate(everything)])


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_compiled_call_has_no_graph_break(cuda_world: VirtualWorld, op: str) -> None:
    """With CUDA tensors; test_interop.py compiles calls with tensors of the host."""
    p = problem(cuda_world.device, op)
    ops, inputs = build(cuda_world, p), OnDevice(p, p.max_m, 2, seed=1)
    local = [inputs.local(r) for r in range(2)]
    compiled = [
        torch.compile(
            lambda *tensors, made=made: made(*tensors) * 1, fullgraph=True, backend="aot_eager"
        )
        for made in ops
    ]
    with torch.no_grad():
        for _ in range(2):
            outs = cuda_world.run(lambda r: compiled[r](*local[r]))
    check(ops, [(inputs, outs)])


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_tensors_on_another_device_are_refused(cuda_world: VirtualWorld, op: str) -> None:
    """The PTX machine has tensors of the host alone."""
    p = problem(cuda_world.device, op)
    ops, inputs = build(cuda_world, p), OnDevice(p, p.max_m, 2, seed=1)
    x, weight, bias = inputs.local(0)
    with pytest.raises(ValueError, match=r"x must be on cuda:\d+, got cpu"):
        ops[0](x.cpu(), weight, bias)
    if torch.cuda.device_count() > 1:
        other = (ops[0]._backend.device.index + 1) % torch.cuda.device_count()
        with pytest.raises(ValueError, match=rf"weight must be on cuda:\d+, got cuda:{other}"):
            ops[0](x, weight.to(f"cuda:{other}"), bias)
    outs = call_all(cuda_world, ops, inputs)  # nothing has happened
    check(ops, [(inputs, outs)])

"""The kernels with all ranks on one GPU: `pytest -m gpu`, after `make kernels`. Without a GPU,
the minimal ones on the PTX machine (ptx_machine/).

FLUX_TEST_CASES random cases per op and world (12 if unset). Cases named small are for
compute-sanitizer, under which everything takes far longer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from device_fixtures import ARCHS, with_flux_kernels
from flux import _C, Knobs, PeerTimeoutError, Topology
from flux.transport.device import Device
from flux.transport.virtual import VirtualWorld
from gpu_cases import (
    ON_CUDA,
    cases_on,
    cuda_device,
    gpu_and_world,
    inputs_on,
    of,
    random_problem,
)
from harness import BUSY, more, stress_only
from matrix import OPS, ROUTES, every_combination_of_knobs, every_dtype_layout_and_weight_order
from op_cases import Call, Case, random_cases
from reference import Problem
from virtual_cases import (
    built,
    call_all,
    check_cases,
    check_same_bits,
    checked_calls,
    finish,
    knobs_of,
    on_one_device,
    topology_of,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("poisoned")]


@pytest.fixture
def device(gpu: Device) -> Device:
    return gpu


def run_case(device: Device, rng: random.Random, op: str, world: int, most: int) -> None:
    topology, knobs = topology_of(rng, world), knobs_of(rng, world)
    p = random_problem(device, rng, op, world, most)
    options = {"tuning": knobs, "topology": topology}
    with VirtualWorld(world, device) as ranks, built(ranks, p, **options) as ops:
        for call in range(3):
            m, bias = rng.randint(1, p.max_m), rng.random() < 0.5
            inputs = inputs_on(device)(p, m, world, call, bias=bias)
            outs = call_all(ranks, ops, inputs, p.gathers and rng.random() < 0.5)
            for r in range(world):
                ops[r].wait()
                inputs.check(outs[r], r)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("gpu", "world"),
    gpu_and_world([2, 3, 4, 8], [2, 3, *more(4, 8)], ARCHS),
    indirect=["gpu"],
)
def test_random_cases(gpu: Device, op: str, world: int) -> None:
    rng = random.Random(f"gpu {op} {world}")
    for _ in range(cases_on(gpu)):
        run_case(gpu, rng, op, world, 700)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("gpu", "world"), gpu_and_world([2, 4], [2, *more(4)], ARCHS), indirect=["gpu"]
)
def test_cases_of_the_cpu_backend_match_float64(device: Device, op: str, world: int) -> None:
    """The cases of the CPU backend, as far as kernels for them are built."""
    cases = random_cases(20, op, world, cases_on(device))
    cases += every_dtype_layout_and_weight_order(op, "fused")
    # A GEMM per chunk, and kernels that push rows or sums.
    for path in ("medium", *(() if op == "gemm_rs" else ("in_kernel",))):
        cases += every_dtype_layout_and_weight_order(op, path)[:1]
    cases += every_combination_of_knobs(op, world)[:: 5 if cases_on(device) > 1 else 15]
    # Where few kernels are built, several of the cases become the same one.
    distinct = list(dict.fromkeys(on_one_device(device, case, world) for case in cases))
    check_cases(device, world, distinct, inputs_on(device))


@pytest.mark.parametrize("op", OPS)
def test_two_nodes_match_float64(device: Device, op: str) -> None:
    """Their rows cross by a remote that copies."""
    cases = [
        replace(case, topology=Topology(2, 1, 2), knobs=replace(case.knobs, direction="push"))
        for case in random_cases(50, op, 4, cases_on(device))
    ]
    check_cases(device, 4, cases, inputs_on(device), nodes=2)


@pytest.fixture(params=[ON_CUDA, pytest.param("90a", marks=stress_only)])
def float8_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A GPU with float8 kernels. For the PTX machine, compilers take minutes for them."""
    if request.param == "cuda":
        device = cuda_device()
        if all(kernel.config.dtype != "e4m3" for kernel in device.registry.kernels.values()):
            pytest.skip("no float8 kernels are built: make kernels SET=default")
        yield device
        return
    with with_flux_kernels(request, request.param, "float8_kernels") as device:
        yield device


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("op", OPS)
def test_float8_ops_match_float64(float8_device: Device, op: str, scaling: str, fast: bool) -> None:
    device = float8_device
    m, n, k = of(device, (1000, 1024, 768), (150, 128, 256))
    p = Problem(op, m, (n,), k, torch.float8_e4m3fn, scaling=scaling, fast_accum=fast)
    calls = tuple(Call(rows, seed=rows, gather=p.gathers) for rows in (m, 1, m // 3))
    check_cases(device, 2, [Case(p, Knobs(), calls)], inputs_on(device))


@pytest.mark.parametrize("fast", [False, True])
def test_fast_sums_of_float8_forget_small_products(float8_device: Device, fast: bool) -> None:
    """A product of 2^14, and 1023 of 1/4, of which promotion loses those of the same 128 of K."""
    device = float8_device
    p = Problem("ag_gemm", 64, (128,), 1024, torch.float8_e4m3fn, scaling="tensor", fast_accum=fast)
    inputs = inputs_on(device)(p, 64, 2, 0, bias=False)
    for operand in (inputs.x, *inputs.weights):
        operand.fill_(0.5)
        operand[:, 0] = 128.0
    for scale in (*inputs.scale_x, *(s for of_rank in inputs.scale_weights for s in of_rank)):
        scale.fill_(1.0)
    with VirtualWorld(2, device) as ranks, built(ranks, p) as ops:
        outs = call_all(ranks, ops, inputs)
        for r in range(2):
            ops[r].wait()
            if fast:
                assert (outs[r][0] == 2**14).all()
            else:
                inputs.check(outs[r], r)


@pytest.mark.parametrize("op", OPS)
def test_small_problem_matches_float64(device: Device, op: str) -> None:
    run_case(device, random.Random(op), op, 2, 200)


def test_flags_of_many_owners_are_raised_together(device: Device) -> None:
    """Four tiles of 15 owners have more flags than a warp has lanes."""
    p = Problem("gemm_rs", 61, (2320,), 240, torch.bfloat16)
    with VirtualWorld(15, device) as ranks, built(ranks, p) as ops:
        inputs = inputs_on(device)(p, 61, 15, seed=1)
        outs = call_all(ranks, ops, inputs, False)
        for r in range(15):
            ops[r].wait()
            inputs.check(outs[r], r)


@pytest.mark.parametrize(("op", "direction"), ROUTES)
def test_back_to_back_calls_repeat_bitwise(device: Device, op: str, direction: str) -> None:
    m, n, k = of(device, (1100, 512, 256), (550, 256, 128))
    world = of(device, 4, 2)
    p = Problem(op, m, (n,), k, torch.bfloat16)
    rng = random.Random(3)
    calls = min(12, 3 * cases_on(device))
    everything = [inputs_on(device)(p, rng.randint(1, m), world, seed=i) for i in range(calls)]
    knobs = Knobs(direction=direction)
    check_same_bits(
        *(checked_calls(VirtualWorld(world, device), p, everything, tuning=knobs) for _ in "ab")
    )


@pytest.mark.parametrize(
    ("op", "waiting"),
    [
        ("ag_gemm", r"rows of x \(AllGather signal \d+\)"),
        ("gemm_rs", r"the entry of rank 1|partials of a peer"),
    ],
)
def test_a_rank_that_does_not_call_is_noticed(device: Device, op: str, waiting: str) -> None:
    p = Problem(op, 128, (128,), 64, torch.bfloat16)  # small: a PTX machine takes its time
    timeout_s = of(device, 1.0, BUSY)  # the first call must not take as long
    with VirtualWorld(2, device) as ranks, built(ranks, p, timeout_s=timeout_s) as ops:
        inputs = inputs_on(device)(p, 128, 2, seed=1)
        good = call_all(ranks, ops, inputs)
        ops[0].wait()
        inputs.check(good[0], 0)
        alone = inputs.ready(0)
        ranks.run(lambda r: alone(ops[0]) if r == 0 else None)
        words = rf"rank 0 waited more than {timeout_s:g} s for {waiting}"
        with pytest.raises(PeerTimeoutError, match=words):
            ops[0].wait()
        with pytest.raises(RuntimeError, match="is closed"):
            inputs.ready(0)(ops[0])


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_the_stride_of_a_single_row_means_nothing(device: Device, op: str) -> None:
    """Kernels load whole vectors, and torch counts one row of any stride as contiguous."""
    p = Problem(op, 8, (64,), 32, torch.bfloat16)
    with VirtualWorld(2, device) as ranks, built(ranks, p) as ops:
        for seed in (1, 2):  # the second call is a repetition
            inputs = inputs_on(device)(p, 1, 2, seed)
            tensors = [inputs.local(r) for r in range(2)]
            odd = [x.new_zeros(1, 17)[:, :16].copy_(x) for x, _, _ in tensors]
            outs = ranks.run(lambda r, x=odd, g=tensors: [ops[r](x[r], *g[r][1:])])
            for r in range(2):
                ops[r].wait()
                inputs.check(outs[r], r)


def test_every_built_plain_kernel_multiplies(device: Device) -> None:
    stream = device.current_stream()
    seen = 0
    for kernel_file in device.registry.kernels.values():
        config = kernel_file.config
        if config.op != "gemm" or config.dtype != "bf16" or config.weight != "nk":
            continue
        kernel = _C.Kernel(str(kernel_file.library), kernel_file.symbol)
        kernel.prepare(device.index)
        for m, n, k in ((1, 8, 8), (130, 520, 264), (1000, 768, 1536)):
            where = device.torch_device
            a, b = (torch.randn(s, k, device=where).bfloat16() for s in (m, n))
            out = torch.full((m, n), float("nan"), device=where, dtype=torch.bfloat16)
            args = _C.GemmArgs()
            args.m, args.n, args.k, args.alpha = m, n, k, 1.0
            args.a, args.lda, args.b, args.ldb = a.data_ptr(), k, b.data_ptr(), k
            args.d, args.ldd, args.device = out.data_ptr(), n, device.index
            room = device.zeros(kernel.workspace_bytes(args) + 1, torch.uint8)
            args.workspace, args.workspace_bytes = room.data_ptr(), room.numel()
            device.keep(a, b, out)
            kernel.launch(args, stream)
            finish(device)
            right = a.double() @ b.double().t()
            torch.testing.assert_close(out.double(), right, rtol=8e-3, atol=2e-2)
        seen += 1
    if not seen:
        pytest.skip("no plain kernel is built")

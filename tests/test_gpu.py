"""The kernels on a GPU, with all ranks on it: `pytest -m gpu`, after `make kernels`.

FLUX_TEST_CASES random cases per op and world (12 if unset). Cases named small are for
compute-sanitizer, under which everything takes far longer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flux import _C, Knobs, PeerTimeoutError
from flux.backends.device import CudaDevice
from flux.kernels.legality import GemmProblem
from flux.transport.virtual import VirtualWorld
from matrix import OPS, every_combination_of_knobs, every_dtype_layout_and_weight_order
from op_cases import Call, Case, random_cases
from reference import Inputs, Problem
from virtual_cases import (
    call_all,
    call_on_and_on,
    check_cases,
    knobs_of,
    on_one_device,
    topology_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CASES = int(os.environ.get("FLUX_TEST_CASES", "12"))


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = CudaDevice()
    if not found.registry.kernels:
        pytest.skip("no kernels are built for these sources: make kernels")
    yield found


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_POISON", "1")


def on_gpu(part: Any) -> Any:
    if isinstance(part, list):
        return [on_gpu(p) for p in part]
    return None if part is None else part.cuda()


class OnDevice(Inputs):
    """Inputs on the GPU; results are judged on the CPU."""

    def local(self, rank: int, layout: str = "dense", padded: bool = False) -> tuple[Any, Any, Any]:
        host = self.x, self.weights, self.biases
        self.x, self.weights, self.biases = map(on_gpu, host)
        try:  # laid out there: a copy to the device would close the gaps
            return super().local(rank, layout, padded)
        finally:
            self.x, self.weights, self.biases = host

    def scales(self, rank: int, rows: int) -> dict[str, Any]:
        return {name: on_gpu(scale) for name, scale in super().scales(rank, rows).items()}

    def check(self, got: list[torch.Tensor], rank: int, path: str = "fused") -> None:
        super().check([g.cpu() for g in got], rank, path)


def aligned(rng: random.Random, world: int, most: int) -> int:
    """A size of which every rank has a share that is a multiple of 8."""
    return 8 * world * rng.randint(1, max(1, most // (8 * world)))


def run_case(device: CudaDevice, rng: random.Random, op: str, world: int, most: int) -> None:
    topology, knobs = topology_of(rng, world), knobs_of(rng, world)
    sizes = (rng.randint(1, most), aligned(rng, world, most), aligned(rng, world, most))
    dtype = rng.choice([torch.bfloat16, torch.float16] if CASES > 1 else [torch.bfloat16])
    if not device.registry.candidates(
        "ag_gemm" if op == "ag_gemm" else "gemm_rs",
        "bf16" if dtype == torch.bfloat16 else "fp16",
        device.capability,
        GemmProblem(*sizes, world),
    ):
        dtype = torch.bfloat16
    reduce = "sum" if op == "ag_gemm" else rng.choice(["sum", "avg"])
    p = Problem(op, sizes[0], (sizes[1],), sizes[2], dtype, reduce=reduce)
    with VirtualWorld(world, device) as ranks:
        ops = [p.build(ranks.rank(r), tuning=knobs, topology=topology) for r in range(world)]
        for call in range(3):
            inputs = OnDevice(p, rng.randint(1, p.max_m), world, call, bias=rng.random() < 0.5)
            outs = call_all(ranks, ops, inputs, p.gathers and rng.random() < 0.5)
            for r in range(world):
                ops[r].wait()
                inputs.check(outs[r], r)
        for o in ops:
            o.close()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_random_cases(device: CudaDevice, op: str, world: int) -> None:
    rng = random.Random(f"gpu {op} {world}")
    for _ in range(CASES):
        run_case(device, rng, op, world, 700)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 4])
def test_the_matrix(device: CudaDevice, op: str, world: int) -> None:
    """The cases of the CPU backend, as far as kernels for them are built."""
    cases = random_cases(20, op, world, CASES)
    cases += every_dtype_layout_and_weight_order(op, "fused")
    cases += every_combination_of_knobs(op, world)[::5]
    check_cases(device, world, cases, torch.cuda.synchronize, OnDevice)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("op", OPS)
def test_float8(device: CudaDevice, op: str, scaling: str) -> None:
    p = Problem(op, 1000, (1024,), 768, torch.float8_e4m3fn, scaling=scaling)
    calls = tuple(Call(m, seed=m, gather=p.gathers) for m in (1000, 1, 333))
    case = Case(p, Knobs(), calls)
    if on_one_device(device, case, 2).problem != p:
        pytest.skip("no float8 kernels are built: make kernels SET=default")
    check_cases(device, 2, [case], torch.cuda.synchronize, OnDevice)


@pytest.mark.parametrize("op", OPS)
def test_small(device: CudaDevice, op: str) -> None:
    run_case(device, random.Random(op), op, 2, 200)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_back_to_back_calls_repeat_bitwise(device: CudaDevice, op: str, direction: str) -> None:
    world, p = 4, Problem(op, 1100, (512,), 256, torch.bfloat16)
    rng = random.Random(3)
    everything = [OnDevice(p, rng.randint(1, 1100), world, seed=i) for i in range(12)]
    found = []
    for _ in range(2):
        with VirtualWorld(world, device) as ranks:
            knobs = Knobs(direction=direction)
            ops = [p.build(ranks.rank(r), tuning=knobs) for r in range(world)]
            outs = call_on_and_on(ranks, ops, everything)
            for o in ops:
                o.wait()
                o.close()
        for inputs, of_ranks in zip(everything, outs, strict=True):
            for r in range(world):
                inputs.check(of_ranks[r], r)
        found.append(outs)
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_a_rank_that_does_not_call_is_noticed(device: CudaDevice, op: str) -> None:
    p = Problem(op, 512, (512,), 512, torch.bfloat16)
    with VirtualWorld(2, device) as ranks:
        ops = [p.build(ranks.rank(r), timeout_s=0.5) for r in range(2)]
        inputs = OnDevice(p, 512, 2, seed=1)
        good = call_all(ranks, ops, inputs)
        ops[0].wait()
        inputs.check(good[0], 0)
        ranks.run(lambda r: inputs.call(ops[0], 0) if r == 0 else None)
        with pytest.raises(PeerTimeoutError, match=r"rank 0 waited more than 0\.5 s for"):
            ops[0].wait()
        for o in ops:
            o.close()


def test_every_built_plain_kernel_multiplies(device: CudaDevice) -> None:
    stream = device.current_stream()
    seen = 0
    for built in device.registry.kernels.values():
        config = built.config
        if config.op != "gemm" or config.dtype != "bf16" or config.weight != "nk":
            continue
        kernel = _C.Kernel(str(built.library), built.symbol)
        kernel.prepare(device.index)
        for m, n, k in ((1, 8, 8), (130, 520, 264), (1000, 768, 1536)):
            a, b = (torch.randn(s, k, device="cuda").bfloat16() for s in (m, n))
            out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
            args = _C.GemmArgs()
            args.m, args.n, args.k, args.alpha = m, n, k, 1.0
            args.a, args.lda, args.b, args.ldb = a.data_ptr(), k, b.data_ptr(), k
            args.d, args.ldd, args.device = out.data_ptr(), n, device.index
            room = torch.zeros(kernel.workspace_bytes(args) + 1, device="cuda", dtype=torch.uint8)
            args.workspace, args.workspace_bytes = room.data_ptr(), room.numel()
            kernel.launch(args, stream)
            right = a.double() @ b.double().t()
            torch.testing.assert_close(out.double(), right, rtol=8e-3, atol=2e-2)
        seen += 1
    if not seen:
        pytest.skip("no plain kernel is built")

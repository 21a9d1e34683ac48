"""Kernels of experts for float8 on the PTX machine: scales belong to rows and to experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

import bench_gpus
from device_fixtures import with_flux_kernels
from flux import Knobs
from flux.bench.config import BenchConfig
from flux.bench.op import measure
from flux.bench.sparse import FusedSparse
from flux.core.sparse_problem import make_problem
from flux.transport.virtual import VirtualWorld, least_tile_rows
from harness import STRESS, more
from moe_cases import MOE_OPS, MoeCase, MoeInputs
from moe_seeds import case_of, run_case
from op_cases import same_bits
from ptx_device import PtxDevice
from reference import FP8

CASE = MoeCase(
    "gather", 90, 64, 64, 5, 3, dtype=FP8, scaling="row", knobs=Knobs(comm_tile_rows=8), room=5
)


@pytest.fixture(scope="module")
def float8(request: pytest.FixtureRequest) -> Iterator[PtxDevice]:
    """A device with float8 kernels of experts: without make stress, one of each op."""
    with with_flux_kernels(request, "90a", "float8_expert_kernels") as device:
        assert isinstance(device, PtxDevice)
        yield device


@pytest.mark.parametrize("seed", range(5 * STRESS))
def test_random_routings(float8: PtxDevice, seed: int) -> None:
    kernels = sorted(float8.registry.kernels.values(), key=lambda built: built.config.name)
    config, case, world, kind = case_of(seed, [b.config for b in kernels])
    (built,) = (b for b in kernels if b.config == config)
    run_case(float8, built, case, world, [kind, "random"], seed)


def ones(case: MoeCase, m: int, world: int, kind: str) -> MoeInputs:
    """Inputs whose products are K times their scales: each row, column and expert has its own."""
    inputs = MoeInputs(case, m, world, kind, 3)
    inputs.x.fill_(1)
    inputs.weight.fill_(1)
    inputs.bias = inputs.probs = None
    inputs.scale_x = 2.0 ** (torch.arange(len(inputs.x)) % 7)
    columns = torch.arange(inputs.scale_w.shape[1]) % 5
    inputs.scale_w = 3.0 ** (torch.arange(case.experts)[:, None] % 3) * 2.0**columns
    return inputs


def assert_close(y: torch.Tensor, wanted: torch.Tensor) -> None:
    """Check that products are nowhere NaN, nor off by more than roundings of bfloat16."""
    far = ~((y.double() - wanted).abs() <= wanted * 2.0**-6)
    assert not far.any(), (int(far.sum()), far.numel())


def of_kind(
    case: MoeCase, m: int, world: int, rank: int, rows: int, kind: str
) -> tuple[MoeInputs, tuple[Any, Any, Any, dict[str, Any]]]:
    """Inputs of a routing, and a rank's arguments with room for ``rows``."""
    inputs = ones(replace(case, room=None), m, world, kind)
    inputs.scale_w = inputs.scale_w.roll(len(kind), 1)
    x, weights, experts, options = inputs.arguments(rank)
    if not case.gathers:
        behind = rows - len(x)
        x = torch.cat([x, x.new_zeros(behind, x.shape[1])])
        options["scale_x"] = torch.nn.functional.pad(options["scale_x"], (0, behind))
    return inputs, (x.clone(), weights, experts.clone(), options | {"max_rows": rows})


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("op", "world", "nodes"),
    [
        *((op, 3, 1) for op in MOE_OPS),
        ("gather", 4, 2),
        *more(*((op, *of) for op in MOE_OPS for of in ((2, 1), (4, 1), (4, 2)))),
    ],
)
def test_products_have_the_scales_of_their_row_and_expert(
    float8: PtxDevice, op: str, world: int, nodes: int
) -> None:
    """Calls come back to back, and copies late: a scale that is read too early is another one."""
    case = replace(CASE, op=op, ep=world if MOE_OPS[op].dispatches else 1, k=64 * world)
    case = replace(case, n=64 * world)
    if nodes > 1:
        rows = least_tile_rows(world, case.max_m, 2)
        case = replace(case, ep=2, knobs=Knobs(comm_tile_rows=rows))
    everything = [ones(case, m, world, kind) for m, kind in ((90, "random"), (41, "dropped"))]
    float8.set_copy_delay(10_000)
    try:
        with VirtualWorld(world, float8, nodes) as ranks, ExitStack() as closing:
            ops = [closing.enter_context(case.build(group=ranks.rank(r))) for r in range(world)]
            given = [[inputs.arguments(r) for inputs in everything] for r in range(world)]
            outs = ranks.run(lambda r: [ops[r](*of[:3], **of[3]) for of in given[r]])
            float8.finish()
            for r, each in enumerate(ops):
                each.wait()
                for inputs, y in zip(everything, outs[r], strict=True):
                    wanted, _ = inputs.expected(r)
                    assert_close(y, wanted)
    finally:
        float8.set_copy_delay(0)


@pytest.mark.parametrize("op", MOE_OPS)
def test_no_order_of_warps_changes_a_bit(float8: PtxDevice, op: str) -> None:
    config, case, _, _ = case_of(list(MOE_OPS).index(op), kernels_of(float8))
    (built,) = (b for b in float8.registry.kernels.values() if b.config == config)
    case = replace(CASE, op=op, scaling=config.scaling, fast=config.fast_accum)
    runs = [run_case(float8, built, case, 2, ["dropped"], seed)[0][0] for seed in range(2 * STRESS)]
    for other in runs[1:]:
        assert all(same_bits(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("op", ["dispatch", "scatter", *more("gather", "combine", "reduce")])
def test_graphs_replay_with_other_scales(float8: PtxDevice, op: str) -> None:
    world, m = 2, 40
    case = replace(CASE, op=op, ep=2 if MOE_OPS[op].dispatches else 1, room=0, n=128, k=128)
    rows = m * case.topk
    with VirtualWorld(world, float8) as ranks, ExitStack() as closing:
        ops = [closing.enter_context(case.build(group=ranks.rank(r))) for r in range(world)]
        given = [of_kind(case, m, world, r, rows, "random")[1] for r in range(world)]

        def call(r: int) -> torch.Tensor:
            x, weights, experts, options = given[r]
            y: torch.Tensor = ops[r](x, weights, experts, **options)
            return y

        with float8.capture() as graph:
            outs = ranks.run(call)
        for kind in ("dropped", "one", "random"):
            for r in range(world):
                _, (x, _, experts, options) = of_kind(case, m, world, r, rows, kind)
                given[r][0].copy_(x)
                given[r][2].copy_(experts)
                for name in ("scale_x", "scale_weight"):
                    given[r][3][name].copy_(options[name])
                outs[r].fill_(torch.nan)
            graph.replay()
            float8.finish()
            for r, each in enumerate(ops):
                each.wait()
                inputs, _ = of_kind(case, m, world, r, rows, kind)
                wanted, _ = inputs.expected(r)
                assert_close(outs[r][: len(wanted)], wanted)
        graph.close()


@pytest.mark.parametrize("fast", [False, *more(True)])
def test_fast_sums_forget_small_products(float8: PtxDevice, fast: bool) -> None:
    """Of 2^14 and 1023 of 1/4; promotion loses those of the same 128 of K."""
    case = replace(CASE, k=1024, bias=False, fast=fast, room=None)
    inputs = ones(case, 40, 2, "random")
    for operand in (inputs.x, inputs.weight):
        operand.fill_(0.5)
        operand[..., 0] = 128.0
    inputs.scale_x.fill_(1)
    inputs.scale_w.fill_(1)
    with VirtualWorld(2, float8) as ranks, ExitStack() as closing:
        ops = [closing.enter_context(case.build(group=ranks.rank(r))) for r in range(2)]
        outs = ranks.run(lambda r: ops[r](*(of := inputs.arguments(r))[:3], **of[3]))
        float8.finish()
        for r, each in enumerate(ops):
            each.wait()
            assert (outs[r] == (2**14 if fast else 2**14 + 256)).all()


def kernels_of(device: Any) -> list[Any]:
    return sorted((b.config for b in device.registry.kernels.values()), key=lambda c: c.name)


# Before tests with a device of sm_80, which would be the current one.
@pytest.mark.parametrize("op", ["ag_grouped_gemm", *more("grouped_gemm_ar")])
def test_bench_draws_scales(float8: PtxDevice, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`flux bench op --transport virtual --dtype e4m3`, with max_rows, too; scales of other rows
    are noticed."""
    bench_gpus.use(float8, monkeypatch)
    # Which is only timed here, and CPUs do not have.
    product = lambda x, weight, *_, **rest: torch.zeros(1)  # noqa: E731
    monkeypatch.setattr(torch, "_scaled_grouped_mm", product, raising=False)
    sizes = {"experts": 4, "topk": 2, "scaling": "row"}
    problem = make_problem(op, 40, 128, 128, "float8_e4m3fn", 2, sizes)
    runs: Any = {"repeats": 1, "warmup": 0, "skews": (0.0, 1.0)}
    config = BenchConfig(problem=problem, backend="cuda", transport="virtual", **runs)
    found = measure(config, 0)
    assert found.complaints == [] and [m.name for m in found.methods] == ["flux", "max_rows"]
    right = FusedSparse.routed

    def wrong(self: Any, inputs: Any, case: Any) -> Any:
        scale = case.scale_x.flip(0) if case.rows else case.scale_x
        room = torch.cat([scale, case.scale_room[case.rows :]])
        return right(self, inputs, replace(case, scale_x=scale, scale_room=room))

    monkeypatch.setattr(FusedSparse, "routed", wrong)
    assert len(measure(config, 0).complaints) == 2


@pytest.mark.parametrize(
    ("change", "device", "text"),
    [
        ({"k": 2 * 24}, "float8", r"k=24.* in e4m3 \(.*scaling = row"),
        ({"n": 2 * 12}, "float8", "n=12"),
        ({"transpose": True}, "float8", "weight = kn"),
        ({}, "a100", r"in e4m3 .*on compute capability \(8, 0\)"),
    ],
)
def test_what_no_kernel_does_is_refused(
    request: pytest.FixtureRequest, change: dict[str, Any], device: str, text: str
) -> None:
    with VirtualWorld(2, request.getfixturevalue(device)) as ranks:
        case = replace(CASE, op="scatter" if "k" in change else "gather", **change)
        for rank in range(2):
            with pytest.raises(ValueError, match=text):
                case.build(group=ranks.rank(rank))

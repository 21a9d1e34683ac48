"""Kernels of experts on the PTX machine: ops of flux.moe against float64, and calls they refuse."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_map

import bench_gpus
from device_fixtures import with_flux_kernels
from emulated import EmulatedDevice
from emulated_processes import emulate, run
from flux import _C, Knobs, PeerTimeoutError
from flux.bench.config import BenchConfig
from flux.bench.op import measure
from flux.bench.places import gpu
from flux.bench.sparse import FusedSparse
from flux.core.knobs import Op
from flux.core.sparse_problem import DISPATCHING, SPARSE, make_problem
from flux.core.spec import OpSpec
from flux.kernels.config import GROUPED
from flux.moe.checks import Operands
from flux.select.kernel import op_kernel
from flux.trace import Kind, record_op
from flux.transport.loopback import LoopbackWorld
from flux.transport.virtual import VirtualWorld
from gpu_trace_cases import check_awaited
from harness import STRESS, stress_only
from moe_cases import MOE_OPS, ROUTINGS, MoeCase, MoeInputs
from moe_seeds import case_of, run_case
from reference import share
from trace_cases import of

CASE = MoeCase("gather", 90, 64, 32, 5, 3, dtype=torch.bfloat16, knobs=Knobs(comm_tile_rows=8))


@pytest.mark.parametrize("seed", range(10 * STRESS))
def test_random_routings(ptx: Any, seed: int) -> None:
    kernels = [b for b in ptx.registry.kernels.values() if b.config.op in GROUPED]
    config, case, world, kind = case_of(seed, [b.config for b in kernels])
    (built,) = (b for b in kernels if b.config == config)
    run_case(ptx, built, case, world, [kind, "random"], seed)


def calls(device: EmulatedDevice, case: MoeCase, inputs: MoeInputs, **options: Any) -> list[Any]:
    """Results of one call of all ranks, compared with float64."""
    world = inputs.world
    with VirtualWorld(world, device) as ranks, ExitStack() as closing:
        ops = [closing.enter_context(case.build(group=ranks.rank(r))) for r in range(world)]
        given = [inputs.arguments(r) for r in range(world)]
        outs = ranks.run(lambda r: ops[r](*given[r][:3], **given[r][3], **options))
        device.finish()
        for r, op in enumerate(ops):
            op.wait()
            inputs.compare(outs[r][0] if options else outs[r], r)
    return outs


def test_rows_that_no_expert_of_a_rank_has_are_gathered_too(a100: Any) -> None:
    """The kernel of a rank without routed rows awaits the rows that peers push to it."""
    case = replace(CASE, ep=2)
    inputs = MoeInputs(case, 90, 2, "random", 3)
    inputs.experts.clamp_(max=2)  # the other rank has experts 3 and 4
    a100.set_copy_delay(10_000)
    try:
        outs = calls(a100, case, inputs, return_gathered=True)
    finally:
        a100.set_copy_delay(0)
    assert outs[1][0].shape[0] == 0
    assert all(torch.equal(full, inputs.x) for _, full in outs)


def test_routed_rows_are_kept_for_a_backward(ptx: Any) -> None:
    """The kernel reads them by an index; the gradients of weights need them sorted by expert."""
    inputs = MoeInputs(CASE, 90, 2, "dropped", 3)
    with VirtualWorld(2, ptx) as ranks, ExitStack() as closing:
        ops = [closing.enter_context(CASE.build(group=ranks.rank(r))) for r in range(2)]

        def call(r: int) -> list[torch.Tensor]:
            x, weights, experts, options = inputs.arguments(r)
            given = Operands([weights], options["bias"], experts, keeps=True)
            kept: list[torch.Tensor] = ops[r].execute(x, given)
            return kept

        outs = ranks.run(call)
        ptx.finish()
        for r, op in enumerate(ops):
            op.wait()
            y, routed = outs[r]
            inputs.compare(y, r)
            assert torch.equal(routed, inputs.x[op.routing(inputs.experts).tokens])


def test_a_gate_is_applied_by_the_kernel(request: pytest.FixtureRequest) -> None:
    """Both halves of a column are in one tile, also of the last one, which is not full."""
    with with_flux_kernels(request, "90a", "gated_kernels") as device:
        for number, built in enumerate(device.registry.kernels.values()):
            activation, kn = built.config.activation.split("_")[1], built.config.weight == "kn"
            of_kernel = {"activation": activation, "gated": True, "transpose": kn}
            for n, kind in ((48, "random"), (304, "one"), (144, "none")):
                case = replace(CASE, n=n, bias=True, room=7, **of_kernel)
                run_case(device, built, case, 2, [kind, "random"], number)
                spec = OpSpec(
                    Op.ag_gemm,
                    90,
                    (n,),
                    32,
                    torch.bfloat16,
                    kn,
                    "sum",
                    experts=5,
                    topk=3,
                    activation=activation,
                    gated=True,
                )
                assert not op_kernel(spec, 2, n // 2, device, Knobs(), 8).activate_after


def _filled(op: Any, first: int, row: int, rows: int) -> list[bool]:
    """Which of the rows in the symmetric memory of an op somebody has written over the poison."""
    data = op._backend._own_data.view(torch.uint8)[first:][: rows * row]
    return (~data.view(torch.bfloat16).view(rows, -1).isnan()).all(1).tolist()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("ep", [2, 4])
def test_rows_move_where_their_experts_are(ptx: Any, ep: int) -> None:
    """Others stay as the poison left them: neither is a token sent, nor a partial stored."""
    m, world = 90, 4
    for name in ("dispatch", "combine"):
        case = replace(CASE, op=name, ep=ep)
        inputs = MoeInputs(case, m, world, "dropped", 3)
        takers = [
            {rank for rank in range(world) if any(e in inputs.part(rank)[0] for e in of_token)}
            for of_token in inputs.experts.tolist()
        ]
        with VirtualWorld(world, ptx) as ranks, ExitStack() as closing:
            ops = [closing.enter_context(case.build(group=ranks.rank(r))) for r in range(world)]
            given = [inputs.arguments(r) for r in range(world)]
            outs = ranks.run(lambda r, ops=ops, given=given: ops[r](*given[r][:3], **given[r][3]))
            ptx.finish()
            for r, op in enumerate(ops):
                op.wait()
                inputs.compare(outs[r], r)
                own, layout = share(m, world, r), op._backend.layout
                owned = range(m)[own]
                if name == "dispatch":
                    there = _filled(op, 0, layout.row_bytes, m)
                    assert there == [t in owned or r in takers[t] for t in range(m)]
                    continue
                for source in range(world):
                    where = (layout.slot_offset(source), layout.row_bytes, len(owned))
                    assert _filled(op, *where) == [source in takers[t] for t in owned]


@pytest.mark.parametrize("op", ["gather", "scatter", "reduce", "dispatch", "combine"])
def test_no_order_of_warps_changes_a_bit(ptx: Any, op: str) -> None:
    case, outs = replace(CASE, op=op), []
    try:
        for seed in range(2 * STRESS):
            ptx.cuda.seed = 1000 * seed
            outs.append(calls(ptx, case, MoeInputs(case, 77, 2, "dropped", 5)))
    finally:
        ptx.cuda.seed = 0
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


@pytest.mark.parametrize("op", ["gather", "scatter", "dispatch", "combine"])
def test_a_peer_that_makes_no_call_is_reported(ptx: Any, op: str) -> None:
    case = replace(CASE, op=op)
    x, weights, experts, options = MoeInputs(case, 40, 2, ROUTINGS[0], 1).arguments(0)
    with VirtualWorld(2, ptx) as ranks, ExitStack() as closing:
        built = [case.build(group=ranks.rank(r), timeout_s=0.2) for r in range(2)]
        for each in built:
            closing.callback(each.close)
        ranks.run(lambda r: built[0](x, weights, experts, **options) if r == 0 else None)
        with pytest.raises(PeerTimeoutError, match=r"waited more than 0\.2 s"):
            built[0].wait()


@pytest.mark.parametrize("op", MOE_OPS)
def test_the_host_reads_how_many_rows_there_are_alone(a100: Any, op: str) -> None:
    """It makes no maps, and results have as many rows, of ranks that have none too."""
    case = replace(CASE, op=op, ep=2 if MOE_OPS[op].dispatches else 1)
    with mock.patch.object(_C, "Routing", side_effect=AssertionError):
        for kind in ("dropped", "none", "one"):
            calls(a100, case, MoeInputs(case, 40, 2, kind, 3))


@pytest.mark.parametrize("op", MOE_OPS)
def test_what_kernels_cannot_route_is_refused_before_the_call(a100: Any, op: str) -> None:
    """By all ranks, with the host's words; ops can be used afterwards."""
    case = replace(CASE, op=op, ep=2 if MOE_OPS[op].dispatches else 1)
    inputs = MoeInputs(case, 40, 2, "dropped", 3)
    with VirtualWorld(2, a100) as ranks, ExitStack() as closing:
        ops = [closing.enter_context(case.build(group=ranks.rank(r))) for r in range(2)]
        given = [inputs.arguments(r) for r in range(2)]
        beyond = inputs.experts.clone()
        beyond[7, 1] = 5

        def refused(r: int) -> None:
            x, weights, experts, options = given[r]
            with pytest.raises(ValueError, match=r"must be below 5, got 5 for token 7"):
                ops[r](x, weights, beyond, **options)
            if not case.gathers:
                with pytest.raises(ValueError, match=f"expert: {len(x)}, got {len(x) - 1}"):
                    ops[r](x[1:], weights, experts, **options)

        ranks.run(refused)
        outs = ranks.run(lambda r: ops[r](*given[r][:3], **given[r][3]))
        a100.finish()
        for r, each in enumerate(ops):
            each.wait()
            inputs.compare(outs[r], r)


def test_maps_behind_a_call_that_never_ends_are_not_awaited_for_ever(a100: Any) -> None:
    x, weights, experts, options = MoeInputs(CASE, 40, 2, "random", 1).arguments(0)
    with VirtualWorld(2, a100) as ranks, ExitStack() as closing:
        ops = [CASE.build(group=ranks.rank(r), timeout_s=0.2) for r in range(2)]
        for each in ops:
            closing.callback(each.close)

        def twice(r: int) -> None:
            if r == 0:
                ops[0](x, weights, experts, **options)
                with pytest.raises(PeerTimeoutError, match=r"waited more than 0\.2 s"):
                    ops[0](x, weights, experts, **options)

        ranks.run(twice)
        assert ops[0].closed


def _padded(x: torch.Tensor, rows: int, case: MoeCase) -> torch.Tensor:
    return x if case.gathers else torch.cat([x, x.new_full((rows - len(x), x.shape[1]), torch.nan)])


@pytest.mark.parametrize("op", MOE_OPS)
def test_graphs_replay_with_other_routings(a100: Any, op: str) -> None:
    """The host reads no expert: neither when it captures, nor in replays; ranks may have none."""
    world, m = 2, 40
    case = replace(CASE, op=op, ep=2 if MOE_OPS[op].dispatches else 1, room=0)
    rows = m * case.topk
    kinds = ["random", "none", "one", "dropped", "few", "random"]
    with VirtualWorld(world, a100) as ranks, ExitStack() as closing:
        ops = [closing.enter_context(case.build(group=ranks.rank(r))) for r in range(world)]
        kept = MoeInputs(replace(case, room=None), m, world, "random", 3)
        kept.probs = torch.rand(m, case.topk)
        given = [kept.arguments(r) for r in range(world)]
        experts = kept.experts.clone()  # which all ranks read
        xs = [_padded(x, rows, case).clone() for x, *_ in given]

        def call(r: int) -> torch.Tensor:
            _, weights, _, options = given[r]
            y: torch.Tensor = ops[r](xs[r], weights, experts, max_rows=rows, **options)
            return y

        with mock.patch.object(_C, "Routing", side_effect=AssertionError):
            with a100.capture() as graph:
                outs = ranks.run(call)
            for seed, kind in enumerate(kinds):
                inputs = MoeInputs(replace(case, room=None), m, world, kind, 3 * seed + 1)
                inputs.weight, inputs.bias, inputs.probs = kept.weight, kept.bias, kept.probs
                experts.copy_(inputs.experts)
                for r, x in enumerate(xs):
                    x.copy_(_padded(inputs.arguments(r)[0], rows, case))
                    outs[r].fill_(torch.nan)
                graph.replay()
                a100.finish()
                for r, each in enumerate(ops):
                    each.wait()
                    y, want = outs[r], len(inputs.expected(r)[0])
                    assert not case.gathers or not y[want:].any()
                    inputs.compare(y[:want], r)
        graph.close()


@pytest.mark.parametrize("op", MOE_OPS)
def test_routings_without_a_result_are_reported_on_all_ranks(ptx: Any, op: str) -> None:
    """At once: no rank waits for a peer that has stopped."""
    case = replace(CASE, op=op, ep=2 if MOE_OPS[op].dispatches else 1)
    for beyond in (False, True):
        inputs = MoeInputs(case, 40, 2, "one", 3)
        most = 40 * case.topk
        said = f"chose {most} rows for ranks with part .* max_rows = {most - 1}"
        if beyond:
            inputs.experts[7, 1], said, most = 5, "chose expert 5 for token 7", most + 1
        with VirtualWorld(2, ptx) as ranks, ExitStack() as closing:
            ops = [case.build(group=ranks.rank(r), timeout_s=60) for r in range(2)]
            for each in ops:
                closing.callback(each.close)
            given = [inputs.arguments(r) for r in range(2)]
            xs = [_padded(x[: most - 1], most - 1, case) for x, *_ in given]

            rows = most - 1
            options = [{**more, "max_rows": rows} for *_, more in given]
            calls = [partial(ops[r], xs[r], *given[r][1:3], **options[r]) for r in range(2)]
            ranks.run(lambda r, calls=calls: calls[r]())
            ptx.finish()
            assert [int(each._backend._report[0]) for each in ops] == [9 if beyond else 8] * 2
            for each in ops:
                with pytest.raises(RuntimeError, match=said):
                    each.wait()


@stress_only
@pytest.mark.parametrize("op", MOE_OPS)
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_traces_show_every_tile_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, arch: str, op: str
) -> None:
    """With its expert; what waits, for what; and what is sent. Calls return the same bits."""
    monkeypatch.setenv("FLUX_TRACE", "1")
    case, m, world = replace(CASE, op=op, ep=2 if MOE_OPS[op].dispatches else 1, room=7), 77, 2
    inputs = MoeInputs(case, m, world, "dropped", 3)
    with (
        with_flux_kernels(request, arch, "traced_kernels") as device,
        VirtualWorld(world, device) as ranks,
        ExitStack() as closing,
    ):
        ops = [closing.enter_context(case.build(group=ranks.rank(r))) for r in range(world)]
        given = [inputs.arguments(r) for r in range(world)]
        outs = []

        def call() -> None:
            outs.append(ranks.run(lambda r: ops[r](*given[r][:3], **given[r][3])))

        trace = record_op(ops, call, calls=2, warmup=1)
        call()
        device.finish()
        assert trace is not None and trace.dropped == 0
        check_awaited(trace.events)
        for r, each in enumerate(ops):
            each.wait()
            inputs.compare(outs[0][r], r)
            assert all(torch.equal(out[r], outs[0][r]) for out in outs)
            tile, columns = each._backend.kernels[0].tile, each.spec.local_n(world, r)[0]
            across, rows = -(-columns // tile[1]), each.rows_by_expert(inputs.experts).tolist()
            for number in range(2):
                tiles = of(trace.events, r, number, Kind.gemm)
                places = {(e.details["tile_row"], e.details["tile_column"]) for e in tiles}
                assert len(places) == len(tiles)
                counts = Counter(e.details["expert"] for e in tiles)
                wanted = [-(-count // tile[0]) * across for count in rows]
                assert [counts[expert] for expert in range(len(rows))] == wanted
                sends = of(trace.events, r, number, Kind.send)
                sums = [e for e in trace.events if "sums the products" in e.name]
                assert bool(sends) == (op == "dispatch") and bool(sums) != case.gathers
                if sends:
                    chosen = inputs.experts[share(m, world, r)] // 3 == 1 - r  # part of the peer
                    assert sum(int(e.details["rows"]) for e in sends) == int(chosen.any(1).sum())


def bench_of(op: str, transport: str | None) -> tuple[BenchConfig, list[str]]:
    """Return a small configuration of an op, and the methods of flux."""
    heads = "all_to_all" in op
    sizes: dict[str, Any] = {"heads": (4,), "head_dim": 32} if heads else {"experts": 4}
    sizes |= {} if heads else {"topk": 2, "ep": 2 if op in DISPATCHING else 1}
    n, k = (128, 128) if heads else (64, 64)
    problem = make_problem(op, 40, n, k, "bfloat16", 2, sizes)
    runs = {"repeats": 1, "warmup": 0, "skews": (0.0,) if heads else (0.0, 1.0)}
    config = BenchConfig(problem=problem, backend="cuda", transport=transport, **runs)
    return config, ["flux"] if heads else ["flux", "max_rows"]


@pytest.mark.parametrize("op", ["grouped_gemm_rs", "dispatch_grouped_gemm", "all_to_all_gemm"])
def test_bench_of_all_ranks_on_one_gpu(a100: Any, op: str, monkeypatch: Any) -> None:
    """`flux bench op --transport virtual` compares with float64, and notices wrong results."""
    bench_gpus.use(a100, monkeypatch)
    config, names = bench_of(op, "virtual")
    found = measure(config, 0)
    assert found.complaints == [] and [method.name for method in found.methods] == names
    assert all(m.metrics and m.metrics.speedup_vs_unfused is None for m in found.methods)
    name = "__call__" if config.problem.op.exchanges else "routed"
    right = getattr(FusedSparse, name)
    with mock.patch.object(FusedSparse, name, lambda *a: tree_map(torch.neg, right(*a))):
        assert len(measure(config, 0).complaints) == len(names)


def _benches(rank: int, world: int, library: Path, kernels: Path) -> None:
    device = emulate(rank, library, kernels)
    gpu.open_machine = lambda index: bench_gpus.EmulatedMachine(device)  # type: ignore
    for op in SPARSE:
        config, names = bench_of(op, None)
        found = measure(config, rank)
        assert found.complaints == [] and [m.name for m in found.methods] == ["unfused", *names]
        assert all(m.metrics and m.metrics.speedup_vs_unfused for m in found.methods)
    device.close()


def test_bench_of_a_process_and_a_gpu_per_rank(emulator: Path, ptx_kernels: Path) -> None:
    run(2, _benches, emulator, ptx_kernels)


def test_calls_that_are_impossible_are_refused(a100: Any) -> None:
    inputs = MoeInputs(CASE, 40, 2, "random", 1)
    with VirtualWorld(2, a100) as ranks, ExitStack() as closing:
        ops = [closing.enter_context(CASE.build(group=ranks.rank(r))) for r in range(2)]
        x, weights, experts, options = inputs.arguments(0)

        def refused(r: int) -> None:
            with pytest.raises(ValueError, match=r"without max_rows .* reads how many rows"):
                ops[r](x, weights, experts, **options)

        with a100.capture() as graph:
            ranks.run(refused)
        graph.close()
        for knobs in (Knobs(direction="pull"), Knobs(order="ring1d")):
            with pytest.raises(ValueError, match="kernels send rows where their experts are"):
                replace(CASE, op="dispatch", knobs=knobs).build(group=ranks.rank(0))
        for knobs in (Knobs(path="medium"), Knobs(path="in_kernel"), Knobs(reduce="in_flight")):
            with pytest.raises(ValueError, match="path = fused or unfused and reduce = local"):
                replace(CASE, op="scatter", knobs=knobs).build(group=ranks.rank(0))
        with pytest.raises(ValueError, match="no built kernel supports"):
            replace(CASE, n=66).build(group=ranks.rank(0))
        with pytest.raises(ValueError, match="backend cuda needs one of"):
            replace(CASE, dtype=torch.float32).build(group=ranks.rank(0))
    with (
        LoopbackWorld(2, a100) as one,
        CASE.build(group=one.rank()) as op,
        pytest.raises(ValueError, match="loopback"),
    ):
        op(x, weights, experts, **options)

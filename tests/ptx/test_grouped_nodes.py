"""Ops of experts on GPUs of several nodes, with flux's kernels on the PTX machine. Ranks of one
process: between their nodes streams copy, or NVSHMEM's puts. Processes: emulated NCCL."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from device_fixtures import with_flux_kernels
from emulated import HeapWorld
from emulated_nvshmem import puts_of
from emulated_processes import Emulated, apart_from_cpus, run
from flux import Knobs, PeerTimeoutError
from flux.kernels.config import GROUPED
from flux.layers import close_pools
from flux.trace import Kind, record_op
from flux.transport.virtual import VirtualWorld, least_tile_rows
from gpu_trace_cases import check_awaited
from harness import STRESS, more, stress_only
from moe_cases import MOE_OPS, MoeCase, MoeInputs, routing_of
from moe_seeds import case_of, run_case
from op_cases import same_bits
from ptx_device import PtxDevice
from ptx_machine.gpu import LIBRARY
from reference import share
from trace_cases import of

BF16 = torch.bfloat16
CASE = MoeCase("gather", 90, 64, 32, 5, 3, dtype=BF16, knobs=Knobs(comm_tile_rows=8), room=5)
KINDS = {"random": 90, "none": 33, "one": 40, "dropped": 3}
"""Routings of calls, and tokens: the last ranks have none of 3."""

pytestmark = pytest.mark.usefixtures("poisoned")


def calls(ranks: VirtualWorld, case: MoeCase, everything: list[MoeInputs]) -> list[list[Any]]:
    """Results by call and rank, compared with float64, of calls that come back to back."""
    world = ranks.world
    with ranks, ExitStack() as closing:
        ops = [closing.enter_context(case.build(group=ranks.rank(r))) for r in range(world)]
        given = [[inputs.arguments(r) for inputs in everything] for r in range(world)]
        by_rank = ranks.run(lambda r: [ops[r](*of[:3], **of[3]) for of in given[r]])
        for op in ops:
            op.wait()
        ranks.device.finish()  # type: ignore[attr-defined]
    outs = [list(of_call) for of_call in zip(*by_rank, strict=True)]
    for inputs, results in zip(everything, outs, strict=True):
        for rank, y in enumerate(results):
            inputs.compare(y, rank)
    return outs


@pytest.mark.parametrize("seed", range(3 * STRESS))
def test_random_routings(ptx: PtxDevice, seed: int) -> None:
    """Bits repeat from run to run, in other orders of warps and streams."""
    kernels = [b for b in ptx.registry.kernels.values() if b.config.op in GROUPED]
    config, case, world, kind = case_of(seed, [b.config for b in kernels])
    (built,) = (b for b in kernels if b.config == config)
    counts = [nodes for nodes in range(2, world + 1) if world % nodes == 0]
    nodes = random.Random(seed).choice(counts)
    rows = max(case.knobs.comm_tile_rows or 0, least_tile_rows(world, case.max_m, 2))
    order = random.Random(seed).choice([None, "direct", "ring1d", "ring2d", "hierarchical"])
    case = replace(case, knobs=replace(case.knobs, comm_tile_rows=rows, order=order))
    way: Any = (world, [kind, "random"], seed, partial(VirtualWorld, nodes=nodes))
    first, _ = run_case(ptx, built, case, *way)
    again, _ = run_case(ptx, built, case, *way)
    for mine, other in zip(first, again, strict=True):
        assert all(same_bits(a, b) for a, b in zip(mine, other, strict=True)), case


@pytest.mark.parametrize("op", MOE_OPS)
def test_puts_give_the_bits_of_copies(ptx: PtxDevice, nvshmem_library: Path, op: str) -> None:
    """Late ones, too, of calls that come back to back."""
    case = replace(CASE, op=op, ep=2)
    everything = [MoeInputs(case, m, 4, kind, 3 + m) for kind, m in KINDS.items()]
    puts = puts_of(ptx, nvshmem_library)
    ptx.set_delay(1000)
    try:
        copied = calls(VirtualWorld(4, ptx, 2), case, everything)
        put = calls(HeapWorld(4, ptx, 2, puts), case, everything)
    finally:
        ptx.set_delay(0)
    for mine, other in zip(copied, put, strict=True):
        assert all(same_bits(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("puts", [False, True])
@pytest.mark.parametrize("op", MOE_OPS)
def test_routings_without_a_result_are_reported_on_all_nodes(
    a100: PtxDevice, nvshmem_library: Path, op: str, puts: bool
) -> None:
    """At once, though sums of other nodes never come."""
    case = replace(CASE, op=op, ep=2, room=0)
    inputs = MoeInputs(case, 40, 4, "one", 3)
    inputs.experts[7, 1] = 5
    make = partial(HeapWorld, puts=puts_of(a100, nvshmem_library)) if puts else VirtualWorld
    with make(4, a100, nodes=2) as ranks, ExitStack() as closing:
        ops = [case.build(group=ranks.rank(r), timeout_s=60) for r in range(4)]
        for each in ops:
            closing.callback(each.close)
        given = [inputs.arguments(r) for r in range(4)]
        ranks.run(lambda r: ops[r](*given[r][:3], **given[r][3]))
        a100.finish()
        for each in ops:
            with pytest.raises(RuntimeError, match="chose expert 5 for token 7: there is none"):
                each.wait()


@pytest.mark.parametrize("op", ["gather", "combine", *more("scatter", "reduce", "dispatch")])
def test_a_node_that_makes_no_call_is_noticed(a100: PtxDevice, op: str) -> None:
    case = replace(CASE, op=op, ep=2)
    inputs = MoeInputs(case, 40, 4, "random", 1)
    with VirtualWorld(4, a100, 2) as ranks, ExitStack() as closing:
        ops = [case.build(group=ranks.rank(r), timeout_s=0.5) for r in range(4)]
        for each in ops:
            closing.callback(each.close)
        given = [inputs.arguments(r) for r in range(2)]
        ranks.run(lambda r: ops[r](*given[r][:3], **given[r][3]) if r < 2 else None)
        for r in range(2):
            with pytest.raises(PeerTimeoutError, match=f"rank {r}"):
                ops[r].wait()
            ops[r].close()
        with pytest.raises(PeerTimeoutError, match=r"rank 2: rank [01] gave up in call 1"):
            ops[2].wait()


def _calls_of_a_process(rank: int, world: int, kernels: Path) -> None:
    """On two hosts, of which NCCL connects the ranks: fused, and by gloo's collectives."""
    here = Emulated(rank, LIBRARY, rank // 2, kernels)
    here.device.set_delay(300)
    for op in MOE_OPS:
        for knobs, room in (("cache", 5), ("cache", None), (Knobs(path="unfused"), 5)):
            case = replace(CASE, op=op, ep=2, knobs=knobs, room=room)
            everything = [MoeInputs(case, m, world, kind, 3 + m) for kind, m in KINDS.items()]
            with case.build(backend="cuda") as made:
                for inputs in everything:
                    x, weights, experts, options = inputs.arguments(rank)
                    y = made(x, weights, experts, **options)
                    made.wait()
                    here.device.finish()
                    inputs.compare(y, rank)
            with pytest.raises(ValueError, match="path = fused or unfused"):
                case.build(backend="cuda", tuning=Knobs(path="medium"))
    here.close()


def test_processes_on_two_hosts(ptx_kernels: Path) -> None:
    run(4, _calls_of_a_process, ptx_kernels)


@stress_only
@pytest.mark.parametrize("op", MOE_OPS)
def test_traces_show_what_nodes_exchange(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    monkeypatch.setenv("FLUX_TRACE", "1")
    case, m, world = replace(CASE, op=op, ep=2), 77, 4
    inputs = MoeInputs(case, m, world, "dropped", 3)
    with (
        with_flux_kernels(request, "80", "traced_kernels") as device,
        VirtualWorld(world, device, nodes=2) as ranks,
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
            assert all(same_bits(out[r], outs[0][r]) for out in outs)
            across = [of(trace.events, r, number, Kind.send) for number in range(2)]
            assert all(events for events in across)


LAYER = MoeCase("gather", 45, 64, 32, 5, 2, 2, BF16)


def _trained(
    rank: int, world: int, first: str, second: str, path: str | None
) -> list[torch.Tensor]:
    """Results and gradients of a layer of experts, with several routings."""
    m, n, k, experts = LAYER.max_m, LAYER.n, LAYER.k, LAYER.experts
    knobs = "cache" if path is None else Knobs(path=path)
    here, part = MoeInputs(LAYER, m, world, "none", 1).part(rank)
    mine = slice(here.start, here.stop)
    seen = []
    with ExitStack() as closing:
        up = closing.enter_context(replace(LAYER, op=first, knobs=knobs).build())
        turned = replace(LAYER, op=second, n=k, k=n, knobs=knobs)
        down = closing.enter_context(turned.build())
        for seed, kind in enumerate(("random", "one", "none")):
            torch.manual_seed(seed)
            choices = routing_of(LAYER, m, kind, seed)
            shapes = (m, k), (experts, n, k), (experts, k, n), (experts, n)
            x, w1, w2, b1 = (torch.randn(shape).bfloat16() for shape in shapes)
            own = share(m, world, rank)
            parts = [x[own], w1[mine, part], w2[mine, :, part], b1[mine, part]]
            copied = [t.contiguous().clone() for t in (*parts, torch.rand(m, LAYER.topk))]
            rows, one, two, bias, probs = (t.requires_grad_() for t in copied)
            z = down(torch.tanh(up(rows, one, choices, bias)), two, choices, probs)
            z.backward(torch.linspace(-1, 1, z.numel()).view_as(z).bfloat16())
            seen += [z.detach().clone(), *(t.grad for t in copied if t.grad is not None)]
    close_pools()
    return seen


@stress_only
@pytest.mark.parametrize("path", [None, "unfused"])
@pytest.mark.parametrize(
    ("first", "second"), [("gather", "scatter"), ("gather", "reduce"), ("dispatch", "combine")]
)
def test_layers_train_as_on_cpus(
    backward_kernels: Path, first: str, second: str, path: str | None
) -> None:
    """On two hosts of two GPUs: gradients of all operands, and a backward with its own kernels."""
    where = (LIBRARY, backward_kernels, 2)
    for of_rank in run(4, apart_from_cpus, *where, _trained, first, second, path):
        assert len(of_rank) == 18 and max(of_rank) < 0.02, of_rank

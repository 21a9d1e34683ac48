"""GemmAllToAll and AllToAllGemm with flux's kernels on the PTX machine, and calls they refuse."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from device_fixtures import with_flux_kernels
from emulated import EmulatedDevice, HeapWorld
from emulated_nvshmem import puts_of
from flux import Knobs, PeerTimeoutError
from flux.backends.cuda.exchange import ExchangeCalls
from flux.trace import Kind, record_op
from flux.transport.loopback import LoopbackWorld
from flux.transport.virtual import VirtualWorld
from flux.ulysses import AllToAllGemm, GemmAllToAll
from gpu_trace_cases import check_awaited
from harness import STRESS, stress_only
from op_cases import same_bits
from trace_cases import of
from ulysses_cases import UlyssesCase, UlyssesInputs
from ulysses_seeds import case_of, run_case, suits

CASE = UlyssesCase((40, 40), (8, 4, 4), 16, 64, batch=2, dtype=torch.bfloat16)
OPS = pytest.mark.parametrize("kind", [GemmAllToAll, AllToAllGemm])


def check(inputs: UlyssesInputs, kind: Any, results: list[Any]) -> None:
    compare = inputs.check_projected if kind is GemmAllToAll else inputs.check_output
    for rank, result in enumerate(results):
        compare(result, rank)


def arguments(inputs: UlyssesInputs, kind: Any) -> list[tuple[Any, ...]]:
    of_rank = inputs.projected if kind is GemmAllToAll else inputs.given
    return [of_rank(rank) for rank in range(len(inputs.case.lengths))]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("seed", range(8 * STRESS))
def test_random_sequences(ptx: Any, seed: int) -> None:
    kernels = [b for b in ptx.registry.kernels.values() if suits(b.config)]
    config, case = case_of(seed, [b.config for b in kernels])
    (built,) = (b for b in kernels if b.config == config)
    run_case(ptx, built, case, seed)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("seed", range(2 * STRESS))
def test_random_sequences_on_nodes(ptx: Any, nvshmem_library: Path, seed: int) -> None:
    """NVSHMEM's puts, late ones too, give the bits of copies on streams."""
    kernels = [b for b in ptx.registry.kernels.values() if suits(b.config)]
    config, case = case_of(seed, [b.config for b in kernels])
    (built,) = (b for b in kernels if b.config == config)
    world = len(case.lengths)
    counts = [nodes for nodes in range(2, world + 1) if world % nodes == 0]
    nodes = random.Random(seed).choice(counts)
    puts = partial(HeapWorld, nodes=nodes, puts=puts_of(ptx, nvshmem_library))
    results, _ = run_case(ptx, built, case, seed, partial(VirtualWorld, nodes=nodes))
    ptx.set_delay(1000)
    try:
        others, _ = run_case(ptx, built, case, seed, puts)
    finally:
        ptx.set_delay(0)
    for mine, other in zip(results, others, strict=True):
        assert all(same_bits(a, b) for a, b in zip(mine, other, strict=True)), case


@OPS
def test_calls_of_changing_lengths_share_an_op(ptx: Any, kind: Any) -> None:
    """Sizes of a rank's part change, and with them what a kernel's workspace needs."""
    with VirtualWorld(2, ptx) as ranks, ExitStack() as closing:
        build = {"max_m": 2 * 2 * 200}
        ops = [
            closing.enter_context(CASE.build(kind, group=ranks.rank(r), **build)) for r in (0, 1)
        ]
        for seed, lengths in enumerate([(3, 200), (200, 200), (0, 7), (200, 1), (5, 5)]):
            case = UlyssesCase(lengths, CASE.heads, 16, 64, dtype=torch.bfloat16)
            inputs = UlyssesInputs(case, seed)
            given = arguments(inputs, kind)
            outs = ranks.run(lambda r, given=given: ops[r](*given[r]))
            ptx.finish()
            for op in ops:
                op.wait()
            check(inputs, kind, outs)


@pytest.mark.usefixtures("poisoned")
@OPS
def test_replays_of_a_graph_are_calls(ptx: Any, kind: Any) -> None:
    case = replace(
        CASE, batch=1
    )  # rows of a rank are in one piece, so that no torch op copies them
    with VirtualWorld(2, ptx) as ranks, ExitStack() as closing:
        ops = [closing.enter_context(case.build(kind, group=ranks.rank(r))) for r in range(2)]
        inputs = UlyssesInputs(case, 0)
        given = arguments(inputs, kind)
        with ptx.capture() as graph:
            outs = ranks.run(lambda r: ops[r](*given[r]))
        for seed in (1, 2, 3):
            fresh = UlyssesInputs(case, seed)
            for old, new in zip(given, arguments(fresh, kind), strict=True):
                old[0].copy_(new[0])
                old[1].copy_(new[1])
                old[2].copy_(new[2])
            graph.replay()
            ptx.finish()
            check(fresh, kind, outs)
            if seed == 2:  # an eager call between two replays
                eager = ranks.run(lambda r: ops[r](*given[r]))
                ptx.finish()
                check(fresh, kind, eager)
        for op in ops:
            op.wait()
        graph.close()


@pytest.mark.parametrize("world", [2, 4])
def test_heads_that_ranks_share_are_added_up(ptx: Any, world: int) -> None:
    """As the backward of grouped queries does: keys and values are fewer than ranks."""
    case = UlyssesCase((9,) * world, (world, 2, 1), 8, 24, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    draw = [
        [torch.randn(2, 9 * world, 1, 8, generator=generator).bfloat16() for _ in case.heads]
        for _ in range(world)
    ]
    heads = [[t.transpose(1, 2) for t in of_rank] for of_rank in draw]
    weight = torch.randn(24, case.packed, generator=generator).bfloat16()
    wanted = torch.zeros(2, 9 * world, case.packed)
    for rank in range(world):
        base = 0
        for tensor, count in zip(draw[rank], case.heads, strict=True):
            first = 8 * (base + rank * count // world)
            wanted[..., first : first + 8] += tensor[:, :, 0].float()
            base += count
    with VirtualWorld(world, ptx) as ranks, ExitStack() as closing:
        ops = [
            closing.enter_context(case.build(AllToAllGemm, case.heads, group=ranks.rank(r)))
            for r in range(world)
        ]
        outs = ranks.run(lambda r: ops[r].gathered(heads[r], weight, [], True))
        alone = ranks.run(lambda r: ops[r].gathered(heads[r], None, [], True))
        ptx.finish()
        for rank, op in enumerate(ops):
            op.wait()
            y, gathered = outs[rank]
            own = wanted[:, case.own(rank)]
            torch.testing.assert_close(gathered.view(own.shape), own.bfloat16(), rtol=0, atol=0)
            assert torch.equal(alone[rank][0], gathered)
            product = own.double() @ weight.double().t()
            torch.testing.assert_close(y.double(), product, rtol=3e-2, atol=6e-2)


@OPS
def test_a_rank_that_makes_no_call_is_reported(device: EmulatedDevice, kind: Any) -> None:
    """With stand-ins: behind a wait that is let go, a kernel reads what copies still write."""
    given = arguments(UlyssesInputs(CASE, 0), kind)
    with VirtualWorld(2, device) as ranks, ExitStack() as closing:
        ops = [CASE.build(kind, group=ranks.rank(r), timeout_s=0.2) for r in range(2)]
        for op in ops:
            closing.callback(op.close)
        ranks.run(lambda r: ops[0](*given[0]) if r == 0 else None)
        with pytest.raises(PeerTimeoutError, match=r"0\.2 s"):
            ops[0].wait()


@OPS
def test_a_node_that_makes_no_call_is_noticed(device: EmulatedDevice, kind: Any) -> None:
    case = replace(CASE, lengths=(40,) * 4)
    given = arguments(UlyssesInputs(case, 0), kind)
    with VirtualWorld(4, device, 2) as ranks, ExitStack() as closing:
        ops = [case.build(kind, group=ranks.rank(r), timeout_s=0.3) for r in range(4)]
        for op in ops:
            closing.callback(op.close)
        ranks.run(lambda r: ops[r](*given[r]) if r < 2 else None)
        for r in range(2):
            with pytest.raises(PeerTimeoutError, match=f"rank {r}"):
                ops[r].wait()
            ops[r].close()
        with pytest.raises(PeerTimeoutError, match=r"rank 2: rank [01] gave up in call 1"):
            ops[2].wait()


@OPS
def test_heads_that_a_slow_rank_reads_stay(
    device: EmulatedDevice, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is ahead: rank 1 takes what it was sent a call later, or has more tiles to copy."""
    case = replace(CASE, lengths=(1, 40), options=(("tuning", Knobs(comm_tile_rows=8)),))
    place = ExchangeCalls._place

    def slow(self: ExchangeCalls, *args: Any) -> None:
        time.sleep(0.1 * self._rank)
        place(self, *args)

    monkeypatch.setattr(ExchangeCalls, "_place", slow)
    device.set_copy_delay(0 if kind is GemmAllToAll else 20_000)
    try:
        with VirtualWorld(2, device) as ranks, ExitStack() as closing:
            ops = [closing.enter_context(case.build(kind, group=ranks.rank(r))) for r in range(2)]
            everything = [UlyssesInputs(case, seed) for seed in range(3)]
            given = [arguments(inputs, kind) for inputs in everything]
            made = ranks.run(lambda r: [ops[r](*of_rank[r]) for of_rank in given])
            device.finish()
            for op in ops:
                op.wait()
    finally:
        device.set_copy_delay(0)
    for number, inputs in enumerate(everything):
        check(inputs, kind, [made[rank][number] for rank in range(2)])


@OPS
def test_what_cannot_run_is_refused(a100: EmulatedDevice, kind: Any) -> None:
    with VirtualWorld(2, a100) as ranks:
        with pytest.raises(TypeError, match="float64"):
            CASE.build(kind, group=ranks.rank(0), dtype=torch.int32)
        with pytest.raises(ValueError, match="backend cuda needs one of"):
            ranks.run(lambda r: CASE.build(kind, group=ranks.rank(r), dtype=torch.float32))
    with LoopbackWorld(2, a100) as world, CASE.build(kind, group=world.rank()) as op:
        given = arguments(UlyssesInputs(CASE, 0), kind)[0]
        with pytest.raises(ValueError, match="heads need peers with a GPU of their own"):
            op(*given)


def test_blocks_are_awaited_beside_the_kernel(a100: EmulatedDevice) -> None:
    knobs = Knobs(sm_margin=0)
    with VirtualWorld(2, a100) as ranks, pytest.raises(ValueError, match="sm_margin must be 1"):
        ranks.run(lambda r: CASE.build(GemmAllToAll, group=ranks.rank(r), tuning=knobs))


@stress_only
@OPS
def test_traces_show_messages_between_nodes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setenv("FLUX_TRACE", "1")
    case = replace(CASE, lengths=(20,) * 4)
    inputs = UlyssesInputs(case, 0)
    given, outs = arguments(inputs, kind), []
    with (
        with_flux_kernels(request, "80", "traced_kernels") as device,
        VirtualWorld(4, device, nodes=2) as ranks,
        ExitStack() as closing,
    ):
        ops = [closing.enter_context(case.build(kind, group=ranks.rank(r))) for r in range(4)]

        def call() -> None:
            outs.append(ranks.run(lambda r: ops[r](*given[r])))

        trace = record_op(ops, call, calls=2, warmup=1)
        device.finish()
        assert trace is not None and trace.dropped == 0
        check_awaited(trace.events)
        for out in outs:
            check(inputs, kind, out)
        for rank in range(4):
            sends = of(trace.events, rank, 1, Kind.send)
            assert {int(e.details["peer"]) // 2 for e in sends} == {1 - rank // 2}


@stress_only
@OPS
def test_traces_show_tiles_and_blocks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """Each cell of the product is in one tile, each row of a block in one copy; bits stay."""
    monkeypatch.setenv("FLUX_TRACE", "1")
    case = replace(CASE, lengths=(40, 33), options=(("tuning", Knobs(comm_tile_rows=32)),))
    inputs = UlyssesInputs(case, 0)
    given, outs = arguments(inputs, kind), []
    with (
        with_flux_kernels(request, "80", "traced_kernels") as device,
        VirtualWorld(2, device) as ranks,
        ExitStack() as closing,
    ):
        ops = [closing.enter_context(case.build(kind, group=ranks.rank(r))) for r in range(2)]

        def call() -> None:
            outs.append(ranks.run(lambda r: ops[r](*given[r])))

        trace = record_op(ops, call, calls=2, warmup=1)
        call()
        device.finish()
        assert trace is not None and trace.dropped == 0
        check_awaited(trace.events)
        for op in ops:
            op.wait()
        for results in outs:
            check(inputs, kind, results)
        assert all(same_bits(a, b) for a, b in zip(_flat(outs[0]), _flat(outs[-1]), strict=True))
        for rank, length in enumerate(case.lengths):
            own = 2 * length
            for number in range(2):
                cells = Counter(
                    (row, column)
                    for d in (e.details for e in of(trace.events, rank, number, Kind.gemm))
                    for row in range(int(d["row_begin"]), int(d["row_end"]))
                    for column in range(int(d["col_begin"]), int(d["col_end"]))
                )
                width = case.packed if kind is GemmAllToAll else case.hidden
                assert set(cells.values()) == {1} and len(cells) == own * width
                copies = [
                    e for e in of(trace.events, rank, number, Kind.copy) if "peer" in e.details
                ]
                moved = [int(e.details["row_end"]) - int(e.details["row_begin"]) for e in copies]
                assert {e.details["peer"] for e in copies} == {1 - rank} and sum(moved) == own


def _flat(results: Any) -> list[torch.Tensor]:
    """All tensors of the results of all ranks."""
    return [t for result in results for t in (result if isinstance(result, tuple) else [result])]

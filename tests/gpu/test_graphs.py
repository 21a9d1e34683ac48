"""Calls captured into graphs and replayed, on the emulated device: its graphs hold what was put on
the streams, immediate values included, and its replays use streams of their own, as CUDA's may.

Kernels are flux's, on the PTX machine, and stand-ins in tests of the host code alone. With torch's
graphs: test_gpu_graphs.py.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from emulated import EmulatedDevice
from flux import Knobs, PeerTimeoutError
from flux.select.choose import Fixed
from flux.transport.loopback import LoopbackWorld
from flux.transport.virtual import VirtualWorld
from harness import more
from matrix import OPS
from reference import Inputs, Problem
from virtual_cases import knobs_of, topology_of

BF16 = torch.bfloat16
ROWS = (13, 1, 6, 16)


pytestmark = pytest.mark.usefixtures("poisoned")


class Calls:
    """One op on all ranks, and its calls: captured ones have inputs and results that stay."""

    def __init__(self, ranks: VirtualWorld, p: Problem, **options: Any) -> None:
        self.ranks, self.p, self.device = ranks, p, ranks.device
        assert isinstance(self.device, EmulatedDevice)
        self.ops = [p.build(ranks.rank(r), **options) for r in range(ranks.world)]

    def make(self, inputs: Inputs) -> tuple[list[Any], list[Any]]:
        """One call of every rank, not waited for: (arguments, results) by rank."""
        tensors = [inputs.local(r) for r in range(self.ranks.world)]
        return tensors, self.ranks.run(lambda r: self._call(self.ops[r], tensors[r], inputs.m))

    def _call(self, op: Any, local: Any, m: int) -> Any:
        x, weight, bias = local
        return op(x, weight, bias, m=m) if self.p.gathers else op(x, weight, bias)

    def inputs(self, m: int, seed: int) -> Inputs:
        return Inputs(self.p, m, self.ranks.world, seed)

    def check(self, inputs: Inputs, outs: list[Any]) -> None:
        for r in range(self.ranks.world):
            self.ops[r].wait()
            inputs.check([outs[r]], r)

    def close(self) -> None:
        for op in self.ops:
            op.close()


class Captured:
    """A graph of several calls."""

    def __init__(self, calls: Calls, rows: tuple[int, ...]) -> None:
        self.calls, self.rows = calls, rows
        with calls.device.capture() as self.graph:
            self.made = [calls.make(calls.inputs(m, seed=m)) for m in rows]

    def replay(self, seed: int) -> None:
        """Replay with new inputs and check the results in the tensors of the capture."""
        fresh = [self.calls.inputs(m, seed + i) for i, m in enumerate(self.rows)]
        for inputs, (tensors, outs) in zip(fresh, self.made, strict=True):
            for rank, mine in enumerate(tensors):
                for old, new in zip(mine, inputs.local(rank), strict=True):
                    if old is not None:
                        old.copy_(new)
            for out in outs:
                out.fill_(float("nan"))
        self.graph.replay()
        self.calls.device.finish()
        for inputs, (_, outs) in zip(fresh, self.made, strict=True):
            self.calls.check(inputs, outs)


def problem(op: str, **options: Any) -> Problem:
    return Problem(op, max(ROWS), (13,), 10, BF16, **options)


def aligned(op: str) -> Problem:
    """A problem that flux's kernels of the minimal set do on up to four ranks."""
    return Problem(op, max(ROWS), (96,), 96, BF16)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3, *more(4)])
def test_replays_with_changing_inputs_among_eager_calls(
    a100: EmulatedDevice, op: str, world: int
) -> None:
    rng = random.Random(world * 10 + OPS.index(op))
    for turn in range(2):
        a100.set_delay(rng.choice([0, 300, 1000]))
        options = {"tuning": knobs_of(rng, world), "topology": topology_of(rng, world)}
        with VirtualWorld(world, a100) as ranks:
            calls = Calls(ranks, aligned(op), **options)
            captured = Captured(calls, ROWS[turn % 2 :])
            for replay in range(4):
                for again in range(rng.randrange(3)):
                    inputs = calls.inputs(rng.choice(ROWS), 1000 + replay * 10 + again)
                    _, outs = calls.make(inputs)
                    a100.finish()
                    calls.check(inputs, outs)
                captured.replay(seed=100 * turn + 10 * replay)
            captured.graph.close()
            calls.close()


def test_graphs_of_several_sizes_share_an_op(a100: EmulatedDevice) -> None:
    a100.set_delay(300)
    with VirtualWorld(3, a100) as ranks:
        calls = Calls(ranks, aligned("gemm_ar"))
        captured = [Captured(calls, (m,)) for m in ROWS]
        for turn in random.Random(5).choices(range(len(ROWS)), k=6):
            captured[turn].replay(seed=turn)
        for each in captured:
            each.graph.close()
        calls.close()


@pytest.mark.parametrize("op", OPS)
def test_a_replay_needs_no_wait_for_the_one_before(a100: EmulatedDevice, op: str) -> None:
    """Replays and eager calls in a row, in which slow ranks meet fast ones."""
    a100.set_delay(2000)
    with VirtualWorld(4, a100) as ranks:
        calls = Calls(ranks, aligned(op), tuning=Knobs(direction="pull"))
        captured = Captured(calls, (13, 6))
        fresh = [calls.inputs(m, seed=m) for m in (13, 6)]
        eager = []
        for _ in range(4):
            captured.graph.replay()
            eager.append(calls.make(fresh[0]))
        a100.finish()
        for _, outs in eager:
            calls.check(fresh[0], outs)
        for inputs, (_, outs) in zip(fresh, captured.made, strict=True):
            calls.check(inputs, outs)
        captured.graph.close()
        calls.close()


@pytest.mark.parametrize("op", OPS)
def test_calls_on_two_streams_of_a_capture_follow_one_another(
    a100: EmulatedDevice, op: str
) -> None:
    a100.set_delay(1000)
    with VirtualWorld(2, a100) as ranks:
        calls = Calls(ranks, aligned(op))
        aside = [ranks.new_stream() for _ in range(2)]
        fresh = [calls.inputs(m, seed=m) for m in (13, 6, 13)]
        tensors = [[inputs.local(r) for r in range(2)] for inputs in fresh]

        def in_turn(rank: int) -> list[Any]:
            own, outs = a100.current_stream(), []
            a100.driver.order_after(later=aside[rank], earlier=own)
            for turn, inputs in enumerate(fresh):
                with a100.on_stream(aside[rank] if turn % 2 else own):
                    outs.append(calls._call(calls.ops[rank], tensors[turn][rank], inputs.m))
            a100.driver.order_after(later=own, earlier=aside[rank])
            return outs

        with a100.capture() as graph:
            by_rank = ranks.run(in_turn)
        for _ in range(3):
            graph.replay()
            a100.finish()
            for turn, inputs in enumerate(fresh):
                calls.check(inputs, [outs[turn] for outs in by_rank])
        graph.close()
        calls.close()


@pytest.mark.parametrize("op", OPS)
def test_rank_that_does_not_replay_raises_on_its_peers(a100: EmulatedDevice, op: str) -> None:
    """The other ranks time out, notify the rank, and can be closed."""
    a100.set_delay(0)
    with VirtualWorld(2, a100) as ranks:
        calls = Calls(ranks, aligned(op), timeout_s=0.3)
        inputs = calls.inputs(13, seed=1)
        tensors = [inputs.local(r) for r in range(2)]
        graphs = []
        for r in range(2):
            with a100.on_stream(ranks.streams[r]), a100.capture() as graph:
                calls._call(calls.ops[r], tensors[r], inputs.m)
            graphs.append(graph)
        with a100.on_stream(ranks.streams[0]):
            graphs[0].replay()
        waits = "same place in the call" if op == "ag_gemm" else "entry of rank 1"
        with pytest.raises(PeerTimeoutError, match=f"waited more than 0.3 s for .*{waits}"):
            calls.ops[0].wait()
        with pytest.raises(PeerTimeoutError, match="rank 0 gave up"):
            calls.ops[1].wait()
        a100.driver.synchronize(ranks.streams[0])
        for graph in graphs:
            graph.close()
        calls.close()


def test_a_timeout_of_a_rank_gives_no_silently_wrong_result(a100: EmulatedDevice) -> None:
    """Copies of a graph cannot be kept back: whom they may have reached is told before."""
    a100.set_delay(0)
    with VirtualWorld(2, a100) as ranks:
        calls = Calls(ranks, aligned("ag_gemm"), timeout_s=0.2)
        inputs = calls.inputs(13, seed=1)
        tensors = [inputs.local(r) for r in range(2)]
        with a100.on_stream(ranks.streams[0]), a100.capture() as graph:
            calls._call(calls.ops[0], tensors[0], inputs.m)
        with a100.on_stream(ranks.streams[0]):
            graph.replay()
        a100.driver.synchronize(ranks.streams[0])
        # Rank 1 comes late and finds all that it waits for.
        with a100.on_stream(ranks.streams[1]), a100.capture() as late:
            calls._call(calls.ops[1], tensors[1], inputs.m)
        with a100.on_stream(ranks.streams[1]):
            late.replay()
        a100.driver.synchronize(ranks.streams[1])
        for op in calls.ops:
            with pytest.raises(PeerTimeoutError):
                op.wait()
        for each in (graph, late):
            each.close()
        calls.close()


class Unfused(Fixed):
    """A choice that takes path unfused, and has others."""

    variants = (Knobs(path="unfused"), Knobs(path="fused"))

    def __init__(self) -> None:
        super().__init__(Knobs(path="unfused"))


@pytest.mark.parametrize("op", OPS)
def test_a_capture_takes_a_path_without_collectives_of_the_host(
    device: EmulatedDevice, op: str
) -> None:
    """As of processes that share a GPU, whose group is gloo's. A user's own path is refused."""
    with VirtualWorld(2, device) as ranks:
        calls = Calls(ranks, problem(op))
        for each in calls.ops:
            each._choice = Unfused()
            each._schedules.clear()
        captured = Captured(calls, (6,))
        captured.replay(seed=3)
        assert calls.ops[0].schedule(6).knobs.path == "unfused"
        for each in calls.ops:
            each._choice = Fixed(Knobs(path="unfused"))
        text = "path=unfused: a CUDA graph cannot contain"
        with device.capture() as graph, pytest.raises(ValueError, match=text):
            calls.make(calls.inputs(6, seed=1))
        graph.close()
        captured.graph.close()
        calls.close()


def test_building_an_op_while_a_graph_is_captured_is_refused(device: EmulatedDevice) -> None:
    message = "AGGemm: an op cannot be built while a CUDA graph is captured"
    with (
        VirtualWorld(2, device) as ranks,
        device.capture() as graph,
        pytest.raises(ValueError, match=message),
    ):
        problem("ag_gemm").build(ranks.rank(0))
    graph.close()


def test_loopback_calls_are_not_captured(device: EmulatedDevice) -> None:
    device.set_delay(0)
    p = problem("ag_gemm")
    with LoopbackWorld(2, device) as world:
        op = p.build(world.rank())
        inputs = Inputs(p, 13, 2, seed=1)
        with device.capture() as graph:
            message = re.escape("calls cannot be captured into a CUDA graph where the host acts")
            with pytest.raises(ValueError, match=message):
                inputs.call(op, 0)
        graph.close()
        assert not op.closed
        op.close()


def test_memory_that_kernels_need_belongs_to_the_graph(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace of the stream would be zeroed once, and could be replaced behind the graph."""
    device.set_delay(0)
    workspaces: list[tuple[int, int]] = []
    with VirtualWorld(2, device) as ranks:
        calls = Calls(ranks, problem("ag_gemm"))
        for op in calls.ops:
            monkeypatch.setattr(op._backend, "native", _Needy(op._backend.native, workspaces))
        inputs = calls.inputs(13, seed=1)
        calls.make(inputs)
        calls.make(inputs)
        assert len(workspaces) == 2, "a stream's workspace is made once"
        with device.capture() as graph:
            calls.make(inputs)
            calls.make(inputs)
        assert len(workspaces) == 6 and len(set(workspaces)) == 6, "every captured call has its own"
        calls.make(inputs)
        assert len(workspaces) == 8, "and eager ones do not use it"
        device.finish()
        graph.close()
        calls.close()


class _Needy:
    """A native op whose kernels want memory."""

    def __init__(self, native: Any, sizes: list[tuple[int, int]]) -> None:
        self._native, self._sizes = native, sizes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def workspace_bytes(self, *_: object) -> int:
        return 64

    def set_workspace(self, stream: int, address: int, size: int) -> None:
        assert size == 64
        self._sizes.append((stream, address))
        self._native.set_workspace(stream, address, size)

"""Run one rank on a GPU with a real link: measures how much PCIe time flux hides.

Rank 0 is on the GPU, its peers are simulated (flux/transport/loopback.py). Communication alone is
one copy per peer and direction, all chunks whole, both directions of the link at once, plus flux's
own sum for a reduction. No library can be faster on this link. `unfused` is that communication
before or after the GEMM. Times are the GPU's. The data sent to the peers is checked too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import flux
from flux import _C
from flux.bench.config import BenchConfig
from flux.bench.methods import Fused, LibraryMethod, Method, whole_gemms
from flux.bench.places import gpu
from flux.bench.places.base import Call, Timing
from flux.bench.places.gpu import GpuMachine
from flux.bench.reference import (
    Inputs,
    Reference,
    Verdict,
    accumulate,
    error_bound,
    judge,
    judge_values,
    make_inputs,
    zeros_for,
)
from flux.core.problem import Problem
from flux.core.tensors import address_of
from flux.transport.device import Device
from flux.transport.loopback import REAL, LoopbackWorld

T = TypeVar("T")


@dataclass
class Played(Inputs):
    """Inputs of rank 0, and the data of ranks 1, 2, ..., in pinned memory.

    `rows`: their shards of x, or their partials of rank 0's rows. `results` (gemm_ar): their rows
    of the result.
    """

    rows: list[torch.Tensor]
    results: list[torch.Tensor] | None


@dataclass
class Right:
    """The right result of rank 0, and the right data for the peers."""

    returned: Reference
    gathered: torch.Tensor | None  # [M, K] on the host, for ag_gemm
    partials: list[Reference]  # of each rank's rows, for the other ops


class LoopbackLink:
    """Copies in both directions at once, between two points of the current stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams = [device.driver.create_stream() for _ in range(2)]

    def move(self, *directions: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy; each direction is pairs (to, from) of contiguous tensors."""
        driver, current = self._device.driver, self._device.current_stream()
        for stream, pairs in zip(self._streams, directions, strict=True):
            driver.order_after(later=stream, earlier=current)
            for to, source in pairs:
                driver.copy(stream, address_of(to), address_of(source), to.numel() * to.itemsize)
        for stream in self._streams:
            driver.order_after(later=current, earlier=stream)

    def close(self) -> None:
        """Wait for the streams and destroy them."""
        for stream in self._streams:
            self._device.driver.synchronize(stream)
            self._device.driver.destroy_stream(stream)


class LoopbackUnfused(LibraryMethod):
    """Whole chunks over the link before or after one torch.mm, in persistent buffers."""

    name = "unfused"

    def __init__(
        self, problem: Problem, machine: GpuMachine, link: LoopbackLink, adder: _C.Kernel
    ) -> None:
        self._problem, self._machine, self._link, self._adder = problem, machine, link, adder
        self._own = [end - begin for begin, end in map(problem.rows, range(problem.world))]
        self._peers = range(1, problem.world)
        width = problem.k if problem.op.gathers else problem.n
        self._whole = self._room(problem.m, width)  # gathered rows, or the product
        self._received = [self._host(self._own[peer], width) for peer in self._peers]
        if not problem.op.gathers:
            self._slots = [self._room(self._own[0], width) for _ in self._peers]
            self._sum = self._room(self._own[0], width)
        if problem.op.all_reduces:
            self._result = self._room(problem.m, width)
            self._told = [self._host(self._own[0], width) for _ in self._peers]

    def _room(self, rows: int, columns: int) -> torch.Tensor:
        dtype, device = self._problem.torch_dtype, self._machine.device.torch_device
        return torch.empty(rows, columns, dtype=dtype, device=device)

    def _host(self, rows: int, columns: int) -> torch.Tensor:
        dtype = self._problem.torch_dtype
        return self._machine.device.pinned(rows * columns, dtype).view(rows, columns)

    def __call__(self, inputs: Played) -> torch.Tensor:
        """Compute the op."""
        if self._problem.op.gathers:
            self.communicate(inputs)
            out = self._room(self._problem.m, inputs.weight.shape[0])
            self._multiply(self._whole, inputs.weight, out)
            return out
        self._multiply(inputs.x, inputs.weight, self._whole)
        self.communicate(inputs)
        return self._result if self._problem.op.all_reduces else self._sum

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        def run() -> None:
            torch.mm(x, weight.t(), out=out)

        self._machine.device.enqueue(run)

    def communicate(self, inputs: Played) -> None:
        """Copy as the collective would on this rank, and reduce."""
        chunks = self._whole.split(self._own)
        if self._problem.op.gathers:
            self._copy(chunks[0], inputs.x)
            self._link.move(
                list(zip(chunks[1:], inputs.rows, strict=True)),
                [(to, inputs.x) for to in self._received],
            )
            return
        self._link.move(
            list(zip(self._slots, inputs.rows, strict=True)),
            list(zip(self._received, chunks[1:], strict=True)),
        )
        self._adder.reduce(self._sum_args(chunks[0]), self._machine.device.current_stream())
        if inputs.results is not None:
            own, *others = self._result.split(self._own)
            self._copy(own, self._sum)
            self._link.move(
                list(zip(others, inputs.results, strict=True)),
                [(to, self._sum) for to in self._told],
            )

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        device, size = self._machine.device, to.numel() * to.itemsize
        device.driver.copy(device.current_stream(), address_of(to), address_of(source), size)

    def _sum_args(self, own: torch.Tensor) -> _C.ReduceArgs:
        """Return arguments to add the slots up, without waiting for flags."""
        problem, args = self._problem, _C.ReduceArgs()
        args.rows, args.n, args.m, args.world = self._own[0], problem.n, problem.m, problem.world
        args.tile_m, args.tile_n = self._adder.tile
        args.set_slots([address_of(own), *(address_of(slot) for slot in self._slots)])
        args.set_outs([address_of(self._sum)])
        args.slot_ld = args.out_ld = problem.n
        args.scale, args.sm_count = 1.0, self._machine.device.sm_count
        return args

    def knobs(self) -> dict[str, Any]:
        """Return the description of collective and GEMM."""
        return {"path": "unfused", "collective": "copies, whole chunks", "gemm": "torch.mm"}


class RealRank:
    """The place: rank 0, and the simulated peers."""

    comparable = True

    def __init__(self, config: BenchConfig, rank: int) -> None:
        self.problem = config.problem
        self.machine = gpu.open_shared_machine()
        self.device: str | None = self.machine.name
        self._ranks = LoopbackWorld(config.problem.world, self.machine.device)
        self._link = LoopbackLink(self.machine.device)
        self._unfused: LoopbackUnfused | None = None  # the last one made

    def fused(self, name: str, config: BenchConfig, knobs: flux.Knobs | None) -> Fused:
        """Return a flux op on this rank."""
        return Fused(name, config, knobs, self._ranks.rank())

    def factory(self, config: BenchConfig, rank: int) -> list[Method]:
        """Return the default methods."""
        chosen = flux.Knobs(**config.knobs) if config.knobs else None
        medium = self.fused("medium", config, flux.Knobs(path="medium"))
        return self.beside_unfused([medium, self.fused("flux", config, chosen)])

    def beside_unfused(self, fused: list[Fused]) -> list[Method]:
        """Return these ops, and the unfused method to compare them with."""
        adder = fused[0].op._backend.kernels[0]
        self._unfused = LoopbackUnfused(self.problem, self.machine, self._link, adder)
        return [self._unfused, *fused]

    def share(self, value: T) -> list[T]:
        """Return the value of the one process."""
        return [value]

    def inputs(self, seed: int) -> Played:
        """Return fresh inputs of rank 0, and the peers' data."""
        problem = self.problem
        own = self.machine.put(make_inputs(problem, REAL, seed))
        generator = torch.Generator().manual_seed(seed * 1_000_003 + problem.world)
        # A partial is a sum of K/W products.
        size = 1.0 if problem.op.gathers else max(1, own.x.shape[1]) ** 0.5

        def pinned(rows: int, columns: int) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=generator) * size
            memory = self.machine.device.pinned(drawn.numel(), problem.torch_dtype)
            return memory.view(drawn.shape).copy_(drawn)

        sizes = [end - begin for begin, end in map(problem.rows, range(problem.world))]
        if problem.op.gathers:
            return Played(own.x, own.weight, [pinned(rows, problem.k) for rows in sizes[1:]], None)
        partials = [pinned(sizes[REAL], problem.n) for _ in sizes[1:]]
        results = None
        if problem.op.all_reduces:
            results = [pinned(rows, problem.n) for rows in sizes[1:]]
        return Played(own.x, own.weight, partials, results)

    def renew(self, inputs: Played) -> None:
        """Negate x and the peers' data in place."""
        for tensor in (inputs.x, *inputs.rows, *(inputs.results or ())):
            tensor.neg_()

    def give(self, inputs: Played, methods: Sequence[Method]) -> None:
        """Pass the peers' data to the ops."""
        for method in methods:
            if isinstance(method, Fused):
                self._ranks.provide(method.op, self.problem.m, inputs.rows, inputs.results)

    def reference(self, inputs: Played) -> Right:
        """Return the right result of rank 0, and the right data for the peers."""
        problem, x, weight = self.problem, inputs.x, inputs.weight
        if problem.op.gathers:
            whole = torch.cat([x, *(rows.to(x.device) for rows in inputs.rows)])
            sums = zeros_for(problem.m, weight)
            accumulate(whole, weight, sums)
            returned = Reference(sums[0], error_bound(problem, sums[1], sums[2]))
            return Right(returned, whole.cpu(), [])
        partials, carried = [], []
        for rank in range(problem.world):
            begin, end = problem.rows(rank)
            sums = zeros_for(end - begin, weight)
            accumulate(x[begin:end], weight, sums)
            partials.append(Reference(sums[0], error_bound(problem, sums[1], sums[2])))
            carried.append(sums)
        total, magnitude, size = carried[REAL]
        for rows in inputs.rows:
            total, size = total + rows.to(x.device), size + rows.to(x.device).abs()
        bound = error_bound(problem, magnitude, size)
        if inputs.results is not None:
            others = torch.cat([rows.to(x.device) for rows in inputs.results]).double()
            total = torch.cat([total, others])
            bound = torch.cat([bound, torch.zeros_like(others)])
        return Right(Reference(total, bound), None, partials)

    def judge(self, method: Method, got: Any, reference: Right) -> Verdict:
        """Compare the result of rank 0, and what a flux op sent to the peers."""
        method.wait()
        self._ranks.finish(self._ranks.agents.values())
        self.machine.synchronize()
        verdict = judge(self.problem, REAL, got, reference.returned)
        if not (verdict.ok and isinstance(method, Fused)):
            return verdict
        for peer in self._ranks.agents:
            sent = self._judge_sent(method.op, peer, got, reference)
            if not sent.ok:
                return Verdict(False, sent.max_abs_err, f"sent to rank {peer}: {sent.complaint}")
        return verdict

    def _judge_sent(self, op: Any, peer: int, got: torch.Tensor, right: Right) -> Verdict:
        """Compare the data in a peer's memory."""
        problem, peers = self.problem, op._backend.peers
        memory = peers.memory.data[peer].view(problem.torch_dtype)
        if right.gathered is not None:
            held = memory[: right.gathered.numel()].view(right.gathered.shape)
            for begin, end in self._rows_moved(op, peer):
                rows = right.gathered[begin:end].double()
                verdict = judge_values(held[begin:end], Reference(rows, torch.zeros_like(rows)))
                if not verdict.ok:
                    return verdict
            return Verdict(True, 0.0)
        partial = right.partials[peer]
        begin = peers.layout.slot_offset(REAL) // problem.itemsize
        held = memory[begin : begin + partial.expected.numel()].view(partial.expected.shape)
        verdict = judge_values(held.to(partial.expected.device), partial)
        if verdict.ok and problem.op.all_reduces:
            own = got[slice(*problem.rows(REAL))].double().cpu()
            begin = peers.layout.rest_offset // problem.itemsize
            held = memory[begin : begin + own.numel()].view(own.shape)
            verdict = judge_values(held, Reference(own, torch.zeros_like(own)))
        return verdict

    def _rows_moved(self, op: Any, peer: int) -> list[tuple[int, int]]:
        """Return the rows that this rank pushes to a peer, or that the peer pulls from it."""
        schedule = op.schedule(self.problem.m)
        if schedule.knobs.direction == "pull":
            schedule = schedule.of_rank(peer)
        moved = (t for t in schedule.transfers if (t.src, t.dst) == (REAL, peer))
        return [(t.row_begin, t.row_end) for t in moved]

    def gemms(self, inputs: Played) -> dict[str, Call]:
        """Return ways to run rank 0's whole GEMM."""
        return whole_gemms(self.problem, inputs)

    def collective(self, inputs: Played) -> Call:
        """Return the communication alone."""
        unfused = self._unfused
        assert unfused is not None, "methods are made first"
        return lambda: unfused.communicate(inputs)

    def time(self, call: Callable[[], T]) -> tuple[T, Timing]:
        """Time a call on the GPU."""
        result, elapsed = self.machine.time(call)
        return result, Timing(elapsed)

    def close(self) -> None:
        """Release the link and the ranks."""
        self._link.close()
        self._ranks.close()

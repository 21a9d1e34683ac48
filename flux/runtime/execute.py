"""Run a step schedule for real: each stream is a thread, collectives are gloo's.

Every rank runs the lanes of its stage. An operator starts when the one before it on its lane and
all that it depends on have ended, as in the simulator. Compute operators are torch's, on tensors of
the operators' shapes with random contents: they show times, not a model's loss.

Order of collectives: a lane has process groups of its own, and all ranks of a stage run the same
lanes in the same order, so calls of a group meet their equals. A send of one stage is received by a
thread of the next one, in the order in which the sender's lane has it.

Every wait has a timeout. When a thread of this rank has failed, all of its threads stop before
their next operator, and the other ranks time out.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flux.backends.unfused import all_gather, reduce_scatter
from flux.core.problem import DTYPES
from flux.ops import AGGemm, GemmAR, GemmRS
from flux.plan.graph import FUSED, RING, Operator
from flux.plan.mesh import group_partition, parse_group
from flux.plan.model import Parallel
from flux.plan.schedule import Lane, StepSchedule
from flux.plan.simulate import Timeline

_FUSED: Mapping[str, Any] = {"ag_gemm": AGGemm, "gemm_rs": GemmRS, "gemm_ar": GemmAR}


def coordinates(parallel: Parallel, rank: int) -> dict[str, int]:
    """Return the place of a rank: its number in each kind of group."""
    places, rest = {}, rank
    for name in ("tp", "cp", "dp", "pp"):  # fastest first
        size = getattr(parallel, name)
        places[name], rest = rest % size, rest // size
    return places


def members(parallel: Parallel, group: str) -> list[list[int]]:
    """Return the ranks of every group of a kind, or part of one; each rank is in one of them."""
    part = parse_group(group)
    if part.mesh:
        return [
            [ranks[place] for place in places]
            for ranks in members(parallel, part.base)
            for first in range(len(ranks))
            if (places := group_partition(part.mesh, first)[part.dim])[0] == first
        ]
    p = parallel
    if group in ("ep", "edp"):
        replica = (p.cp, p.tp) if p.expert_ranks[0] > 1 else (1, 1)
        ranks = torch.arange(p.world).view(p.pp, -1, p.ep, *replica)
    else:
        ranks = torch.arange(p.world).view(p.pp, 1, p.dp, p.cp, p.tp)
    inside = {"pp": (0,), "edp": (1, 3), "ep": (2,), "dp": (2, 3), "cp": (3,), "tp": (4,)}[group]
    beside = [dim for dim in range(ranks.ndim) if dim not in inside]
    groups: list[list[int]] = (
        ranks.permute(*beside, *inside).flatten(len(beside)).flatten(0, -2).tolist()
    )
    return groups


def own_group(
    parallel: Parallel, kind: str, timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """Make the process groups of a kind; return this rank's, None if it is alone. Collective."""
    mine = None
    for ranks in members(parallel, kind):
        group = dist.new_group(ranks, timeout) if len(ranks) > 1 else None
        mine = group if dist.get_rank() in ranks else mine
    return mine


def pass_on(
    out: torch.Tensor, into: torch.Tensor, group: dist.ProcessGroup | None
) -> list[dist.Work]:
    """Begin to send to the next rank of a group, and to receive from the one before."""
    assert group is not None  # a rank that is alone has none
    size, place = dist.get_world_size(group), dist.get_rank(group)
    works = [
        dist.isend(out, group=group, group_dst=(place + 1) % size),
        dist.irecv(into, group=group, group_src=(place - 1) % size),
    ]
    return [work for work in works if work is not None]


class OperatorWork:
    """Calls that do what operators do, on tensors of their shapes.

    Tensors are shared between operators of equal shapes: contents do not matter, only time.
    """

    def __init__(self, dtype: str, seed: int = 0, timeout_s: float = 60.0) -> None:
        self.dtype, self.timeout_s = DTYPES[dtype].torch, timeout_s
        self._fused: dict[tuple[str, tuple[int, ...], str], Any] = {}  # ops
        self._generator = torch.Generator().manual_seed(seed)
        self._tensors: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def tensor(self, use: str, *shape: int) -> torch.Tensor:
        """Return the tensor of this use and shape."""
        key = (use, shape)
        if key not in self._tensors:
            made = torch.empty(shape, dtype=self.dtype)
            self._tensors[key] = made.normal_(generator=self._generator)
        return self._tensors[key]

    def call(self, op: Operator, group: dist.ProcessGroup | None) -> Callable[[], object]:
        """Return a call that does an operator's work. Collective: it may build a fused op."""
        if op.kind in FUSED:
            return self.fused(op, group)
        if op.kind == RING:
            return self._ring(op, group)
        return self.communicate(op, group) if op.is_collective else self.compute(op)

    def compute(self, op: Operator) -> Callable[[], object]:
        """Return a call that does a compute operator's work."""
        if op.kind == "gemm":
            m, n, k = op.shape
            a, b, out = self.tensor("a", m, k), self.tensor("b", k, n), self.tensor("out", m, n)
            return lambda: torch.mm(a, b, out=out)
        if op.kind == "attention":
            return self._attention(op)
        rows, width, tensors = op.shape
        if op.kind == "norm":
            x = self.tensor("x", rows, width)
            return lambda: torch.nn.functional.layer_norm(x, (width,))
        return self._elementwise(rows * width, tensors)

    def _elementwise(self, count: int, tensors: int) -> Callable[[], object]:
        """Return a call that reads and writes as many tensors."""
        x, y, out = (self.tensor(use, count) for use in ("x", "y", "z"))

        def run() -> None:
            left = tensors
            while left >= 3:
                torch.add(x, y, out=out)
                left -= 3
            if left == 2:
                out.copy_(x)
            elif left == 1:
                out.fill_(0.5)

        return run

    def _attention(self, op: Operator) -> Callable[[], object]:
        batch, heads, queries, keys, dim = op.shape
        q = self.tensor("q", batch, heads, queries, dim)
        k, v = (self.tensor(use, batch, heads, keys, dim) for use in "kv")
        attend = torch.nn.functional.scaled_dot_product_attention
        if op.role != "dgrad":
            return lambda: attend(q, k, v, is_causal=queries == keys)
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        with torch.enable_grad():
            out = attend(q, k, v, is_causal=queries == keys)
        into = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), into, retain_graph=True)

    def _ring(self, op: Operator, group: dist.ProcessGroup | None) -> Callable[[], object]:
        """Return a call of attention in chunks, which travel to the next rank meanwhile."""
        size = 1 if group is None else dist.get_world_size(group)
        *shape, width = op.shape
        chunk = (*shape[:3], max(1, shape[3] // size), shape[4])
        attend = self._attention(op._replace(shape=chunk))
        count = op.shape[0] * op.shape[2] * width * (2 if op.role == "dgrad" else 1)
        sent, received = self.tensor("sent chunk", count), self.tensor("received chunk", count)

        def run() -> None:
            for step in range(size):
                moved = pass_on(sent, received, group) if step < size - 1 else []
                attend()
                for work in moved:
                    work.wait()
            for work in pass_on(sent, received, group) if op.role == "dgrad" and size > 1 else ():
                work.wait()

        return run

    def communicate(self, op: Operator, group: dist.ProcessGroup | None) -> Callable[[], object]:
        """Return a call that does a collective's work, and waits for it."""
        count = op.shape[0] * op.shape[1]
        if op.kind == "send":
            raise ValueError(f"{op.name}: a send has one receiver and no group")
        if group is None:  # a group of one rank
            return lambda: None
        size = dist.get_world_size(group)
        count = -(-count // size) * size
        whole = self.tensor("whole", count)
        part = self.tensor("part", count // size)
        if op.kind == "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        if op.kind == "all_gather":
            return lambda: all_gather(whole, part, group=group)
        if op.kind == "reduce_scatter":
            return lambda: reduce_scatter(part, whole, group=group)
        other = self.tensor("other", count)
        return lambda: dist.all_to_all_single(other, whole, group=group)

    def fused(self, op: Operator, group: dist.ProcessGroup | None) -> Callable[[], object]:
        """Return a call of a fused op. Collective: it builds the op, once for each shape."""
        m, n, k = op.shape
        if group is None:
            return self.compute(op._replace(kind="gemm"))
        world, gathers = dist.get_world_size(group), op.kind == "ag_gemm"
        operands: tuple[torch.Tensor, ...]
        if op.kind == "expert_gemm":  # an expert on each rank, to which tokens go evenly
            from flux.moe import DispatchGroupedGemm, GroupedGemmCombine  # few steps have experts

            kind: Any = DispatchGroupedGemm if op.dispatches else GroupedGemmCombine
            sizes = {"max_m": m * world, "n": n, "k": k, "experts": world, "topk": 1, "ep": world}
            experts = torch.arange(m * world)[:, None] % world
            operands = self.tensor("a", m, k), self.tensor("experts", 1, n, k), experts
        else:
            kind, sizes = _FUSED[op.kind], {"max_m": m, "n": n, "k": k}
            sizes["n" if gathers else "k"] *= world
            rows = m // world if gathers else m
            operands = self.tensor("a", rows, k), self.tensor("weight", n, k)
        key = (kind.__name__, op.shape, group.group_name)
        if key not in self._fused:
            self._fused[key] = kind(group, dtype=self.dtype, timeout_s=self.timeout_s, **sizes)
        made = self._fused[key]
        return lambda: made(*operands)

    def close(self) -> None:
        """Free the memory and threads of fused ops. Local; later calls of this lane raise."""
        for made in self._fused.values():
            made.close()
        self._fused.clear()


def _check_equal(schedule: StepSchedule) -> None:
    """Check that all ranks have one schedule: else collectives would meet others. Collective."""
    ops, lanes = schedule.graph.ops, sorted(schedule.lanes.items())
    order = [(lane, [ops[number] for number in numbers]) for lane, numbers in lanes]
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(repr(order).encode()).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ValueError(f"ranks {others} have another schedule than rank 0")


class Executor:
    """Runs one rank's lanes. Construction is collective: it makes process groups.

    Args:
        schedule: of the step; equal on all ranks.
        timeout_s: of each wait.

    Raises:
        ValueError: the number of ranks is another one, or ranks have unequal schedules.
        GraphError: the schedule cannot be run.
    """

    def __init__(
        self,
        schedule: StepSchedule,
        parallel: Parallel,
        work: OperatorWork,
        timeout_s: float = 60.0,
    ) -> None:
        if dist.get_world_size() != parallel.world:
            raise ValueError(
                f"the step is for {parallel.world} ranks, and there are {dist.get_world_size()}"
            )
        schedule.validate()
        _check_equal(schedule)
        self.schedule, self.parallel, self.work = schedule, parallel, work
        self.timeout = timedelta(seconds=timeout_s)
        self.rank = dist.get_rank()
        self.stage = coordinates(parallel, self.rank)["pp"]
        self.stride = parallel.world // parallel.pp  # from a stage to the next one
        ops = schedule.graph.ops
        self._receivers = {  # of sends: where the operators are that wait for them
            dep: op.stage
            for op, deps in zip(ops, schedule.graph.deps, strict=True)
            for dep in deps
            if ops[dep].kind == "send" and ops[dep].stage != op.stage
        }
        self._ended: dict[int, threading.Event] = {}
        self._times: dict[int, tuple[float, float]] = {}
        self._failure: list[BaseException] = []
        self._groups = self._make_groups()
        self._calls = self._make_calls()

    def _make_groups(self) -> dict[tuple[str, str], dist.ProcessGroup | None]:
        """Make a process group for each kind of group and stream; all ranks in the same order."""
        ops = self.schedule.graph.ops
        needed = sorted(
            {
                (stream, ops[number].group)
                for (_, stream), numbers in self.schedule.lanes.items()
                for number in numbers
                if ops[number].group and ops[number].kind != "send"
            }
        )
        # A send and its receive meet by their stage and lane.
        needed += [(f"send {lane}", "pp") for lane in self._sending()]
        return {
            (stream, kind): own_group(self.parallel, kind, self.timeout) for stream, kind in needed
        }

    def _sending(self) -> list[Lane]:
        """Return lanes with sends, in one order on all ranks."""
        ops = self.schedule.graph.ops
        return sorted(
            lane
            for lane, numbers in self.schedule.lanes.items()
            if any(ops[number].kind == "send" for number in numbers)
        )

    def _make_calls(self) -> dict[int, Callable[[], object]]:
        """Return what each operator of this stage does; tensors are allocated now."""
        calls: dict[int, Callable[[], object]] = {}
        ops = self.schedule.graph.ops
        for (stage, stream), numbers in self.schedule.lanes.items():
            for number in numbers if stage == self.stage else ():
                op = ops[number]
                if op.kind == "send":
                    calls[number] = self._transfer(number, (stage, stream), sends=True)
                else:
                    group = self._groups[stream, op.group] if op.group else None
                    calls[number] = self.work.call(op, group)
        return calls

    def _transfer(self, number: int, lane: Lane, *, sends: bool) -> Callable[[], object]:
        op = self.schedule.graph.ops[number]
        group = self._groups[f"send {lane}", "pp"]
        tensor = self.work.tensor("sent" if sends else "received", op.shape[0] * op.shape[1])
        other = self._receivers[number] if sends else op.stage
        peer = self.rank + (other - self.stage) * self.stride
        move: Callable[..., Any] = dist.send if sends else dist.recv
        return lambda: move(tensor, peer, group=group)

    def run(self) -> dict[int, tuple[float, float]]:
        """Run the step; return begin and end of this stage's operators, in ms, by number.

        All ranks begin together. Collective.

        Raises:
            RuntimeError: whatever an operator raised, on any thread of this rank.
        """
        graph = self.schedule.graph
        self._ended = {number: threading.Event() for number in range(len(graph.ops))}
        self._times, self._failure = {}, []
        receivers = [
            (lane, incoming)
            for lane in self._sending()
            if (incoming := [n for n in self.schedule.lanes[lane] if self._comes_here(n)])
        ]
        lanes = [lane for lane in self.schedule.lanes if lane[0] == self.stage]
        dist.barrier()
        began = time.perf_counter()
        threads = [
            threading.Thread(target=self._guarded, args=(self._run_lane, lane, began))
            for lane in lanes
            if lane[1] != "comp"
        ]
        threads += [
            threading.Thread(target=self._guarded, args=(self._receive, lane, numbers))
            for lane, numbers in receivers
        ]
        for thread in threads:
            thread.start()
        if (self.stage, "comp") in lanes:
            self._guarded(self._run_lane, (self.stage, "comp"), began)
        for thread in threads:
            thread.join()
        if self._failure:
            raise RuntimeError(f"rank {self.rank}: {self._failure[0]}") from self._failure[0]
        return self._times

    def _comes_here(self, number: int) -> bool:
        op = self.schedule.graph.ops[number]
        return op.kind == "send" and self._receivers[number] == self.stage

    def _guarded(self, body: Callable[..., None], *arguments: Any) -> None:
        try:
            with torch.no_grad():
                body(*arguments)
        except BaseException as error:
            self._failure.append(error)
            for event in self._ended.values():  # no thread of this rank waits any longer
                event.set()

    def _run_lane(self, lane: Lane, began: float) -> None:
        graph, stage = self.schedule.graph, self.stage
        for number in self.schedule.lanes[lane]:
            for dep in graph.deps[number]:
                if graph.ops[dep].stage == stage or self._comes_here(dep):
                    self._await(dep)
            if self._failure:
                return
            start = time.perf_counter()
            self._calls[number]()
            self._times[number] = (1e3 * (start - began), 1e3 * (time.perf_counter() - began))
            self._ended[number].set()

    def _await(self, dep: int) -> None:
        if not self._ended[dep].wait(self.timeout.total_seconds()):
            name = self.schedule.graph.ops[dep].name
            raise TimeoutError(f"{name} has not ended within {self.timeout.total_seconds():g} s")

    def _receive(self, lane: Lane, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._failure:
                return
            self._transfer(number, lane, sends=False)()
            self._ended[number].set()


def measured(
    schedule: StepSchedule, times: Mapping[int, tuple[float, float]], solo: Sequence[float]
) -> Timeline:
    """Return the timeline of a step that was run."""
    ops = schedule.graph.ops
    missing = [op.name for number, op in enumerate(ops) if number not in times]
    if missing:
        raise ValueError(f"{len(missing)} operators have not run: {missing[0]} ...")
    starts, ends = ([times[n][place] for n in range(len(ops))] for place in (0, 1))
    return Timeline(schedule, starts, ends, solo)

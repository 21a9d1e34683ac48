"""Inputs of ops of experts and heads, and right results in float64: see flux/bench/reference.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flux.bench.reference import (
    Reference,
    accumulate,
    draw,
    draw_scales,
    error_bound,
    scaled,
    zeros_for,
)
from flux.core.sparse_problem import SparseProblem
from flux.core.spec import OpSpec

Blocks = list[torch.Tensor]
Sums = tuple[torch.Tensor, ...]


def draw_choices(
    tokens: int, experts: int, topk: int, skew: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a router chooses: experts int64 [M, topk], and their probabilities.

    Args:
        tokens: M.
        experts: of all ranks.
        topk: experts of a token.
        skew: standard deviation of the experts' popularity, in logits; that of a token's own
            logits is 1. 0: experts are chosen equally often. 1: of 8 experts and topk = 2 the most
            popular one has about twice its share.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    popular = skew * torch.randn(experts, generator=generator)
    logits = torch.randn(tokens, experts, generator=generator) + popular
    probs, chosen = logits.softmax(-1).topk(topk)
    return chosen, probs


@dataclass
class Routed:
    """One routing of a call on one rank: x as the op takes it, and what the router chose.

    ``room``: x, with all rows that a router could choose if it has routed ones. ``rows``: of x.
    ``routed``: rows of this rank. ``scale_x``, ``scale_room``: of float8, [rows] or [1] of x and
    ``room``.
    """

    room: torch.Tensor
    rows: int
    routed: int
    experts: torch.Tensor
    probs: torch.Tensor
    scale_x: torch.Tensor | None = None
    scale_room: torch.Tensor | None = None

    @property
    def x(self) -> torch.Tensor:
        """The rows that there are."""
        return self.room[: self.rows]

    @property
    def exact(self) -> torch.Tensor:
        """What x stands for."""
        return scaled(self.x, self.scale_x)


@dataclass
class SparseInputs:
    """One rank's inputs.

    Attributes:
        weight: [experts of the rank, N, K] of an op of experts, else [N, K].
        routings: of an op of experts.
        scale_weight: of float8, [experts of the rank] or [experts of the rank, N].
        heads: x of an op of heads: tokens [1, own, K], or own heads [1, heads, S, D] of each
            packed tensor.
    """

    weight: torch.Tensor
    routings: list[Routed]
    heads: list[torch.Tensor]
    scale_weight: torch.Tensor | None = None

    def exact_weight(self, expert: int) -> torch.Tensor:
        """Return what the weight of an expert stands for."""
        scale = self.scale_weight
        return scaled(self.weight[expert], None if scale is None else scale[expert])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All x."""
        return [case.x for case in self.routings] + self.heads

    def to(self, device: torch.device) -> SparseInputs:
        """Return the same inputs on a device."""

        def moved(of: Any) -> dict[str, Any]:
            tensors = {f.name: getattr(of, f.name) for f in fields(of)}
            return {n: t.to(device) for n, t in tensors.items() if isinstance(t, torch.Tensor)}

        routings = [replace(case, **moved(case)) for case in self.routings]
        heads = [x.to(device) for x in self.heads]
        return replace(self, routings=routings, heads=heads, **moved(self))


class SparseShare:
    """Sizes of a problem on one rank; ``gpus``: whether ranks have GPUs."""

    def __init__(self, problem: SparseProblem, rank: int, gpus: bool = False) -> None:
        self.gpus = gpus
        self.problem, self.rank, self.world = problem, rank, problem.world
        self.spec: OpSpec = problem.spec()
        self.rows = [end - begin for begin, end in map(problem.rows, range(self.world))]
        self.width, self.depth = problem.n, problem.k
        if not problem.op.exchanges:
            self.width = self.spec.local_n(self.world, rank)[0]
            self.depth = self.spec.local_k(self.world, rank)
            self.first, self.count = self.spec.local_experts(self.world, rank)

    def routing(self, experts: torch.Tensor) -> Any:
        """Return the routed rows of this rank."""
        from flux.moe import Routing

        return Routing(experts, self.problem.experts, self.first, self.count, self.world)

    def inputs(self, seed: int, skews: tuple[float, ...]) -> SparseInputs:
        """Return fresh inputs; the router's choices are the same on all ranks.

        On GPUs NaN is behind the routed rows, for calls with ``max_rows``.
        """
        problem, dtype = self.problem, self.problem.torch_dtype
        generator = torch.Generator().manual_seed(seed * 1_000_003 + self.rank)

        def random(*shape: int, of: torch.Generator = generator) -> torch.Tensor:
            return draw(shape, dtype, of)

        if problem.op.exchanges:
            shared = torch.Generator().manual_seed(seed)
            weight = random(problem.n, problem.k, of=shared)
            if problem.name == "gemm_all_to_all":
                return SparseInputs(weight, [], [random(1, self.rows[self.rank], problem.k)])
            own = self.spec.columns_of(self.world, self.rank)
            counts = [(end - begin) // problem.head_dim for begin, end in own]
            heads = [random(1, count, problem.m, problem.head_dim) for count in counts]
            return SparseInputs(weight, [], heads)
        weight = random(self.count, self.width, self.depth)
        routings = []
        for skew in skews:
            sizes = (problem.m, problem.experts, problem.topk)
            experts, probs = draw_choices(*sizes, skew, seed)
            routed, rows = self.routing(experts).rows, self.rows[self.rank]
            most = rows
            if not problem.op.gathers:
                rows, most = routed, problem.m * problem.topk
            room = random(most if self.gpus else rows, self.depth)
            room[rows:] = torch.nan
            scales = self._scales_of_x(len(room), rows, seed, generator)
            routings.append(Routed(room, rows, routed, experts, probs, *scales))
        scale_weight = None
        if problem.scaling:
            shape = weight.shape[:2] if problem.scaling == "row" else weight.shape[:1]
            scale_weight = draw_scales(shape, generator)
        return SparseInputs(weight, routings, [], scale_weight)

    def _scales_of_x(
        self, room: int, rows: int, seed: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, ...]:
        """Return scales of the rows that there are, and of all that there is room for."""
        if not self.problem.scaling:
            return ()
        if self.problem.scaling == "row":
            scales = draw_scales((room,), generator)
            scales[rows:] = torch.nan
            return scales[:rows], scales
        # Ranks that gather x have one factor for all its rows.
        shared = torch.Generator().manual_seed(seed) if self.problem.op.gathers else generator
        scale = draw_scales((1,), shared)
        return scale, scale

    def columns(self, rank: int) -> list[slice]:
        """Return the columns of the packed dimension of a rank's heads."""
        return [slice(*bounds) for bounds in self.spec.columns_of(self.world, rank)]


class AllInputs:
    """The inputs of all ranks, as one of several processes has them. Its methods are collective."""

    def __init__(self, layout: SparseShare, inputs: SparseInputs) -> None:
        self.layout, self.inputs = layout, inputs

    def tensors(self, pick: Callable[[SparseInputs], torch.Tensor]) -> Blocks:
        """Return a tensor of all ranks' inputs, by rank."""
        return _everybody(self.layout, [pick(self.inputs)])

    def total(self, compute: Callable[[SparseShare, SparseInputs], Sums]) -> Sums:
        """Return sums over all ranks of tensors."""
        sums = compute(self.layout, self.inputs)
        for part in sums if self.layout.world > 1 else ():
            dist.all_reduce(part)
        return sums


class AllInputsHere(AllInputs):
    """The inputs of ranks that are all in this process."""

    def __init__(self, layouts: Sequence[SparseShare], inputs: Sequence[SparseInputs]) -> None:
        self._all = list(zip(layouts, inputs, strict=True))

    def tensors(self, pick: Callable[[SparseInputs], torch.Tensor]) -> Blocks:
        """Return a tensor of all ranks' inputs, by rank."""
        return [pick(inputs) for _, inputs in self._all]

    def total(self, compute: Callable[[SparseShare, SparseInputs], Sums]) -> Sums:
        """Return sums over all ranks of tensors."""
        each = [compute(*of_rank) for of_rank in self._all]
        return tuple(torch.stack(parts).sum(0) for parts in zip(*each, strict=True))


def make_reference(
    layout: SparseShare, inputs: SparseInputs, peers: AllInputs | None = None
) -> Reference:
    """Return the right results of this rank in float64, and their bounds.

    ``peers``: None: this is one of several processes. Collective then.
    """
    each = list(_expected(layout, inputs, peers or AllInputs(layout, inputs)))
    return Reference(*(torch.cat([part[i] for part in each]) for i in range(2)))


def _expected(
    layout: SparseShare, inputs: SparseInputs, peers: AllInputs
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (expected, bound) of each routing or packed tensor, as matrices."""
    problem = layout.problem
    dense = problem.dense if problem.op.exchanges else problem.scheduled
    weighted = problem.op.reduces  # by probabilities: a rounding more
    deep = replace(dense, k=problem.k * max(1, problem.topk) + weighted)

    def bounds(sums: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        expected, magnitude, carried = sums
        # Products are rounded to 16 bits before they are weighted: once more than dense partials.
        more = 1.0 if problem.op.gathers else (problem.world + 2) / (problem.world + 1)
        return expected, error_bound(deep, magnitude, carried * more)

    if problem.op.exchanges:
        for sums in _exchanged(layout, inputs, peers):
            yield bounds(sums)
        return
    for number, case in enumerate(inputs.routings):
        if problem.op.gathers:
            routing = layout.routing(case.experts)
            full = torch.cat(peers.tensors(lambda of, n=number: of.routings[n].exact))  # type: ignore[misc]
            sums = zeros_for(routing.rows, _columns(inputs.weight))
            for expert, begin, end in routing.groups(0, problem.m):
                rows = full[routing.tokens[begin:end]]
                part = tuple(total[begin:end] for total in sums)
                accumulate(rows, inputs.exact_weight(expert), part)  # type: ignore[arg-type]
            yield bounds(sums)
            continue
        own = slice(None) if problem.op.all_reduces else slice(*problem.rows(layout.rank))
        yield bounds(tuple(total[own] for total in peers.total(partial(_summed, number))))


def _columns(weights: torch.Tensor) -> torch.Tensor:
    """Return a weight of as many columns as each of [experts, N, K]; there may be no expert."""
    return weights.new_empty(weights.shape[1], 0)


def _summed(number: int, layout: SparseShare, inputs: SparseInputs) -> Sums:
    """Return a rank's part of the sums of all tokens, of one routing."""
    case, weight = inputs.routings[number], inputs.weight
    x = case.exact
    routing = layout.routing(case.experts)
    tokens, choices = routing.on(weight.device)
    sums = zeros_for(layout.problem.m, _columns(weight))
    probs = case.probs.double().reshape(-1)[choices]
    for expert, begin, end in routing.groups(0, layout.problem.m):
        part = zeros_for(end - begin, weight[0])
        accumulate(x[begin:end], inputs.exact_weight(expert), part)
        for total, more in zip(sums, part, strict=True):
            total.index_add_(0, tokens[begin:end], more * probs[begin:end, None])
    return sums


def _exchanged(layout: SparseShare, inputs: SparseInputs, peers: AllInputs) -> Iterator[Sums]:
    problem, rank, weight = layout.problem, layout.rank, inputs.weight
    if problem.name == "gemm_all_to_all":
        full = torch.cat([x[0] for x in peers.tensors(lambda of: of.heads[0])])
        for columns in layout.columns(rank):
            sums = zeros_for(problem.m, weight[columns])
            accumulate(full, weight[columns], sums)
            yield tuple(
                s.view(problem.m, -1, problem.head_dim)
                .transpose(0, 1)
                .reshape(-1, problem.head_dim)
                for s in sums
            )
        return
    begin, end = problem.rows(rank)
    sums = zeros_for(end - begin, weight)
    for owner, heads in enumerate(peers.tensors(lambda of: of.heads[0])):
        rows = heads[0, :, begin:end].transpose(0, 1).reshape(end - begin, -1)
        accumulate(rows, weight[:, layout.columns(owner)[0]], sums)
    yield sums


def _everybody(layout: SparseShare, own: Blocks) -> Blocks:
    """Return a tensor of all ranks, by rank. Collective."""
    if layout.world == 1:
        return own
    shapes: list[Any] = [None] * layout.world
    dist.all_gather_object(shapes, own[0].shape)
    tensors = [own[0].new_empty(shape) for shape in shapes]
    tensors[layout.rank] = own[0].contiguous()
    for owner, tensor in enumerate(tensors):
        if tensor.numel():
            dist.broadcast(tensor, owner)
    return tensors

"""Right results of ops of experts and heads in float64: see flux/bench/reference.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flux.bench.reference import Reference, accumulate, error_bound, zeros_for
from flux.bench.sparse import Blocks, SparseInputs, SparseShare

Sums = tuple[torch.Tensor, ...]


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
    deep = replace(dense, k=problem.k * max(1, problem.topk))

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
            full = torch.cat(peers.tensors(lambda of, n=number: of.routings[n].x))  # type: ignore[misc]
            sums = zeros_for(routing.rows, inputs.weight[0])
            for expert, begin, end in routing.groups(0, problem.m):
                rows = full[routing.tokens[begin:end]]
                part = tuple(total[begin:end] for total in sums)
                accumulate(rows, inputs.weight[expert], part)  # type: ignore[arg-type]
            yield bounds(sums)
            continue
        own = slice(None) if problem.op.all_reduces else slice(*problem.rows(layout.rank))
        yield bounds(tuple(total[own] for total in peers.total(partial(_summed, number))))


def _summed(number: int, layout: SparseShare, inputs: SparseInputs) -> Sums:
    """Return a rank's part of the sums of all tokens, of one routing."""
    case, weight = inputs.routings[number], inputs.weight
    routing = layout.routing(case.experts)
    tokens, choices = routing.on(weight.device)
    sums = zeros_for(layout.problem.m, weight[0])
    probs = case.probs.double().reshape(-1)[choices]
    for expert, begin, end in routing.groups(0, layout.problem.m):
        part = zeros_for(end - begin, weight[0])
        accumulate(case.x[begin:end], weight[expert], part)
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

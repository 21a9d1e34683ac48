"""Right results of ops of experts and heads in float64: see flux/bench/reference.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from flux.bench.reference import Reference, accumulate, error_bound, zeros_for
from flux.bench.sparse import Blocks, SparseInputs, SparseShare


def make_reference(layout: SparseShare, inputs: SparseInputs) -> Reference:
    """Return the right results of this rank in float64, and their bounds. Collective."""
    each = list(_expected(layout, inputs))
    return Reference(*(torch.cat([part[i] for part in each]) for i in range(2)))


def _expected(
    layout: SparseShare, inputs: SparseInputs
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
        for sums in _exchanged(layout, inputs):
            yield bounds(sums)
        return
    for case in inputs.routings:
        routing = layout.routing(case.experts)
        groups = routing.groups(0, problem.m)
        if problem.op.gathers:
            full = torch.cat(_everybody(layout, [case.x]))
            sums = zeros_for(routing.rows, inputs.weight[0])
            for expert, begin, end in groups:
                rows = full[routing.tokens[begin:end]]
                part = tuple(total[begin:end] for total in sums)
                accumulate(rows, inputs.weight[expert], part)  # type: ignore[arg-type]
            yield bounds(sums)
            continue
        sums = zeros_for(problem.m, inputs.weight[0])
        probs = case.probs.double().reshape(-1)[routing.choices]
        for expert, begin, end in groups:
            part = zeros_for(end - begin, inputs.weight[0])
            accumulate(case.x[begin:end], inputs.weight[expert], part)
            for total, more in zip(sums, part, strict=True):
                weighted = more * probs[begin:end, None]
                total.index_add_(0, routing.tokens[begin:end], weighted)
        for total in sums:
            if layout.world > 1:
                dist.all_reduce(total)
        own = slice(None) if problem.op.all_reduces else slice(*problem.rows(layout.rank))
        yield bounds(tuple(total[own] for total in sums))


def _exchanged(layout: SparseShare, inputs: SparseInputs) -> Iterator[tuple[torch.Tensor, ...]]:
    problem, rank, weight = layout.problem, layout.rank, inputs.weight
    if problem.name == "gemm_all_to_all":
        full = torch.cat([x[0] for x in _everybody(layout, inputs.heads)])
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
    for owner, heads in enumerate(_everybody(layout, inputs.heads)):
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

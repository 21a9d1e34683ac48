"""Work that the backward of a layer starts early: the gather of a column layer's input, started in
the backward of the row layer behind it, and the own rows' part of a row layer's weight gradient."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from flux import AGGemm, Knobs
from flux.core.env import HOST
from flux.layers import ColumnParallelLinear, RowParallelLinear, close_pools
from flux.ops.gradients import OwnRows, WeightGrad
from flux.ops.pool import pool_of
from harness import more, run_ranks
from op_cases import failing_work

S, D, F = 24, 16, 48


@contextmanager
def on_hosts(rank: int, hosts: str) -> Iterator[None]:
    """Ranks with different letters are on different hosts, those with none on one."""
    with HOST.during(hosts[rank]) if hosts else nullcontext():
        yield
        close_pools()  # a pool knows its hosts


class Block:
    """A column and a row layer in float64, their input and a gradient; equal in every instance."""

    def __init__(self, rank: int, world: int) -> None:
        torch.manual_seed(3)
        options: dict[str, Any] = {"sequence_parallel": True, "dtype": torch.float64}
        self.column = ColumnParallelLinear(D, F, **options)
        self.row = RowParallelLinear(F, D, **options)
        rows = slice(rank * S // world, (rank + 1) * S // world)
        self.x = torch.randn(S, D).double()[rows].clone().requires_grad_()
        self.dz = torch.randn(S, D).double()[rows].clone()

    def __call__(self, x: torch.Tensor | None = None) -> torch.Tensor:
        return self.row(torch.tanh(self.column(self.x if x is None else x)))

    def grads(self) -> list[torch.Tensor]:
        """Of the input and the parameters; they are gone afterwards."""
        of = [self.x, *self.column.parameters(), *self.row.parameters()]
        found = []
        for tensor in of:
            assert tensor.grad is not None
            found.append(tensor.grad)
            tensor.grad = None
        return found


def same(got: list[torch.Tensor], want: list[torch.Tensor], times: int = 1) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, times * other, rtol=1e-12, atol=1e-12)


@contextmanager
def noted(events: list[str], *what: tuple[type, str, str, str]) -> Iterator[None]:
    """Note when methods begin and end, or what they return is called."""

    def noting(original: Callable[..., Any], begin: str, end: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            events.append(begin)
            result = original(*args, **options)
            if callable(result):
                return lambda: (result(), events.append(end))[0]
            events.append(end)
            return result

        return run

    patches = [
        mock.patch.object(of, name, noting(vars(of)[name], *texts)) for of, name, *texts in what
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


# -- the gather ------------------------------------------------------------------------------------


def _order(rank: int, world: int, hosts: str) -> None:
    with on_hosts(rank, hosts):
        block, events = Block(rank, world), list[str]()
        z = block()
        with noted(
            events,
            (AGGemm, "overlapped", "dz travels", "dx of row"),
            (AGGemm, "start_gather", "x travels", "x is there"),
            (OwnRows, "multiply", "own rows", "own rows done"),
            (OwnRows, "complete", "dw of row", "dw of row done"),
            (WeightGrad, "deliver", "dw", "dw done"),
        ):
            z.backward(block.dz)
        of_row = ["dw", "dw done"]
        own: list[str] = []
        if hosts:
            own, of_row = ["own rows", "own rows done"], ["dw of row", "dw of row done"]
        assert events == [
            *("dz travels", *own, "x travels", "dx of row", *of_row),
            *("x is there", "dw", "dw done"),
        ]


@pytest.mark.parametrize("hosts", ["", "ab"])
def test_gather_overlaps_with_the_backward_of_the_row_layer(hosts: str) -> None:
    run_ranks(2, _order, hosts)


def _recomputed(rank: int, world: int) -> None:
    block = Block(rank, world)
    block().backward(block.dz)
    want = block.grads()
    for reentrant in (False, True):
        z = checkpoint(block, block.x, use_reentrant=reentrant)
        z.backward(block.dz)
        same(block.grads(), want)
    moved: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        moved.append("back")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        z = block()
    z.backward(block.dz)
    same(block.grads(), want)
    assert len(moved) == 5  # each once: x and weight of both layers, and what tanh saves
    close_pools()


def test_saved_tensors_are_asked_for_once() -> None:
    run_ranks(2, _recomputed)


def _again(rank: int, world: int) -> None:
    block = Block(rank, world)
    z = block()
    z.backward(block.dz)
    want = block.grads()
    z = block()
    z.backward(block.dz, retain_graph=True)
    z.backward(block.dz)
    same(block.grads(), want, 2)
    # The column layer's backward does not run, though its gather has begun; later it does.
    z = block()
    (dw,) = torch.autograd.grad(z, block.row.weight, block.dz, retain_graph=True)
    same([dw], want[3:4])
    z.backward(block.dz)
    same(block.grads(), want)
    torch.autograd.grad(block(), block.row.weight, block.dz)
    block().backward(block.dz)
    same(block.grads(), want)
    close_pools()


def test_partial_and_repeated_backward_give_the_same_gradients() -> None:
    run_ranks(2, _again)


def _kept(rank: int, world: int) -> None:
    block, pool = Block(rank, world), pool_of(None)
    with torch.no_grad():
        block.column(block.x)
    assert pool.early_gather is None
    y = block.column(block.x)
    early = pool.early_gather
    assert early is not None and early._ctx() is not None
    del y
    gc.collect()
    assert early._ctx() is None  # the graph is not kept for a row layer that may come
    events: list[str] = []
    other = torch.randn(S, F // world).double().requires_grad_()
    with noted(events, (AGGemm, "start_gather", "begun", "done")):
        block.row(other).backward(block.dz)
    assert not events and pool.early_gather is None
    close_pools()


def test_a_dropped_graph_is_not_kept() -> None:
    run_ranks(2, _kept)


def _freed(rank: int, world: int) -> None:
    """As Megatron does with the output of a norm: freed after forward, computed again in backward,
    between the row layer and the column layer."""
    block = Block(rank, world)
    block().backward(block.dz)
    want = block.grads()
    x = block.x * 1
    bytes_ = x.detach().clone()
    y = block.column(x)
    z = block.row(torch.tanh(y))
    storage = x.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)

    def compute_again(dy: torch.Tensor) -> None:
        storage.resize_(size)
        storage.copy_(bytes_.untyped_storage())

    y.register_hook(compute_again)
    events: list[str] = []
    with noted(events, (AGGemm, "start_gather", "begun", "done")):
        z.backward(block.dz)
    assert events == ["begun", "done"]
    same(block.grads(), want)
    close_pools()


def test_freed_input_is_gathered_after_its_recomputation() -> None:
    run_ranks(2, _freed)


def _changed(rank: int, world: int) -> None:
    block = Block(rank, world)
    x = block.x * 1
    z = block(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward(block.dz)
    dist.barrier()
    block().backward(block.dz)  # nothing is left under way
    close_pools()


def test_a_changed_input_is_refused() -> None:
    run_ranks(2, _changed)


# -- work beside the gather of dz ------------------------------------------------------------------


def _results(rank: int, world: int, hosts: str) -> None:
    block = Block(rank, world)
    block().backward(block.dz)
    want = block.grads()
    twin = copy.deepcopy(block)
    close_pools()
    with on_hosts(rank, hosts):
        twin().backward(twin.dz)
        same(twin.grads(), want)
        twin.x.requires_grad_(False)
        twin.column.requires_grad_(False)  # the row layer's input needs no gradient
        twin().backward(twin.dz)
        assert twin.row.weight.grad is not None
        same([twin.row.weight.grad], want[3:4])


@pytest.mark.parametrize("hosts", ["ab", "aab", *more("abc", "aabb")])
def test_gradients_between_hosts(hosts: str) -> None:
    run_ranks(len(hosts), _results, hosts)


def _overlapped(rank: int, world: int, hosts: str) -> None:
    with on_hosts(rank, hosts):
        for knobs in (Knobs(), Knobs(tile=(4, 8)), Knobs(path="unfused"), Knobs(swizzle="none")):
            op = AGGemm(max_m=S, n=16, k=8, tuning=knobs, timeout_s=20)
            x, weight = torch.randn(S // world, 8), torch.randn(16 // world, 8)
            calls: list[str] = []
            beside = [lambda calls=calls, what=what: calls.append(what) for what in ("one", "two")]
            y, full = op.overlapped(x, weight, *beside)
            expected, gathered = op(x, weight, return_gathered=True)
            assert calls == ["one", "two"]
            assert torch.equal(y, expected) and torch.equal(full, gathered)
            with pytest.raises(ValueError, match="x must be"):
                op.overlapped(x[:, :1], weight, *beside)
            assert len(calls) == 2 and not op.closed
            failing_work(op, x, weight, rank)


@pytest.mark.parametrize("hosts", ["", "ab"])
def test_work_runs_during_an_ag_gemm(hosts: str) -> None:
    run_ranks(2, _overlapped, hosts, timeout=60, fresh=True)


def _gathers(rank: int, world: int, hosts: str) -> None:
    with on_hosts(rank, hosts), AGGemm(max_m=30, n=world, k=5, timeout_s=20) as op:
        waits = []
        for m in (30, 7, 1):  # begun before the ones before have been waited for
            whole = torch.arange(5 * m, dtype=torch.float32).view(m, 5) + m
            begin = min(m, rank * -(-m // world))
            own = whole[begin : begin + op.own_rows(m)]
            waits.append((op.start_gather(own, m), whole))
        for wait, whole in waits:
            assert torch.equal(wait(), whole)


@pytest.mark.parametrize("hosts", ["", "aab", *more("ab", "abc")])
def test_gathers_in_flight_without_a_gemm_are_correct(hosts: str) -> None:
    run_ranks(len(hosts) or 2, _gathers, hosts)

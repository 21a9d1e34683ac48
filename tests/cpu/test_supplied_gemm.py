"""GemmRS and GemmAR with a product that the caller supplies."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flux import GemmAR, GemmRS, Knobs, PeerTimeoutError
from harness import run_ranks
from op_cases import way_of
from reference import Inputs, Problem

KNOBS = (
    Knobs(),
    Knobs(path="unfused"),
    Knobs(path="medium"),
    Knobs(path="one_shot"),
    Knobs(path="one_shot", tile=(99, 2), comm_tile_rows=2),  # GemmAR: by columns, these by rows
    Knobs(store="direct", direction="push"),
    Knobs(store="staged", tile=(3, 2), comm_tile_rows=2),  # cuts columns
    Knobs(store="direct", direction="pull", tile=(2, 3), raster=2, comm_tile_rows=2),
)


class Product:
    """x @ weight.t() from packed memory; it returns the same buffer in every call."""

    def __init__(self, weight: torch.Tensor, rows: int) -> None:
        self.weight = weight
        self.buffer = torch.empty(rows, weight.shape[0], dtype=weight.dtype)
        self.rows: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(x.shape[0])
        self.buffer.fill_(float("nan"))
        return torch.mm(x, self.weight.t(), out=self.buffer[: x.shape[0]])


def equal_to_a_weight(rank: int, world: int) -> None:
    for kind, reduce in (("gemm_rs", "sum"), ("gemm_ar", "avg")):
        for dtype in (torch.float32, torch.bfloat16):
            problem = Problem(kind, max_m=11, n=(5,), k=7, dtype=dtype, reduce=reduce)
            for knobs in KNOBS:
                with problem.build(tuning=knobs) as op:
                    for m in (1, 11, 4):
                        inputs = Inputs(problem, m, world, seed=m)
                        x, weight, bias = inputs.local(rank)
                        product = Product(weight, m)
                        for _ in range(2):  # the second call repeats the first
                            inputs.check([op(x, None, bias, gemm=product)], rank, way_of(op, m))
                        # A trial with one row, and each row once in each call.
                        assert sum(product.rows) == 1 + 2 * m, (knobs, product.rows)
                        del product


@pytest.mark.parametrize("world", [1, 3])
def test_a_supplied_product_gives_what_a_weight_gives(world: int) -> None:
    run_ranks(world, equal_to_a_weight)


def fails(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such kernel")


def refusals(rank: int, world: int) -> None:
    """Every rank raises, whichever rank's product is wrong; the op stays usable."""
    weight = torch.ones(4, 3)
    x = torch.ones(5, 3)
    right = Product(weight, 5)
    leaf = weight.clone().requires_grad_()
    wrong: list[tuple[Any, str]] = [
        (lambda x: x.new_empty(x.shape[0], 5), r"\[1, 4\] for 1 rows, got \[1, 5\]"),
        (lambda x: x.new_empty(x.shape[0], 4, dtype=torch.float64), "float32, got torch.float64"),
        (lambda x: x.new_empty(x.shape[0], 4, device="meta"), "on the CPU, got meta"),
        (lambda x: [0.0], "a plain tensor, got list"),
        (lambda x: x @ leaf.t(), "without gradient"),
        (fails, "gemm= failed with one row: RuntimeError: no such kernel"),
        (7, "must be callable, got int"),
    ]
    last = world - 1
    for kind in (GemmRS, GemmAR):
        with kind(max_m=5, n=4, k=3 * world, timeout_s=20) as op:
            expected = op(x, weight)

            def refused(text: str, *args: Any, **options: Any) -> None:
                with pytest.raises((TypeError, ValueError), match=text):
                    op(*args, **options)
                dist.barrier()  # the text of a refusal is there until the next one

            for product, text in wrong:
                refused(text, x, None, gemm=product if rank == last else right)
            of_rank = weight if rank == last else None
            refused("takes the place of the weight", x, of_rank, gemm=right)
            with_grad = x.clone().requires_grad_(rank == last)
            refused("has no backward", with_grad, None, gemm=right)
            refused("expected a tensor, got NoneType", x, None if rank == last else weight)
            with torch.no_grad():
                linear = partial(torch.nn.functional.linear, weight=leaf)
                assert torch.equal(op(x, None, gemm=linear), expected)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
                with pytest.raises(RuntimeError, match="call the op in a custom op"):
                    op(x, None, gemm=right)
            assert torch.equal(op(x, None, gemm=right), expected)


def test_a_wrong_product_is_refused_on_all_ranks() -> None:
    run_ranks(2, refusals)


def late_failure(rank: int, world: int) -> str:
    def product(x: torch.Tensor) -> torch.Tensor:
        columns = 4 if x.shape[0] == 1 or rank == 0 else 5
        return x.new_ones(x.shape[0], columns)

    op = GemmAR(max_m=8, n=4, k=world, timeout_s=20)
    with pytest.raises((ValueError, PeerTimeoutError)) as raised:
        op(torch.ones(8, 1), None, gemm=product)
    assert op.closed
    return str(raised.value)


def test_a_product_that_fails_during_a_call_ends_it_on_all_ranks() -> None:
    first, second = run_ranks(2, late_failure)
    assert "rank 1" in first, first
    assert re.search(r"\[(\d), 4\] for \1 rows, got \[\1, 5\]", second), second

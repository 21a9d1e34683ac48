"""Our layers beside Megatron-core's own, one layer at a time, on the CPU."""

from __future__ import annotations

import gc
import itertools
import os

import pytest
import torch

import megatron_cases as mc
from harness import more, run_ranks
from megatron_cases import LayerCase


def _every_form() -> list[LayerCase]:
    cases = []
    for sp, bias, skip in itertools.product((False, True), repeat=3):
        options = (("bias", bias), ("skip_bias_add", skip))
        cases += [LayerCase("column", sp, options=options), LayerCase("row", sp, options=options)]
    for sp in (False, True):
        cases += [
            LayerCase("column", sp, options=(("gather_output", True),)),
            LayerCase("column", sp, frozen=True),
            LayerCase("row", sp, frozen=True),
            LayerCase("column", sp, input_needs_grad=False),
            LayerCase("row", sp, input_needs_grad=False),
            LayerCase("column", sp, sequence=4, batch=1, k=8, n=4),
            LayerCase("row", sp, sequence=4, batch=1, k=8, n=4),
            LayerCase("column", sp, dtype=torch.bfloat16),
            LayerCase("row", sp, dtype=torch.bfloat16),
        ]
    cases.append(LayerCase("row", options=(("input_is_parallel", False),)))
    cases.append(LayerCase("column", options=(("disable_grad_reduce", True),)))
    for switch in ("ag", "rs"):
        settings = ((f"tp_comm_overlap_{switch}", False),)
        for kind, sp in itertools.product(("column", "row"), (False, True)):
            cases.append(LayerCase(kind, sp, settings=settings))
    return cases


def _check(rank: int, world: int, cases: list[LayerCase]) -> int:
    with mc.megatron(world):
        for case in cases:
            layer = mc.check_layer(case, rank, world)
            layer.close()
    return len(cases)


@pytest.mark.parametrize(
    ("world", "kind"), [(2, "column"), (2, "row"), *more((4, "column"), (4, "row"))]
)
def test_equal_to_megatron(world: int, kind: str) -> None:
    cases = [case for case in _every_form() if case.kind == kind]
    assert len(cases) > 15
    assert run_ranks(world, _check, cases, timeout=200) == [len(cases)] * world


def _threads(rank: int, world: int) -> list[int]:
    """Count the threads of this rank after each start and end of Megatron."""
    counts = []
    for _ in range(3):
        with mc.megatron(world):
            mc.check_layer(LayerCase("row", True), rank, world)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_groups_go_with_megatron() -> None:
    """Threads of a group wake up 100 times a second; leaked groups slow later tests down."""
    for counts in run_ranks(2, _threads):
        assert counts[2] <= counts[0] + 4, counts

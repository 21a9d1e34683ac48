"""The bodies that tests give to ranks of one GPU, where transfers wait for streams as a GPU's do: a
body that uploads inside VirtualWorld.run waits for calls that other ranks have not made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from emulated import EmulatedDevice, emulated_device
from emulated_cases import BF16, OnEmulated
from flux.transport.virtual import VirtualWorld
from matrix import OPS
from reference import Problem
from virtual_cases import built, check_all, drop_at_once


@pytest.fixture
def device(emulator: Path) -> Iterator[EmulatedDevice]:
    with emulated_device(emulator) as device:
        device.give_up_after(3.0)
        yield device


def problem(op: str) -> Problem:
    return Problem(op, 33, (13,), 10, BF16)


@pytest.mark.parametrize("op", OPS)
def test_tensors_dropped_after_the_call_do_not_change_results(
    device: EmulatedDevice, op: str
) -> None:
    p = problem(op)
    everything = [OnEmulated(device, p, 32, 2, seed=seed) for seed in range(4)]
    with VirtualWorld(2, device) as ranks, built(ranks, p) as ops:
        kept = drop_at_once(ranks, ops, 3 * everything, len(everything))
        device.finish()
    check_all(everything, list(zip(*kept, strict=True)))


def test_body_that_uploads_inside_run_raises(device: EmulatedDevice) -> None:
    """The second call of rank 0 is not made, as its transfer waits for the first."""
    device.give_up_after(0.1)
    p = problem("gemm_rs")
    everything = [OnEmulated(device, p, 33, 2, seed=seed) for seed in range(2)]
    with VirtualWorld(2, device) as ranks, built(ranks, p, timeout_s=0.3) as ops:

        def body(r: int) -> list[list[torch.Tensor]]:
            return [inputs.call(ops[r], r) for inputs in everything]

        with pytest.raises(RuntimeError, match="a pageable copy waits for stream"):
            ranks.run(body)

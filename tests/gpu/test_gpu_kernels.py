"""Every built kernel by itself on a GPU, and many random calls: `pytest -m gpu`, after `make
kernels`. The same plans and seeds run on the PTX machine (every_kernel.py, seeds.py).

FLUX_TEST_SEEDS random calls (300 if unset)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from every_kernel import Plan, built_ops, plans, worst
from flux.kernels.legality import runs_on
from flux.kernels.registry import BuiltKernel
from flux.kernels.sets import FUSED, config_set
from flux.transport.device import CudaDevice
from flux.transport.virtual import VirtualWorld
from gpu_cases import OnDevice, cuda_device
from seeds import plan_of
from virtual_cases import call_all

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("poisoned")]

SEEDS = int(os.environ.get("FLUX_TEST_SEEDS", "300"))
NAMES = [c.name for c in config_set("default", ["80", "90a"]) if c.op in FUSED]


@contextmanager
def with_only(name: str) -> Iterator[CudaDevice]:
    """A device that has this kernel alone."""
    device = cuda_device()
    built: BuiltKernel | None = device.registry.kernels.get(name)
    if built is None or not runs_on(built.config, device.capability):
        pytest.skip("the kernel is not built, or not for this GPU")
    device.registry = replace(device.registry, kernels={name: built})  # type: ignore[misc]
    yield device


def run(plan: Plan, device: CudaDevice) -> None:
    """Make the calls of a plan, and compare them with float64."""
    p = plan.problem
    with VirtualWorld(plan.world, device, plan.nodes) as ranks:
        ops: list[Any] = built_ops(plan, ranks)
        everything = [
            OnDevice(p, m, plan.world, plan.seed + number, bias=number != 1)
            for number, m in enumerate(plan.rows)
        ]
        outs = [
            call_all(ranks, ops, inputs, p.gathers and number == 2)
            for number, inputs in enumerate(everything)
        ]
        for op in ops:
            op.wait()
        for inputs, results in zip(everything, outs, strict=True):
            for rank, got in enumerate(results):
                worst(plan, inputs, [result.cpu() for result in got], rank)
        for op in ops:
            op.close()


@pytest.mark.parametrize("name", NAMES)
def test_every_built_kernel_matches_float64(name: str) -> None:
    with with_only(name) as device:
        for plan in plans(device.registry.kernels[name].config):
            run(plan, device)


@pytest.mark.parametrize("arch", ["90a", "80"])
def test_seeds_match_float64(arch: str) -> None:
    """Without the seeds whose kernel is not built: tile schedulers that claim, in a minimal set."""
    registry = cuda_device().registry.kernels
    plans_by_kernel: dict[str, list[Plan]] = {}
    for seed in range(SEEDS):
        config, plan = plan_of(seed, arch)
        plans_by_kernel.setdefault(config.name, []).append(plan)
    ran = 0
    for name in plans_by_kernel.keys() & registry.keys():
        with with_only(name) as device:
            for plan in plans_by_kernel[name]:
                run(plan, device)
                ran += 1
    assert ran > 0
    print(f"{ran} of {SEEDS} seeds")
    torch.cuda.empty_cache()

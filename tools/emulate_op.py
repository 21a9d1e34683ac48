"""Run one call of an op on the machine that executes PTX, and compare it with float64.

    python tools/compile_kernels.py --emulated --arch 80 --set minimal --out build/ptx
    python tools/emulate_op.py build/ptx --op gemm_rs
    python -m ptx_machine profile tools/emulate_op.py -- build/ptx --op gemm_rs

All ranks share an emulated GPU. The kernel is the one that the heuristic chooses of those in the
directory: leave no other there than the one that you work on. Exit status: 0, or 1 where a kernel
did what a device does not allow, or a result is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests" / "support"
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(SUPPORT), str(SUPPORT / "emulation")]

from flux.transport.virtual import VirtualWorld  # noqa: E402
from ptx_device import PtxDevice  # noqa: E402
from ptx_machine import PtxError  # noqa: E402
from reference import Inputs, Problem  # noqa: E402
from virtual_cases import call_all  # noqa: E402


def call(device: PtxDevice, problem: Problem, m: int, world: int) -> None:
    """Make one call of all ranks.

    Raises:
        PtxError: a kernel did what a device does not allow.
        AssertionError: a result is farther from float64's than its error bound.
    """
    inputs = Inputs(problem, m, world, seed=m)
    with VirtualWorld(world, device) as ranks, contextlib.ExitStack() as closing:
        ops = [problem.build(ranks.rank(rank)) for rank in range(world)]
        for op in ops:
            closing.callback(op.close)
        outs = call_all(ranks, ops, inputs)
        device.finish()
        for rank, op in enumerate(ops):
            op.wait()
            inputs.check(outs[rank], rank)


def work_of(device: PtxDevice) -> tuple[int, float]:
    """Instructions that threads have executed so far, and seconds of the host's cores for them."""
    found = device.cuda.counters().values()
    return sum(f["instructions"] for f in found), sum(f["nanoseconds"] for f in found) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "kernels", type=Path, help="directory of tools/compile_kernels.py --emulated"
    )
    parser.add_argument("--op", choices=("ag_gemm", "gemm_rs", "gemm_ar"), default="ag_gemm")
    for size, value in (("m", 256), ("n", 512), ("k", 512)):
        parser.add_argument(f"--{size}", type=int, default=value, help="of all ranks")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--arch", choices=("80", "90a"), default="80")
    parser.add_argument("--seed", type=int, default=0, help="decides the order of warps")
    parser.add_argument("--seeds", type=int, default=1, help="try so many, from --seed on")
    parser.add_argument("--time", action="store_true", help="print how fast the machine is")
    options = parser.parse_args()
    problem = Problem(options.op, options.m, (options.n,), options.k, torch.bfloat16)

    done: list[list[float]] = []
    device = PtxDevice(options.kernels.resolve(), options.arch)
    for seed in range(options.seed, options.seed + options.seeds):
        device.cuda.seed = 1000 * seed  # each launch takes the next number
        before = work_of(device)
        try:
            call(device, problem, options.m, options.world)
        except (PtxError, AssertionError, RuntimeError) as error:
            print(f"{device.cuda.error() or error}\nrun it again with --seed {seed}")
            sys.exit(1)
        done.append([now - then for now, then in zip(work_of(device), before, strict=True)])
    # The device is not closed: that would forget what python -m ptx_machine profile asks for next.
    print(f"{options.op} {options.m} x {options.n} x {options.k}, {options.world} ranks: right")
    if options.time:
        millions = statistics.median(count for count, _ in done) / 1e6
        speed = statistics.median(count / seconds for count, seconds in done) / 1e6
        print(f"{millions:.1f} million instructions of threads, {speed:.0f} a second of a core")


if __name__ == "__main__":
    main()

"""One GPU: every built kernel beside torch.mm, with nobody to wait for.

    python benchmarks/gpu_kernels.py --json benchmarks/results/h200/kernels.json [--dtype e4m3]

Times are medians over rounds, by CUDA events, all methods of a shape interleaved; inputs rotate, so
that they do not stay in L2. ag_gemm runs with all signals raised before; gemm_rs scatters into 8
slots of local memory, all entries raised; reduce adds 8 slots up. Results are checked first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flux import _C, host
from flux.backends.device import CudaDevice
from flux.kernels.legality import GemmProblem, is_legal, runs_on
from flux.kernels.registry import BuiltKernel

SHAPES = [(6144, 12288), (12288, 6144), (8192, 3584)]  # N, K
ROWS = [8192, 4096, 2048, 1024, 256, 64, 16]
WORLD = 8
COPIES = 3  # sets of inputs
EPOCH = 7
OUT = torch.bfloat16
DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
BASELINE = {"bf16": "torch.mm", "e4m3": "torch._scaled_mm"}


class Shape:
    """Inputs of one problem, and a call of each method on them."""

    def __init__(self, device: CudaDevice, m: int, n: int, k: int, dtype: str) -> None:
        self.device, self.m, self.n, self.k, self.dtype = device, m, n, k, dtype
        self.x = [self._normal(m) for _ in range(COPIES)]
        self.w = [self._normal(n) for _ in range(COPIES)]
        # One factor for all, or (scaling = row) one each: kernels read what they need.
        self.scale_x, self.scale_w = (torch.full((s,), 0.5, device="cuda") for s in (m, n))
        self.out = torch.empty(m, n, device="cuda", dtype=OUT)
        self.chunk = -(-m // WORLD)
        guard = _C.core.guard_rows  # in front of each slot, for what kernels store there besides
        self.slots = torch.empty(WORLD, guard + self.chunk, n, device="cuda", dtype=OUT)[:, guard:]
        words = 4096 + WORLD * (self.chunk // 16 + 2) * (n // 16 + 1)
        self.words = torch.full((words,), EPOCH, device="cuda", dtype=torch.int32)
        self.status = torch.zeros(_C.STATUS_WORDS, device="cuda", dtype=torch.int64)
        self.workspaces: dict[str, torch.Tensor] = {}
        self.round = 0

    def _normal(self, rows: int) -> torch.Tensor:
        values = torch.randn(rows, self.k, device="cuda", dtype=torch.bfloat16)
        return values.to(DTYPES[self.dtype])

    def baseline(self, index: int) -> None:
        x, w = self.x[index], self.w[index].t()
        if self.dtype == "bf16":
            torch.mm(x, w, out=self.out)
        else:
            scales = self.scale_x[:1], self.scale_w[:1]
            torch._scaled_mm(x, w, *scales, out_dtype=OUT, use_fast_accum=True, out=self.out)

    def args(self, index: int, order: bool) -> _C.GemmArgs:
        args = _C.GemmArgs()
        x, w = self.x[index], self.w[index]
        args.m, args.n, args.k, args.alpha = self.m, self.n, self.k, 1.0
        args.a, args.lda, args.b, args.ldb = x.data_ptr(), self.k, w.data_ptr(), self.k
        args.d, args.ldd, args.device = self.out.data_ptr(), self.n, self.device.index
        args.scale_a, args.scale_b = self.scale_x.data_ptr(), self.scale_w.data_ptr()
        args.order.raster = 8
        if order:
            args.order.world, args.order.rank = WORLD, 0
            args.order.nodes = args.order.domains = 1
            args.order.lanes = WORLD
            args.order.swizzle = 1
            args.order.comm_tile_rows = max(1, self.chunk // 4)
        args.sync.epoch, args.sync.timeout_ns = EPOCH, int(2e9)
        args.sync.status = self.status.data_ptr()
        return args

    def method(self, built: BuiltKernel, op: str) -> Callable[[int], None]:
        kernel = _C.Kernel(str(built.library), built.symbol)
        kernel.prepare(self.device.index)
        made = []
        for index in range(COPIES):
            args = self.args(index, order=op != "gemm")
            if op == "ag_gemm":
                args.signals = self.words.data_ptr()
            if op == "gemm_rs":
                args.set_slots([slot.data_ptr() for slot in self.slots])
                args.set_flags([self.words.data_ptr() + 4 * 4096] * WORLD)
                args.entries, args.slot_ld = self.words.data_ptr(), self.n
                args.guard_rows = _C.core.guard_rows
            room = torch.zeros(kernel.workspace_bytes(args) + 16, device="cuda", dtype=torch.uint8)
            args.workspace, args.workspace_bytes = room.data_ptr(), room.numel()
            self.workspaces[f"{built.symbol} {index}"] = room
            made.append(args)
        return lambda index: kernel.launch(made[index], self.device.current_stream())

    def reduction(self, built: BuiltKernel) -> Callable[[int], None]:
        kernel = _C.Kernel(str(built.library), built.symbol)
        args = _C.ReduceArgs()
        args.rows, args.n, args.m, args.world = self.chunk, self.n, self.m, WORLD
        args.tile_m, args.tile_n = kernel.tile
        args.set_slots([slot.data_ptr() for slot in self.slots])
        args.set_outs([self.out.data_ptr()])
        args.slot_ld = args.out_ld = self.n
        args.flags = self.words.data_ptr() + 4 * 4096
        args.scale, args.sm_count = 1.0, self.device.sm_count
        args.sync.epoch, args.sync.timeout_ns = EPOCH, int(2e9)
        args.sync.status = self.status.data_ptr()
        return lambda index: kernel.reduce(args, self.device.current_stream())

    def error(self, op: str) -> float:
        """Largest deviation of the last result from float64, over the largest value."""
        right = self.x[0].double() @ self.w[0].double().t()
        if self.dtype != "bf16":
            right *= 0.25
        if op == "gemm_rs":
            rows = [
                self.slots[o, : max(0, min(self.chunk, self.m - o * self.chunk))]
                for o in range(WORLD)
            ]
            got = torch.cat(rows)
        else:
            got = self.out
        return float((got.double() - right).abs().max() / right.abs().max())


def measure(methods: dict[str, Callable[[int], None]], rounds: int) -> dict[str, list[float]]:
    """ms of every method in every round, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for round_ in range(rounds + 3):
        for name, run in methods.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(round_ % COPIES)
            end.record()
            end.synchronize()
            if round_ >= 3:
                times[name].append(begin.elapsed_time(end))
    return times


def run_shape(
    device: CudaDevice, m: int, n: int, k: int, rounds: int, dtype: str
) -> dict[str, Any]:
    shape = Shape(device, m, n, k, dtype)
    baseline = BASELINE[dtype]
    methods: dict[str, Callable[[int], None]] = {baseline: shape.baseline}
    errors, complaints = {}, []
    for built in device.registry.kernels.values():
        config = built.config
        usable = config.dtype == dtype and config.weight == "nk" and config.activation == "none"
        problem = GemmProblem(m, n, k, 1 if config.op == "gemm" else WORLD)
        if not (usable and config.reduce == "local" and is_legal(config, problem)):
            continue
        if not runs_on(config, device.capability):
            continue
        run = shape.method(built, config.op)
        shape.out.fill_(float("nan"))
        shape.slots.fill_(float("nan"))
        run(0)
        torch.cuda.synchronize()
        errors[config.name] = shape.error(config.op)
        # Tensor cores keep some 14 bits of sums of float8 (fast accumulation).
        if not errors[config.name] < (1e-2 if dtype == "bf16" else 3e-2):
            complaints.append(f"{config.name}: wrong by {errors[config.name]}")
            continue
        methods[config.name] = run
        if config.op == "gemm_rs" and "reduce" not in methods:
            methods["reduce"] = shape.reduction(built)
    copy_to = torch.empty_like(shape.slots)
    methods["copy"] = lambda i: copy_to.copy_(shape.slots)
    times = measure(methods, rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    read = (WORLD + 1) * shape.chunk * n * 2
    moved = {"reduce": read, "copy": 2 * shape.slots.numel() * 2}
    return {
        "m": m, "n": n, "k": k, "dtype": dtype, "baseline": baseline,
        "median_ms": medians,
        "vs_torch": {name: value / medians[baseline] for name, value in medians.items()},
        "tflops": {name: 2e-9 * m * n * k / value for name, value in medians.items()
                   if name not in moved},
        "gb_per_s": {name: moved[name] / medians[name] * 1e-6 for name in moved if name in medians},
        "rounds_ms": times,
        "errors": errors,
        "complaints": complaints,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    options = parser.parse_args()
    device = CudaDevice()
    content: dict[str, Any] = {
        "command": "python benchmarks/gpu_kernels.py",
        "device": torch.cuda.get_device_name(device.index),
        "versions": host.versions(),
        "shapes": [],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for m in options.rows:
        for n, k in SHAPES:
            found = run_shape(device, m, n, k, options.rounds, options.dtype)
            content["shapes"].append(found)
            options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            baseline = found["baseline"]
            print(f"{m} x {n} x {k}: {baseline} {found['median_ms'][baseline]:.4f} ms")
            for name, value in found["vs_torch"].items():
                print(f"  {value:6.3f}x {name}")
            print("  GB/s", {name: round(v) for name, v in found["gb_per_s"].items()})
            for complaint in found["complaints"]:
                print("  WRONG", complaint)
    raise SystemExit(1 if any(s["complaints"] for s in content["shapes"]) else 0)


if __name__ == "__main__":
    main()

"""One GPU: time every built kernel and torch.mm. All signals are raised, so no kernel waits.

    python benchmarks/gpu_kernels.py --json benchmarks/results/h100/kernels.json [--dtype e4m3]
    python benchmarks/gpu_kernels.py --plain      # every plain kernel multiplies once, no times

GEMMs are those of a rank of 8 at the Flux paper's shapes. ag_gemm runs with all signals raised
before; gemm_rs scatters into 8 slots of local memory, all entries raised; reduce adds 8 slots up.
With --slots host they are in pinned memory of the host: what a slow link does to the GEMM. Raster
and communication tiles are the heuristic's; --rasters adds others, --sm-counts fewer
multiprocessors, and --parts gemm_rs without its flags, and without its entries. Results are checked
first.
Kernels for float8 are compared with the torch._scaled_mm that accumulates as they do.

A round is a sleep kernel, then all methods in an order that rotates. The sleep hides enqueue time
from the measurement; if the host is slower, the round is repeated with a longer sleep. Short
kernels run several times between two events. Inputs rotate, so that they do not stay in L2. Figures
are medians over rounds; ratios are formed within a round, with 90% intervals.

Shapes that an existing output file has are skipped.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ROOT, interval_text, keep, load, markdown, unbroken

from flux import _C, Knobs
from flux.bench.metrics import CONFIDENCE, bootstrap
from flux.core.knobs import Op
from flux.core.problem import BY_SHORT, ceil_div
from flux.kernels import loading
from flux.kernels.config import GemmConfig
from flux.kernels.legality import GemmProblem, is_legal, runs_on
from flux.kernels.registry import BuiltKernel
from flux.kernels.sets import config_set
from flux.machine import host
from flux.select.cycles import cost
from flux.select.heuristic import Sizes, resolve
from flux.select.kernel import best_of
from flux.transport.device import CudaDevice

SHAPES = [("ag_gemm", 6144, 12288), ("gemm_rs", 12288, 6144)]  # N, K of one rank of 8
ROWS = [8192, 4096, 2048, 1024, 512, 256, 128, 64]
RESULT = ROOT / RESULTS.parent / "h100" / "kernels.json"
WORLD = 8
H100_SMS = 132
COPIES = 3  # sets of inputs
EPOCH = 7
OUT = torch.bfloat16
DTYPES = ("bf16", "e4m3")
BASELINE = {
    "bf16": "torch.mm",
    "e4m3": "torch._scaled_mm(use_fast_accum=True)",
    "promoted": "torch._scaled_mm(use_fast_accum=False)",
}
# Tensor cores keep some 14 bits of sums of float8: on an H100 errors were 6e-3 to 9e-3. Promotion
# leaves the 2e-3 to 3e-3 of a result rounded to bfloat16.
TOLERANCE = {"bf16": 1e-2, "e4m3": 3e-2, "promoted": 5e-3}
GUARD_ROWS: int = _C.core.guard_rows
WARM_UP = 3
SLEEP_CYCLES = 10_000_000  # some 5 ms
MAX_SLEEP_CYCLES = 40 * SLEEP_CYCLES
LEAST_US = 200.0
MAX_INNER = 16


class Shape:
    """Inputs of one problem, and a call of each method on them."""

    def __init__(
        self, device: CudaDevice, m: int, n: int, k: int, dtype: str, slots: str = "device"
    ) -> None:
        self.device, self.m, self.n, self.k, self.dtype = device, m, n, k, dtype
        self.x = [self._normal(m) for _ in range(COPIES)]
        self.w = [self._normal(n) for _ in range(COPIES)]
        # One factor for all, or (scaling = row) one each: kernels read what they need.
        self.scale_x, self.scale_w = (torch.full((s,), 0.5, device="cuda") for s in (m, n))
        self.out = torch.empty(m, n, device="cuda", dtype=OUT)
        self.chunk = ceil_div(m, WORLD)
        # Kernels may write to the guard in front of a slot (csrc/core/scatter.h).
        place = {"device": "cuda"} if slots == "device" else {"pin_memory": True}
        self.guarded = torch.empty(WORLD, GUARD_ROWS + self.chunk, n, dtype=OUT, **place)
        self.slots = self.guarded[:, GUARD_ROWS:]
        words = 4096 + WORLD * (self.chunk // 16 + 2) * (n // 16 + 1)
        self.words = torch.full((words,), EPOCH, device="cuda", dtype=torch.int32)
        self.status = torch.zeros(_C.STATUS_WORDS, device="cuda", dtype=torch.int64)
        self.workspaces: dict[str, torch.Tensor] = {}
        self.round = 0

    def _normal(self, rows: int) -> torch.Tensor:
        values = torch.randn(rows, self.k, device="cuda", dtype=torch.bfloat16)
        return values.to(BY_SHORT[self.dtype].torch)

    def baseline(self, sums: str, index: int) -> None:
        x, w = self.x[index], self.w[index].t()
        if sums == "bf16":
            torch.mm(x, w, out=self.out)
        else:
            scales, fast = (self.scale_x[:1], self.scale_w[:1]), sums != "promoted"
            torch._scaled_mm(x, w, *scales, out_dtype=OUT, use_fast_accum=fast, out=self.out)

    def args(self, index: int, config: GemmConfig, raster: int | None) -> _C.GemmArgs:
        args = _C.GemmArgs()
        x, w = self.x[index], self.w[index]
        args.m, args.n, args.k, args.alpha = self.m, self.n, self.k, 1.0
        args.a, args.lda, args.b, args.ldb = x.data_ptr(), self.k, w.data_ptr(), self.k
        args.d, args.ldd, args.device = self.out.data_ptr(), self.n, self.device.index
        args.scale_a, args.scale_b = self.scale_x.data_ptr(), self.scale_w.data_ptr()
        if config.op != "gemm":
            sizes = Sizes(Op[config.op], self.m, (self.n, self.k), WORLD, 2)
            knobs = resolve(sizes, Knobs(raster=raster), config.cluster_tile)
            args.order.world, args.order.rank = WORLD, 0
            args.order.nodes = args.order.domains = 1
            args.order.lanes = WORLD
            args.order.swizzle = 1
            args.order.raster = knobs.raster or 1
            args.order.comm_tile_rows = knobs.comm_tile_rows or self.chunk
        args.sync.epoch, args.sync.timeout_ns = EPOCH, int(2e9)
        args.sync.status = self.status.data_ptr()
        return args

    def method(
        self, built: BuiltKernel, raster: int | None = None, without: str = "", sm_count: int = 0
    ) -> Callable[[int], None]:
        op = built.config.op
        kernel = loading.load(built)
        kernel.prepare(self.device.index)
        made = []
        for index in range(COPIES):
            args = self.args(index, built.config, raster)
            args.sm_count = sm_count
            if op == "ag_gemm":
                args.signals = self.words.data_ptr()
            if op == "gemm_rs":
                args.set_slots([slot.data_ptr() for slot in self.slots])
                flags = 0 if without == "flags" else self.words.data_ptr() + 4 * 4096
                args.set_flags([flags] * WORLD)
                args.entries = 0 if without == "entries" else self.words.data_ptr()
                args.slot_ld = self.n
                args.guard_rows = GUARD_ROWS
            room = torch.zeros(kernel.workspace_bytes(args) + 16, device="cuda", dtype=torch.uint8)
            args.workspace, args.workspace_bytes = room.data_ptr(), room.numel()
            self.workspaces[f"{built.symbol} {index} {raster} {without} {sm_count}"] = room
            made.append(args)
        return lambda index: kernel.launch(made[index], self.device.current_stream())

    def reduction(self, built: BuiltKernel) -> Callable[[int], None]:
        kernel = loading.load(built)
        args = _C.ReduceArgs()
        args.rows, args.n, args.m, args.world = self.chunk, self.n, self.m, WORLD
        args.tile_m, args.tile_n = kernel.tile
        args.set_slots([slot.data_ptr() for slot in self.slots])
        args.set_outs([self.out.data_ptr()])
        args.slot_ld = args.out_ld = self.n
        args.flags = self.words.data_ptr() + 4 * 4096
        args.source_count = WORLD
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
            got = torch.cat(rows).to(right.device)
        else:
            got = self.out
        return float((got.double() - right).abs().max() / right.abs().max())


def inner_calls(m: int, n: int, k: int) -> int:
    """Return how many calls stand between two events: short kernels run LEAST_US together."""
    expected_us = max(2e-6 * m * n * k / 600.0, 2e-6 * n * k / 3.0)  # TFLOP/s, TB/s
    return max(1, min(MAX_INNER, round(LEAST_US / expected_us)))


def one_round(
    methods: Sequence[tuple[str, Callable[[int], None]]], round_: int, inner: int, cycles: int
) -> dict[str, float] | None:
    """Return ms per call of each method; None if the GPU woke up before all was enqueued."""
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    awake = torch.cuda.Event()
    awake.record()
    events = {}
    for name, run in methods:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for call in range(inner):
            run((round_ * inner + call) % COPIES)
        end.record()
        events[name] = begin, end
    late = awake.query()
    torch.cuda.synchronize()
    if late:
        return None
    return {name: begin.elapsed_time(end) / inner for name, (begin, end) in events.items()}


def measure(
    methods: dict[str, Callable[[int], None]], rounds: int, inner: int
) -> tuple[dict[str, list[float]], list[str]]:
    """Return ms of every method in every round, and what is wrong with them."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    entries, cycles, late = list(methods.items()), SLEEP_CYCLES, 0
    for round_ in range(rounds + WARM_UP):
        turn = round_ % len(entries)
        ordered = entries[turn:] + entries[:turn]
        while (elapsed_ms := one_round(ordered, round_, inner, cycles)) is None:
            if cycles >= MAX_SLEEP_CYCLES:
                return times, ["the host is too slow: launches are in the times"]
            cycles, late = 2 * cycles, late + 1
        if round_ >= WARM_UP:
            for name, elapsed in elapsed_ms.items():
                times[name].append(elapsed)
    return times, []


def ratio(times: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Return the median over rounds of a method's time over another's, and its interval."""
    shares = [a / b for a, b in zip(times, base, strict=True)]

    def middle(chosen: list[int]) -> float:
        return statistics.median(shares[i] for i in chosen)

    return {
        "median": statistics.median(shares),
        "interval": bootstrap(middle, len(shares), CONFIDENCE),
    }


def usable(device: CudaDevice, op: str, dtype: str, problem: GemmProblem) -> list[BuiltKernel]:
    """Return the built kernels of an op for a problem, without activation, summing locally."""
    return [
        built
        for built in device.registry.kernels.values()
        if (built.config.op, built.config.dtype, built.config.weight) == (op, dtype, "nk")
        and (built.config.activation, built.config.reduce) == ("none", "local")
        and is_legal(built.config, problem)
        and runs_on(built.config, device.capability)
    ]


def sums_of(name: str, dtype: str) -> str:
    """Return the key of BASELINE and TOLERANCE for a kernel: how it sums."""
    return "promoted" if "_promoted" in name else dtype


def checked(
    shape: Shape,
    kernels: Iterable[BuiltKernel],
    rasters: Sequence[int] = (),
    parts: Sequence[str] = (),
    sm_counts: Sequence[int] = (),
) -> tuple[dict[str, Any], dict[str, float]]:
    """Run each kernel once; return the methods that are right, and the errors of all."""
    methods: dict[str, Any] = {}
    errors: dict[str, float] = {}
    ways: list[tuple[BuiltKernel, str, dict[str, Any]]] = []
    for built in kernels:
        ways.append((built, "", {}))
        ways += [(built, f" on {count}", {"sm_count": count}) for count in sm_counts]
        if built.config.op != "gemm":
            ways += [(built, f" raster {raster}", {"raster": raster}) for raster in rasters]
        if built.config.op == "gemm_rs":
            ways += [(built, f" without {part}", {"without": part}) for part in parts]
    for built, suffix, way in ways:
        name = built.config.name + suffix
        run = shape.method(built, **way)
        shape.out.fill_(float("nan"))
        shape.slots.fill_(float("nan"))
        run(0)
        torch.cuda.synchronize()
        errors[name] = shape.error(built.config.op)
        if errors[name] < TOLERANCE[sums_of(name, shape.dtype)]:
            methods[name] = run
            if built.config.op == "gemm_rs" and "reduce" not in methods:
                methods["reduce"] = shape.reduction(built)
    return methods, errors


def complaints_of(errors: dict[str, float], dtype: str) -> list[str]:
    # Not "above": NaN is wrong, too.
    return [
        f"{name}: wrong by {e}"
        for name, e in errors.items()
        if not e < TOLERANCE[sums_of(name, dtype)]
    ]


def run_shape(
    device: CudaDevice, op: str, m: int, n: int, k: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Check and time torch's GEMM, the plain kernels and those of the op at one shape."""
    dtype = options.dtype
    shape = Shape(device, m, n, k, dtype, options.slots)
    baselines = {
        BASELINE[sums]: partial(shape.baseline, sums)
        for sums in ((dtype, "promoted") if dtype == "e4m3" else (dtype,))
    }
    kernels = usable(device, "gemm", dtype, GemmProblem(m, n, k))
    kernels += usable(device, op, dtype, GemmProblem(m, n, k, WORLD))
    if options.only is not None:
        kernels = [built for built in kernels if re.search(options.only, built.config.name)]
    fused, errors = checked(
        shape,
        kernels,
        options.rasters,
        ("flags", "entries") if options.parts else (),
        options.sm_counts,
    )
    methods: dict[str, Callable[[int], None]] = {**baselines, **fused}
    if options.slots == "device":
        copy_to = torch.empty_like(shape.slots)
        methods["copy"] = lambda i: copy_to.copy_(shape.slots)
    inner = inner_calls(m, n, k)
    times, complaints = measure(methods, options.rounds, inner)
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    plain = {
        built.config.name: replace(built.config, op="gemm").name
        for built in kernels
        if built.config.op != "gemm"
    }
    moved = {"reduce": (WORLD + 1) * shape.chunk * n * 2, "copy": 2 * shape.slots.numel() * 2}
    gemms = [name for name in medians if name not in moved]
    base = {name: BASELINE[sums_of(name, dtype)] for name in gemms if name not in baselines}
    return {
        "op": op, "m": m, "n": n, "k": k, "dtype": dtype, "baselines": list(baselines),
        "slots": options.slots, "inner": inner,
        "median_ms": medians,
        "vs_torch": {name: ratio(times[name], times[base[name]]) for name in base},
        "vs_plain": {name: ratio(times[name], times[twin]) for name, twin in plain.items()
                     if name in medians and twin in medians},
        "tflops": {name: 2e-9 * m * n * k / medians[name] for name in gemms},
        "gb_per_s": {name: moved[name] / medians[name] * 1e-6 for name in moved if name in medians},
        "rounds_ms": times,
        "errors": errors,
        "complaints": complaints_of(errors, dtype) + complaints,
    }  # fmt: skip


def every_plain_kernel(device: CudaDevice) -> list[str]:
    """Let each plain kernel multiply once; return what is wrong."""
    complaints = []
    for dtype in DTYPES:
        m, n, k = 300, 512, 512
        kernels = usable(device, "gemm", dtype, GemmProblem(m, n, k))
        if kernels:
            _, errors = checked(Shape(device, m, n, k, dtype), kernels)
            complaints += complaints_of(errors, dtype)
            for name, error in errors.items():
                print(f"{name}: error {error:.1e}", flush=True)
    return complaints


def resumed(path: Path, command: str, device: CudaDevice) -> dict[str, Any]:
    """Return the content of a file that an earlier run left, or that of a new one."""
    if path.exists():
        return load(path)
    return {
        "command": command,
        "device": torch.cuda.get_device_name(device.index),
        "versions": host.versions(),
        "shapes": [],
    }


def default_of(shape: dict[str, Any], sums: str) -> str:
    """Return the name of the kernel that an op chooses, of those that were timed."""
    configs = [
        config
        for config in config_set("default", ["90a"])
        if config.op == shape["op"]
        and config.name in shape["vs_torch"]
        and sums_of(config.name, shape["dtype"]) == sums
        and config.scaling in ("none", "tensor")
    ]
    problem = GemmProblem(shape["m"], shape["n"], shape["k"], WORLD)
    costs = [cost(config, problem, H100_SMS) for config in configs]
    return configs[best_of(configs, costs)].name


def table(document: dict[str, Any]) -> str:
    """Write, for each shape, the kernels that ops choose beside torch's GEMM and plain ones."""
    rows = []
    for shape in sorted(document["shapes"], key=lambda shape: (shape["op"], shape["m"])):
        for sums in ("bf16",) if shape["dtype"] == "bf16" else ("promoted", "e4m3"):
            name, base = default_of(shape, sums), BASELINE[sums]
            times = shape["vs_torch"]
            fastest = min(
                times[other]["median"]
                for other in times
                if f"_{shape['op']}_" in other and sums_of(other, shape["dtype"]) == sums
            )
            plain = [
                times[other]["median"]
                for other in times
                if "flux_gemm_sm90a" in other and sums_of(other, shape["dtype"]) == sums
            ]
            rows.append(
                [
                    f"{shape['op']} {shape['m']}" + {"e4m3": ", fast"}.get(sums, ""),
                    f"{1e3 * shape['median_ms'][base]:.0f}",
                    f"{shape['tflops'][base]:.0f}",
                    f"{min(plain):.2f}" if plain else "-",
                    f"{times[name]['median']:.2f}" + interval_text(times[name]["interval"]),
                    f"{fastest:.2f}",
                    unbroken(name.split("_nk_")[1].replace("_", " ")),
                ]
            )
    header = ["op, M", "torch us", "TFLOP/s", "plain", "fused", "fastest fused", "kernel"]
    return markdown(header, rows)


def show(shape: dict[str, Any]) -> None:
    print(f"{shape['op']} {shape['m']} x {shape['n']} x {shape['k']}:")
    for name in shape["baselines"]:
        print(f"  {shape['median_ms'].get(name, 0):.4f} ms {name}")
    for name, share in shape["vs_torch"].items():
        print(f"  {share['median']:6.3f}x {name}")
    for name, share in shape["vs_plain"].items():
        print(f"  {share['median']:6.3f}x of the plain kernel: {name}")
    print("  GB/s", {name: round(v) for name, v in shape["gb_per_s"].items()})
    for complaint in shape["complaints"]:
        print("  WRONG", complaint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write or continue")
    parser.add_argument(
        "--plain", action="store_true", help="only run every plain kernel once, and check it"
    )
    parser.add_argument("--rounds", type=int, default=21, help="interleaved rounds of timing")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows M")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="data type of inputs")
    parser.add_argument("--ops", nargs="+", default=["ag_gemm", "gemm_rs"], help="ops")
    parser.add_argument("--only", help="pattern of the names of kernels to time; default: all")
    parser.add_argument(
        "--rasters", type=int, nargs="*", default=[], help="rasters of fused kernels"
    )
    parser.add_argument(
        "--sm-counts", type=int, nargs="*", default=[], help="multiprocessors, besides all of them"
    )
    parser.add_argument("--parts", action="store_true", help="gemm_rs without parts of it, too")
    parser.add_argument(
        "--slots", choices=("device", "host"), default="device", help="memory of gemm_rs's slots"
    )
    options = parser.parse_args()
    device = CudaDevice()
    if options.plain:
        complaints = every_plain_kernel(device)
        for complaint in complaints:
            print("WRONG", complaint)
        raise SystemExit(1 if complaints else 0)
    if options.json is None:
        parser.error("--json is missing")
    content = resumed(options.json, "python benchmarks/gpu_kernels.py", device)
    done = {(s["op"], s["m"], s["n"], s["k"], s["dtype"]) for s in content["shapes"]}
    for m in options.rows:
        for op, n, k in SHAPES:
            if (op, m, n, k, options.dtype) in done or op not in options.ops:
                continue
            shape = run_shape(device, op, m, n, k, options)
            content["shapes"].append(shape)
            keep(content, options.json)
            show(shape)
    raise SystemExit(1 if any(s["complaints"] for s in content["shapes"]) else 0)


if __name__ == "__main__":
    main()

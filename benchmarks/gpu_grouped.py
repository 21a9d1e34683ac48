"""One GPU that two ranks share: time the kernels of experts, and torch's grouped GEMM.

    python benchmarks/gpu_grouped.py benchmarks/results/h100/grouped.json

Each rank has half of the columns of all experts, half of the multiprocessors, and half of the
tokens, which the ranks copy to each other. torch multiplies the halves one after the other with the
whole GPU: the copy of the routed rows, grouped_mm, and, for the second GEMM, the weighted sum into
tokens (index_add). GPU times reach from the begin of the first to the end of the last piece of work
in torch's profiler. Calls are whole calls between two synchronisations: flux's host reads the
routing and makes the maps, torch sorts on the GPU; with maps on the GPU (max_rows) a kernel makes
them, which is timed by number of choices, too. On Hopper the kernels of sm_80 run beside those of
sm_90a. Methods take turns; figures are medians, ratios are formed within a round. Results are
compared first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import keep, markdown
from gpu_kernels import ratio
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from flux.kernels.config import GROUPED
from flux.machine import host
from flux.moe import AGGroupedGemm, GroupedGemmRS
from flux.transport.device import CudaDevice
from flux.transport.virtual import VirtualWorld

# Name, experts, choices, hidden size, and the experts' intermediate size on both ranks together.
MODELS = [
    ("mixtral-8x7b, 8 ranks", 8, 2, 4096, 1792),
    ("qwen3-30b-a3b", 128, 8, 2048, 768),
]
ROWS = (4096, 64)
# Tokens, experts and choices of lists of work, with columns of one GEMM.
LISTS = [
    (512, 64, 6),
    (2048, 64, 8),
    (4096, 64, 8),
    (8192, 128, 8),
    (65536, 64, 6),
    (65536, 256, 8),
]
LISTED_N, LISTED_K = 2048, 64
ROUNDS = 15
WARM_UP = 3
TOLERANCE = 2e-2
WORLD = 2
Call = Callable[[], list[torch.Tensor]]


class TorchExperts:
    """Both GEMMs of experts as torch's own ops, routed by a sort on the GPU."""

    def __init__(self, chosen: torch.Tensor, probs: torch.Tensor, count: int) -> None:
        self.chosen, self.probs, self.count = chosen, probs, count

    def routed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the choices by expert, and where each expert's end."""
        flat = self.chosen.view(-1)
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=self.count).cumsum(0).to(torch.int32)
        return order, ends

    def first(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        order, ends = self.routed()
        rows = x[order // self.chosen.shape[1]]
        return functional.grouped_mm(rows, w.transpose(1, 2), offs=ends)

    def second(self, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        order, ends = self.routed()
        products = functional.grouped_mm(y, w.transpose(1, 2), offs=ends)
        out = products.new_zeros(self.chosen.shape[0], w.shape[1], dtype=torch.float32)
        weighted = products.float() * self.probs.view(-1)[order, None]
        return out.index_add_(0, order // self.chosen.shape[1], weighted).to(products.dtype)


def gpu_ms(call: Call) -> tuple[float, dict[str, float]]:
    """Return the ms that a call keeps the GPU, and those of each kernel."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    work = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    first = min(event.time_range.start for event in work)
    last = max(event.time_range.end for event in work)
    parts: dict[str, float] = {}
    for event in work:
        elapsed = event.time_range.elapsed_us() / 1000.0
        parts[event.name] = parts.get(event.name, 0.0) + elapsed
    return (last - first) / 1000.0, parts


def call_ms(call: Call) -> float:
    """Return the ms of a call, from idle to idle."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1000.0 * (time.perf_counter() - begin)


def measure(calls: dict[str, Call]) -> dict[str, Any]:
    """Compare the results of all calls with the first one's, and time them."""
    first, *others = calls
    right = [part.float() for part in calls[first]()]
    errors = {
        name: max(
            float((got.float() - part).norm() / part.norm())
            for got, part in zip(calls[name](), right, strict=True)
        )
        for name in others
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    busy: dict[str, list[float]] = {name: [] for name in calls}
    parts: dict[str, dict[str, float]] = {}
    for round_ in range(WARM_UP + ROUNDS):
        turn = round_ % len(calls)
        for name in [*calls][turn:] + [*calls][:turn]:
            elapsed = call_ms(calls[name])
            kept, parts[name] = gpu_ms(calls[name])
            if round_ >= WARM_UP:
                times[name].append(elapsed)
                busy[name].append(kept)
    return {
        "call_ms": {name: statistics.median(values) for name, values in times.items()},
        "gpu_ms": {name: statistics.median(values) for name, values in busy.items()},
        "gpu_over_torch": {name: ratio(busy[name], busy[first]) for name in others},
        "calls_over_torch": {name: ratio(times[name], times[first]) for name in others},
        "kernels_of_a_call": parts,
        "errors": errors,
        "complaints": [f"{n}: wrong by {e:.1e}" for n, e in errors.items() if not e < TOLERANCE],
    }


def of_sm80() -> CudaDevice | None:
    """Return the device with the kernels of sm_80 alone, if it has others too."""
    device = CudaDevice()
    experts = {s: b for s, b in device.registry.kernels.items() if b.config.op in GROUPED}
    older = {symbol: built for symbol, built in experts.items() if built.config.arch == "80"}
    if len(older) in (0, len(experts)):
        return None
    device.registry = replace(device.registry, kernels=older)  # type: ignore[misc]
    return device


def run_shape(
    device: CudaDevice, m: int, experts: int, topk: int, hidden: int, wide: int
) -> list[dict[str, Any]]:
    """Check and time both GEMMs of a mixture for ``m`` tokens."""
    generator = torch.Generator(device="cuda").manual_seed(m)
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
    scores = torch.rand(m, experts, device="cuda", generator=generator)
    probs, chosen = scores.topk(topk)
    reference = TorchExperts(chosen, probs, experts)
    sizes = {"max_m": m, "dtype": torch.bfloat16, "experts": experts, "topk": topk}
    half = wide // WORLD  # of a rank
    x = draw(m, hidden)
    w = [draw(experts, 2 * half, hidden) / hidden**0.5 for _ in range(WORLD)]
    y = [draw(m * topk, half) for _ in range(WORLD)]
    v = [draw(experts, hidden, half) / wide**0.5 for _ in range(WORLD)]
    tokens = x.chunk(WORLD)
    shapes = []
    with ExitStack() as closing:

        def calls_of(device: CudaDevice, **options: Any) -> tuple[Call, Call]:
            """Return a call of each op on kernels of a device."""
            ranks = closing.enter_context(VirtualWorld(WORLD, device))
            up, down = (
                [
                    closing.enter_context(op(**sizes, **shape, group=ranks.rank(r)))
                    for r in range(WORLD)
                ]
                for op, shape in (
                    (AGGroupedGemm, {"n": 2 * wide, "k": hidden}),
                    (GroupedGemmRS, {"n": hidden, "k": wide}),
                )
            )
            return (
                lambda: ranks.run(lambda r: up[r](tokens[r], w[r], chosen, **options)),
                lambda: ranks.run(lambda r: down[r](y[r], v[r], chosen, probs=probs, **options)),
            )

        def sums() -> list[torch.Tensor]:
            halves = [reference.second(y[r], v[r]) for r in range(WORLD)]
            return list((halves[0] + halves[1]).chunk(WORLD))

        of_flux = {
            "flux": calls_of(device),
            "flux, maps on the GPU": calls_of(device, max_rows=m * topk),
        }
        if older := of_sm80():
            of_flux["flux, sm_80"] = calls_of(older)
        both: dict[str, dict[str, Call]] = {
            "ag_grouped_gemm": {
                "torch": lambda: [reference.first(x, w[r]) for r in range(WORLD)],
                **{name: first for name, (first, _) in of_flux.items()},
            },
            "grouped_gemm_rs": {
                "torch": sums,
                **{name: second for name, (_, second) in of_flux.items()},
            },
        }
        for op, calls in both.items():
            flops = 2 * m * topk * hidden * wide * (2 if op == "ag_grouped_gemm" else 1)
            shape = {"op": op, "m": m, "experts": experts, "topk": topk, "hidden": hidden,
                     "intermediate": wide, **measure(calls)}  # fmt: skip
            shape["tflops"] = {n: flops / ms * 1e-9 for n, ms in shape["gpu_ms"].items()}
            shapes.append(shape)
    return shapes


def lists_ms(device: CudaDevice, kind: Any, m: int, experts: int, topk: int) -> float:
    """Time the kernels that list the work of a rank with columns of all experts."""
    generator = torch.Generator(device="cuda").manual_seed(m)
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
    chosen = torch.rand(m, experts, device="cuda", generator=generator).topk(topk)[1]
    gathers = kind is AGGroupedGemm
    n, k = (WORLD * LISTED_N, LISTED_K) if gathers else (LISTED_N, WORLD * LISTED_K)
    x = draw(m // WORLD if gathers else m * topk, LISTED_K)
    w = draw(experts, LISTED_N, LISTED_K)
    sizes = {"max_m": m, "n": n, "k": k, "experts": experts, "topk": topk, "dtype": x.dtype}
    times = []
    with VirtualWorld(WORLD, device) as ranks, ExitStack() as closing:
        ops = [closing.enter_context(kind(**sizes, group=ranks.rank(r))) for r in range(WORLD)]
        for round_ in range(WARM_UP + ROUNDS):
            call = partial(ranks.run, lambda r: ops[r](x, w, chosen, max_rows=m * topk))
            parts = gpu_ms(call)[1]
            if round_ >= WARM_UP:
                times.append(sum(ms for name, ms in parts.items() if "route_kernel" in name))
    return statistics.median(times) / WORLD


def run_lists(device: CudaDevice, m: int, experts: int, topk: int) -> dict[str, Any]:
    """Time the lists of both GEMMs."""
    ms = {
        name: lists_ms(device, kind, m, experts, topk)
        for name, kind in (("ag_grouped_gemm", AGGroupedGemm), ("grouped_gemm_rs", GroupedGemmRS))
    }
    return {"m": m, "experts": experts, "topk": topk, "ms": ms}


def table(document: dict[str, Any]) -> str:
    """Write kernel and call times of each way beside torch's."""
    ways = [*document["shapes"][0]["gpu_over_torch"]]

    def over_torch(shape: dict[str, Any], key: str) -> list[str]:
        return [f"{shape[key][way]['median']:.2f}" if way in shape[key] else "-" for way in ways]

    rows = [
        [
            f"{s['op']} {s['m']}, {s['model']}",
            f"{1000 * s['gpu_ms']['torch']:.0f}",
            f"{s['tflops']['torch']:.0f}",
            *over_torch(s, "gpu_over_torch"),
            f"{1000 * s['call_ms']['torch']:.0f}",
            *over_torch(s, "calls_over_torch"),
        ]
        for s in document["shapes"]
    ]
    header = ["op, M", "torch us", "TFLOP/s", *ways, "torch's call us", *ways]
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    device = CudaDevice()
    content: dict[str, Any] = {
        "command": "python benchmarks/gpu_grouped.py",
        "device": torch.cuda.get_device_name(device.index),
        "versions": host.versions(),
        "lists": [run_lists(device, *sizes) for sizes in LISTS],
        "shapes": [],
    }
    for listed in content["lists"]:
        print({**listed, "ms": {name: round(ms, 4) for name, ms in listed["ms"].items()}})
    for m in ROWS:
        for name, *sizes in MODELS:
            made = run_shape(device, m, *sizes)
            content["shapes"] += [{"model": name, **shape} for shape in made]
            keep(content, options.target)
    print(table(content))
    for shape in content["shapes"]:
        for complaint in shape["complaints"]:
            print(f"WRONG {shape['op']} {shape['m']}: {complaint}")
    raise SystemExit(1 if any(shape["complaints"] for shape in content["shapes"]) else 0)


if __name__ == "__main__":
    main()

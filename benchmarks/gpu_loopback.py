"""One GPU and a real link: what flux hides of PCIe's time, with the peers' memory in the host.

    python benchmarks/gpu_loopback.py benchmarks/results/h200/loopback.json

Per shape, in every repeat one after the other: the GEMM alone (torch.mm and flux's plain kernel, of
which the faster counts), communication alone, both in sequence (`unfused`), and flux with each
direction and communication tile. Communication alone is one copy per peer and direction, all chunks
whole, both directions of the link at once, and for ReduceScatter the sum; nothing that a library
does on this link is faster. Times are the GPU's, by CUDA events: a kernel that sleeps in front
keeps the host's time to enqueue out of all methods alike. Every result, and what the peers were
sent, is compared with float64 first. docs/metrics.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import markdown, milliseconds, percent

from flux import _C, AGGemm, GemmRS, Knobs, PeerTimeoutError, host
from flux.backends.device import CudaDevice, Device
from flux.bench.metrics import evaluate, overlap_efficiency_interval
from flux.kernels.choice import choose
from flux.kernels.legality import GemmProblem
from flux.transport.loopback import LoopbackWorld

DTYPE = torch.bfloat16
NARROW, WIDE = 12288, 49152  # the paper's GPT-3 shapes: AllGather N = WIDE, ReduceScatter K = WIDE
SLEEP_CYCLES = 20_000_000  # some 10 ms, in which the host enqueues a call
WARM_UP = 3
TIMEOUT_S = 10.0
TOLERANCE = 1e-2  # of the largest value; two 16-bit roundings are 0.8%


@dataclasses.dataclass(frozen=True)
class Shape:
    """One problem: ``op`` is ag_gemm or gemm_rs, n and k are global."""

    op: str
    world: int
    m: int
    n: int
    k: int

    @property
    def chunk(self) -> int:
        return self.m // self.world


class Machine:
    """The GPU: where tensors are, what multiplies, and the clock."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device.torch_device, dtype=DTYPE)

    def pinned(self, *shape: int) -> torch.Tensor:
        found = self.device.pinned(torch.Size(shape).numel(), DTYPE).view(shape)
        return found.copy_(self.random(*shape))

    def multiply(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, w.t(), out=out)

    def plain(self, problem: GemmProblem) -> _C.Kernel | None:
        """flux's GEMM without communication, as the heuristic chooses it; None if none is built."""
        device = self.device
        found = device.registry.candidates("gemm", "bf16", device.capability, problem, weight="nk")
        built = choose(found, problem, device.sm_count)
        if built is None:
            return None
        kernel = _C.Kernel(str(built.library), built.symbol)
        kernel.prepare(device.index)
        return kernel

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def time(self, run: Callable[[], object]) -> float:
        """ms of one call on an idle GPU."""
        self.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        run()
        end.record()
        self.synchronize()
        return begin.elapsed_time(end)


class Link:
    """Copies in both directions at once, between two points of the current stream."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.streams = [device.driver.create_stream() for _ in range(2)]

    def move(self, *directions: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Each direction is pairs (to, from), without gaps."""
        driver, current = self.device.driver, self.device.current_stream()
        for stream, pairs in zip(self.streams, directions, strict=True):
            driver.order_after(later=stream, earlier=current)
            for to, source in pairs:
                driver.copy(stream, to.data_ptr(), source.data_ptr(), to.numel() * to.itemsize)
        for stream in self.streams:
            driver.order_after(later=current, earlier=stream)

    def close(self) -> None:
        for stream in self.streams:
            self.device.driver.synchronize(stream)
            self.device.driver.destroy_stream(stream)


class Setting:
    """Inputs of one shape, the methods on them, and whether they are right."""

    gathers: bool
    x: torch.Tensor
    w: torch.Tensor
    given: Sequence[torch.Tensor]  # pinned; of ranks 1, 2, ...

    def __init__(self, machine: Machine, shape: Shape, link: Link, ranks: LoopbackWorld) -> None:
        self.machine, self.shape, self.link, self.ranks = machine, shape, link, ranks
        self.gemms: dict[str, Callable[[], torch.Tensor]] = {}
        self.ops: dict[str, Any] = {}

    def add_gemms(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        """Ways to compute ``out = x @ w.T``, on the current stream."""

        def library() -> torch.Tensor:
            self.machine.multiply(x, w, out)
            return out

        self.gemms["gemm torch.mm"] = library
        (m, k), n = x.shape, w.shape[0]
        kernel = self.machine.plain(GemmProblem(m, n, k, 1))
        if kernel is None:
            return
        args = _C.GemmArgs()
        args.m, args.n, args.k, args.alpha = m, n, k, 1.0
        args.a, args.lda, args.b, args.ldb = x.data_ptr(), k, w.data_ptr(), k
        args.d, args.ldd, args.device = out.data_ptr(), n, self.machine.device.index
        args.order.raster = 8
        room = self.machine.device.zeros(kernel.workspace_bytes(args) + 1, torch.uint8)
        args.workspace, args.workspace_bytes = room.data_ptr(), room.numel()

        def plain(kept: torch.Tensor = room) -> torch.Tensor:
            kernel.launch(args, self.machine.device.current_stream())
            return out

        self.gemms["gemm flux"] = plain

    def build(self, knobs: Knobs) -> Any:
        """The fused op with these knobs, its peers provided for."""
        s = self.shape
        kind = AGGemm if self.gathers else GemmRS
        op = kind(
            self.ranks.rank(),
            max_m=s.m,
            n=s.n,
            k=s.k,
            dtype=DTYPE,
            tuning=knobs,
            timeout_s=TIMEOUT_S,
        )
        self.ranks.provide(op, s.m, self.given)
        return op

    def call(self, op: Any) -> torch.Tensor:
        got: torch.Tensor = op(self.x, self.w)
        return got

    def communicate(self) -> None:
        raise NotImplementedError

    def spoil(self) -> None:
        """NaN where ``communicate`` writes on this rank."""
        raise NotImplementedError

    def unfused(self, gemm: Callable[[], torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError

    def error(self, got: torch.Tensor) -> float:
        """Largest deviation from float64, over the largest value."""
        raise NotImplementedError

    def sent(self, op: Any) -> float:
        """The same for what the peers have received."""
        raise NotImplementedError


def deviation(got: torch.Tensor, right: torch.Tensor) -> float:
    """NaN counts as infinite."""
    worst = float((got.double() - right).abs().max() / right.abs().max())
    return worst if worst == worst else float("inf")


class Gather(Setting):
    """AllGather + GEMM: [M/W, K] -> [M, N/W]."""

    gathers = True

    def __init__(self, machine: Machine, shape: Shape, link: Link, ranks: LoopbackWorld) -> None:
        super().__init__(machine, shape, link, ranks)
        self.x = machine.random(shape.chunk, shape.k)
        self.w = machine.random(shape.n // shape.world, shape.k)
        self.given = [machine.pinned(shape.chunk, shape.k) for _ in range(shape.world - 1)]
        self.received = [machine.pinned(shape.chunk, shape.k) for _ in self.given]
        self.full = torch.cat([self.x, *(rows.to(self.x.device) for rows in self.given)])
        self.out = machine.random(shape.m, shape.n // shape.world)
        self.add_gemms(self.full, self.w, self.out)

    def spoil(self) -> None:
        self.full.fill_(float("nan"))

    def communicate(self) -> None:
        chunks = self.full.split(self.shape.chunk)
        self.link.move(
            list(zip(chunks[1:], self.given, strict=True)),
            [(peer, self.x) for peer in self.received],
        )
        device = self.machine.device
        size = self.x.numel() * self.x.itemsize
        stream = device.current_stream()
        device.driver.copy(stream, chunks[0].data_ptr(), self.x.data_ptr(), size)

    def unfused(self, gemm: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.communicate()
        return gemm()

    def error(self, got: torch.Tensor) -> float:
        rows = torch.cat([self.x, *(rows.to(self.x.device) for rows in self.given)])
        return deviation(got, rows.double() @ self.w.double().t())

    def sent(self, op: Any) -> float:
        held = [data.view(DTYPE)[: self.x.numel()] for data in op._backend.peers.memory.data[1:]]
        return max(deviation(h.view(self.x.shape), self.x.double().cpu()) for h in held)


class Scatter(Setting):
    """GEMM + ReduceScatter: [M, K/W] -> [M/W, N]."""

    gathers = False

    def __init__(self, machine: Machine, shape: Shape, link: Link, ranks: LoopbackWorld) -> None:
        super().__init__(machine, shape, link, ranks)
        depth = shape.k // shape.world
        self.x, self.w = machine.random(shape.m, depth), machine.random(shape.n, depth)
        self.given = [machine.pinned(shape.chunk, shape.n) for _ in range(shape.world - 1)]
        self.received = [machine.pinned(shape.chunk, shape.n) for _ in self.given]
        self.product = machine.random(shape.m, shape.n)
        self.slots = [machine.random(shape.chunk, shape.n) for _ in self.given]
        self.out = machine.random(shape.chunk, shape.n)
        self.add_gemms(self.x, self.w, self.product)

    def spoil(self) -> None:
        for slot in (*self.slots, self.out):
            slot.fill_(float("nan"))

    def communicate(self) -> None:
        chunks = self.product.split(self.shape.chunk)
        self.link.move(
            list(zip(self.slots, self.given, strict=True)),
            list(zip(self.received, chunks[1:], strict=True)),
        )
        kernel = self.adder
        kernel.reduce(self.sum_args(chunks[0]), self.machine.device.current_stream())

    @property
    def adder(self) -> _C.Kernel:
        """Any kernel that has a reduction: that of an op under test."""
        return next(iter(self.ops.values()))._backend.kernels[0]

    def sum_args(self, own: torch.Tensor) -> _C.ReduceArgs:
        """Adds the slots up, without waiting for flags."""
        s, args = self.shape, _C.ReduceArgs()
        args.rows, args.n, args.m, args.world = s.chunk, s.n, s.m, s.world
        args.tile_m, args.tile_n = self.adder.tile
        args.set_slots([own.data_ptr(), *(slot.data_ptr() for slot in self.slots)])
        args.set_outs([self.out.data_ptr()])
        args.slot_ld = args.out_ld = s.n
        args.scale, args.sm_count = 1.0, self.machine.device.sm_count
        return args

    def unfused(self, gemm: Callable[[], torch.Tensor]) -> torch.Tensor:
        gemm()
        self.communicate()
        return self.out

    def partial(self, rank: int) -> torch.Tensor:
        rows = self.x.split(self.shape.chunk)[rank]
        return rows.double() @ self.w.double().t()

    def error(self, got: torch.Tensor) -> float:
        right = self.partial(0)
        for rows in self.given:
            right += rows.to(right.device)
        return deviation(got, right)

    def sent(self, op: Any) -> float:
        worst = 0.0
        for peer, data in enumerate(op._backend.peers.memory.data):
            if peer:
                held = data.view(DTYPE)[: self.out.numel()].view(self.out.shape)
                worst = max(worst, deviation(held.to(self.out.device), self.partial(peer)))
        return worst


def variants(shape: Shape, tiles: Sequence[int]) -> dict[str, Knobs]:
    """What is swept: rows of a communication tile, and for AllGather who moves them."""
    found = {}
    for direction in ("push", "pull") if shape.op == "ag_gemm" else (None,):
        for count in tiles:
            rows = max(1, shape.chunk // count)
            name = " ".join(filter(None, ["flux", direction, f"{rows} rows"]))
            found[name] = Knobs(direction=direction, comm_tile_rows=rows)
    return found


def run_shape(machine: Machine, shape: Shape, tiles: Sequence[int], repeats: int) -> dict[str, Any]:
    """Check and measure one shape."""
    link = Link(machine.device)
    with LoopbackWorld(shape.world, machine.device) as ranks:
        kind = Gather if shape.op == "ag_gemm" else Scatter
        setting = kind(machine, shape, link, ranks)
        try:
            for name, knobs in variants(shape, tiles).items():
                setting.ops[name] = setting.build(knobs)
            return measure(machine, setting, repeats)
        except PeerTimeoutError as error:  # the other shapes still count
            return {**dataclasses.asdict(shape), "methods": {}, "complaints": [str(error)]}
        finally:
            for op in setting.ops.values():
                op.close()
            link.close()


def measure(machine: Machine, setting: Setting, repeats: int) -> dict[str, Any]:
    """Times and figures of all methods of one shape; wrong methods get none."""
    gemm_times = {
        name: statistics.median(machine.time(gemm) for _ in range(WARM_UP))
        for name, gemm in setting.gemms.items()
    }
    fastest = setting.gemms[min(gemm_times, key=lambda name: gemm_times[name])]
    methods: dict[str, Callable[[], Any]] = dict(setting.gemms)
    methods["comm"] = setting.communicate
    checked: dict[str, Callable[[], torch.Tensor]] = {"unfused": lambda: setting.unfused(fastest)}
    for name, op in setting.ops.items():
        checked[name] = lambda op=op: setting.call(op)
    errors, complaints = {}, []
    setting.spoil()
    for name, run in checked.items():
        got = run()
        if name in setting.ops:
            setting.ops[name].wait()
        machine.synchronize()
        errors[name] = setting.error(got)
        if name in setting.ops:
            errors[name] = max(errors[name], setting.sent(setting.ops[name]))
        if errors[name] < TOLERANCE:
            methods[name] = run
        else:
            complaints.append(f"{name}: wrong by {errors[name]}")
    times: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(WARM_UP + repeats):
        for name, run in methods.items():
            taken = machine.time(run)
            if repeat >= WARM_UP:
                times[name].append(taken)
    return {
        **dataclasses.asdict(setting.shape),
        "methods": figures(times, list(setting.gemms)),
        "repeats_ms": times,
        "errors": errors,
        "complaints": complaints,
    }


def figures(times: dict[str, list[float]], gemms: list[str]) -> dict[str, Any]:
    """ECT and its kin of the methods that do the whole op."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    gemm = min(medians[name] for name in gemms)
    found = {}
    for name, overall in medians.items():
        if name in gemms or name == "comm":
            continue
        metrics = evaluate(overall, gemm, medians["comm"], medians.get("unfused"))
        interval = None
        if "unfused" in times:
            interval = overlap_efficiency_interval(
                times[name], [times[g] for g in gemms], times["unfused"]
            )
        found[name] = {**dataclasses.asdict(metrics), "overlap_efficiency_interval": interval}
    return found


def table(found: dict[str, Any]) -> str:
    rows = []
    for name, figure in found["methods"].items():
        interval = figure["overlap_efficiency_interval"]
        rows.append(
            [
                name,
                *(
                    milliseconds(figure[key])
                    for key in ("overall_ms", "gemm_non_split_ms", "comm_ms", "ect_ms")
                ),
                percent(figure["overlap_efficiency"]),
                "-" if interval is None else f"{interval[0]:.0%} to {interval[1]:.0%}",
                percent(figure["bounded_efficiency"]),
            ]
        )
    header = ["method", "overall ms", "GEMM ms", "comm ms", "ECT ms", "overlap eff.", "90%"]
    title = "{op}, W = {world}, M = {m}, N = {n}, K = {k}".format(**found)
    lines = [title, markdown([*header, "bounded eff."], rows)]
    return "\n".join([*lines, *(f"WRONG {complaint}" for complaint in found["complaints"])])


def shapes(worlds: Sequence[int], rows: Sequence[int]) -> list[Shape]:
    """The largest first: a run that is cut short leaves what matters most."""
    return [
        Shape(op, world, m, *((WIDE, NARROW) if op == "ag_gemm" else (NARROW, WIDE)))
        for m in sorted(rows, reverse=True)
        for world in sorted(worlds, reverse=True)
        for op in ("ag_gemm", "gemm_rs")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192], help="M")
    parser.add_argument(
        "--tiles", type=int, nargs="+", default=[1, 4, 16], help="communication tiles per chunk"
    )
    options = parser.parse_args()
    machine = Machine(CudaDevice())
    content: dict[str, Any] = {
        "command": "python benchmarks/gpu_loopback.py",
        "device": torch.cuda.get_device_name(machine.device.index),
        "versions": host.versions(),
        "shapes": [],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for shape in shapes(options.worlds, options.rows):
        found = run_shape(machine, shape, options.tiles, options.repeats)
        content["shapes"].append(found)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(table(found), flush=True)
    raise SystemExit(1 if any(s["complaints"] for s in content["shapes"]) else 0)


if __name__ == "__main__":
    main()

"""Count the instructions of fused kernels and of a plain GEMM for a tile: no GPU needed.

    python tools/compile_kernels.py --emulated --set minimal --arch 80,90a --out DIR
    python benchmarks/kernel_counters.py DIR benchmarks/results/emulated/kernel_counters.json

Kernels run on the machine of ptx_machine/ (make emulator). All signals are there before a kernel
starts: the counts show the cost of waits that end at once. Each kernel runs at two sizes. A figure
is the difference of both counts over the difference in tiles, which leaves out the prologue.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import RESULTS, keep, markdown, unbroken

from flux import _C
from flux.kernels.registry import BuiltKernel, Registry

if TYPE_CHECKING:  # tables.py, which imports this file, does without the machine
    from ptx_machine import Counters, CudaDevice, Work

RESULT = RESULTS.parent / "emulated" / "kernel_counters.json"
WORLD = 8
N, K = 1024, 2048
ROWS = (1024, 3072)  # M of the two runs
MULTIPROCESSORS = 8
PARTS = ("producer warp", "consumer warps", "all warps")
BF16 = torch.bfloat16
KEPT = ("statements", "tensor_loads", "global_loads", "global_stores", "fences", "atomics", "flop")


@dataclass(frozen=True)
class Case:
    """A kernel and how it is launched.

    Attributes:
        name: of the row.
        op: of the kernel.
        waits: it looks for the signals of its rows; else it is a plain GEMM.
    """

    name: str
    op: str
    waits: bool


CASES = {
    "80": (
        Case("plain: the kernel of AGGemm without signals", "ag_gemm", False),
        Case("AGGemm, waits for rows", "ag_gemm", True),
        Case("GemmRS, scatters", "gemm_rs", True),
    ),
    "90a": (
        Case("plain", "gemm", False),
        Case("AGGemm, waits for rows", "ag_gemm", True),
        Case("GemmRS, scatters", "gemm_rs", True),
    ),
}


class Memory:
    """Tensors that kernels may access, kept for as long as they run."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.kept: list[torch.Tensor] = []

    def address(self, tensor: torch.Tensor) -> int:
        from ptx_machine import extent

        self.kept.append(tensor)
        self.device.machine.add_memory(*extent(tensor), f"a tensor of {tuple(tensor.shape)}")
        return int(tensor.data_ptr())

    def words(self, value: int) -> int:
        return self.address(torch.full((1 << 16,), value, dtype=torch.int32))


def arguments(memory: Memory, case: Case, m: int) -> _C.GemmArgs:
    """Return the arguments of rank 0, all of whose peers have done their part."""
    args = _C.GemmArgs()
    args.m, args.n, args.k = m, N, K
    args.alpha, args.lda, args.ldb, args.ldd = 1.0, K, K, N
    args.a = memory.address(torch.ones(m, K, dtype=BF16))
    args.b = memory.address(torch.ones(N, K, dtype=BF16))
    order = args.order
    order.world, order.nodes, order.domains, order.lanes = WORLD, 1, 1, WORLD
    order.raster, order.comm_tile_rows = 1, m // WORLD
    sync = args.sync
    sync.epoch, sync.timeout_ns, sync.status = 1, 10**10, memory.words(0)
    if case.op == "gemm_rs":
        rows, guard = m // WORLD, 128
        slots = [torch.zeros(guard + rows, N, dtype=BF16) for _ in range(WORLD)]
        args.set_slots([memory.address(slot) + 2 * guard * N for slot in slots])
        args.set_flags([memory.words(0) for _ in range(WORLD)])
        args.slot_ld, args.guard_rows, args.entries = N, guard, memory.words(1)
    else:
        args.d = memory.address(torch.zeros(m, N, dtype=BF16))
        args.signals = memory.words(1) if case.waits else 0
    return args


def launched(device: CudaDevice, built: BuiltKernel, case: Case, m: int) -> Counters:
    """Run a kernel once; return what it executed."""
    from ptx_machine import kernel_counters

    device.clear()
    memory = Memory(device)
    kernel = _C.Kernel(str(built.library), built.symbol)
    kernel.prepare(0)
    args = arguments(memory, case, m)
    if size := kernel.workspace_bytes(args):
        args.workspace = memory.address(torch.zeros(size, dtype=torch.uint8))
        args.workspace_bytes = size
    kernel.launch(args, 0)
    if device.error():
        raise SystemExit(device.error())
    (counters,) = kernel_counters(device)
    return counters


def parts(counters: Counters) -> Iterator[tuple[str, Work]]:
    """Yield the work of producer and consumer warps, or of all where they do the same."""
    from ptx_machine import Work

    producers, consumers, others = Work(), Work(), Work()
    for role in counters.roles:
        multiplies = role.work.wgmma or role.work.mma
        into = consumers if multiplies else producers if role.work.tensor_loads else others
        into += role.work
    if producers.statements:
        yield PARTS[0], producers
        yield PARTS[1], consumers
    else:
        yield PARTS[2], consumers


def measure(device: CudaDevice, built: BuiltKernel, case: Case) -> dict[str, Any]:
    """Return what each part of the warps does for a tile."""
    tile_m, tile_n = built.config.tile[:2]
    tiles = (ROWS[1] - ROWS[0]) // tile_m * (N // tile_n)
    small, large = (dict(parts(launched(device, built, case, m))) for m in ROWS)
    return {
        "case": case.name,
        "kernel": built.symbol,
        "tile": list(built.config.tile),
        "per_tile": {
            part: {key: (getattr(work, key) - getattr(small[part], key)) / tiles for key in KEPT}
            for part, work in large.items()
        },
    }


def figure(case: dict[str, Any], plain: dict[str, Any], part: str) -> str:
    """Return instructions of these warps, and how many more than the plain kernel's."""
    work, base = case["per_tile"].get(part), plain["per_tile"].get(part)
    if work is None or base is None:
        return "-"
    text = f"{work['statements']:,.0f}"
    if case is plain:
        return text
    return unbroken(f"{text} ({work['statements'] / base['statements'] - 1:+.1%})")


def table(document: dict[str, Any]) -> str:
    """Return instructions of warps for a tile, and how many more than a plain kernel's."""
    rows = [
        [
            f"sm_{arch}, {'x'.join(map(str, case['tile']))}: {case['case']}",
            *(figure(case, cases[0], part) for part in PARTS),
        ]
        for arch, cases in document["archs"].items()
        for case in cases
    ]
    return markdown(["kernel", *PARTS], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "kernels", type=Path, help="of tools/compile_kernels.py --emulated, for 80 and 90a"
    )
    parser.add_argument("json", type=Path, help="file to write the results to")
    options = parser.parse_args()
    from ptx_machine import cuda_device

    device = cuda_device()
    registry = Registry.load([options.kernels])
    document: dict[str, Any] = {
        "command": f"python benchmarks/kernel_counters.py DIR {options.json.as_posix()}",
        "device": f"emulated, {MULTIPROCESSORS} multiprocessors",
        "versions": {
            name: ", ".join(sorted({getattr(library, name) for library in registry.libraries}))
            for name in ("nvcc", "cutlass")
        },
        "n": N,
        "k": K,
        "rows": ROWS,
        "world": WORLD,
        "archs": {},
    }
    for arch, cases in CASES.items():
        device.model = "A100" if arch == "80" else "H200"
        device.multiprocessors = MULTIPROCESSORS
        document["archs"][arch] = []
        for case in cases:
            built = [
                kernel
                for kernel in registry.kernels.values()
                if kernel.config.arch == arch and kernel.config.op == case.op
            ]
            if not built:
                raise SystemExit(f"no kernel {case.op} for {arch} is built in {options.kernels}")
            document["archs"][arch].append(measure(device, built[0], case))
    keep(document, options.json)
    print(table(document))


if __name__ == "__main__":
    main()

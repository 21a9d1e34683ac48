"""CUTLASS's own GEMMs, untouched, on the machine that executes PTX.

Kernels and host code are CUTLASS's: its device-wide GEMMs for sm_80, and what its CollectiveBuilder
makes for sm_90a (the headers beside this file only name them). They are compiled to PTX once, and
then kept in the checkout.

    python tests/support/emulation/cutlass_gemms.py --out benchmarks/results/ptx/cutlass.json
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]  # as a script

from flux.kernels.build import Tools, find_tools  # noqa: E402
from ptx_figures import write_figures  # noqa: E402
from ptx_target import ptx_target  # noqa: E402

HEADERS = Path(__file__).with_name("cutlass")
BUILT = ROOT / "build" / "cutlass-gemms"

_ELEMENTS = {
    "bf16": ("cutlass::bfloat16_t", torch.bfloat16),
    "fp16": ("cutlass::half_t", torch.float16),
    "tf32": ("cutlass::tfloat32_t", torch.float32),
    "fp32": ("float", torch.float32),
    "e4m3": ("cutlass::float_e4m3_t", torch.float8_e4m3fn),
    "e5m2": ("cutlass::float_e5m2_t", torch.float8_e5m2),
    "s8": ("std::int8_t", torch.int8),
    "s32": ("std::int32_t", torch.int32),
}
_ORDERS = {"k": ("Row", "Column"), "mn": ("Column", "Row")}  # of A and B, by what is contiguous


@dataclass(frozen=True)
class Gemm:
    """One kernel.

    Attributes:
        arch: 80 or 90a.
        kind: how it is made: of the C++ types in cutlass/sm80.cuh or cutlass/sm90.cuh.
        dtype: of both operands.
        a, b: the contiguous dimension of an operand: ``k``, or ``mn``.
        tile: (m, n, k) of a thread block.
        cluster: (m, n) blocks, on sm_90a.
        stages, warps, alignment: of sm_80; ``warps`` is the tile of one.
        parts: that K is divided into, where the kernel does so.
        library: kernels with the same one are compiled together.
    """

    arch: str
    kind: str
    dtype: str
    a: str
    b: str
    tile: tuple[int, int, int]
    cluster: tuple[int, int] = (1, 1)
    stages: int = 0
    warp: tuple[int, int, int] = (0, 0, 0)
    alignment: int = 0
    parts: int = 1
    library: str = ""

    @property
    def name(self) -> str:
        """A C identifier."""
        numbers = "x".join(map(str, self.tile)) + "_" + "x".join(map(str, self.cluster))
        parts = [f"sm{self.arch}", self.kind, self.dtype, self.a + self.b, numbers]
        parts += [f"p{self.parts}"] * (self.parts > 1) + [f"a{self.alignment}"] * (
            self.arch == "80"
        )
        return "_".join(parts)

    @property
    def result(self) -> str:
        """Name of the dtype of the result."""
        return {"tf32": "fp32", "e4m3": "bf16", "e5m2": "bf16", "s8": "s32"}.get(
            self.dtype, self.dtype
        )

    @property
    def element(self) -> torch.dtype:
        """Dtype of the operands in memory."""
        return _ELEMENTS[self.dtype][1]

    @property
    def aligned(self) -> int:
        """Elements of which contiguous dimensions are a multiple."""
        return self.alignment or 16 // self.element.itemsize

    def source(self) -> str:
        """The C++ line that makes it."""
        cpp = _ELEMENTS[self.dtype][0]
        result = _ELEMENTS[self.result][0]
        a, b = _ORDERS[self.a][0], _ORDERS[self.b][1]
        if self.arch == "90a":
            tile, cluster = (
                "cute::Shape<" + ", ".join(f"cute::Int<{i}>" for i in shape) + ">"
                for shape in (self.tile, (*self.cluster, 1))
            )
            made = f"plain::Built<{cpp}, {result}, plain::{a}, plain::{b}, {tile}, {cluster}, "
            return f"PLAIN_GEMM({self.name}, {made}plain::{self.kind}>)"
        depth = {"tf32": (16, 8, 8), "s8": (16, 8, 32), "fp32": (1, 1, 1)}
        shapes = [
            "plain::GemmShape<" + ", ".join(map(str, shape)) + ">"
            for shape in (self.tile, self.warp, depth.get(self.dtype, (16, 8, 16)))
        ]
        total = "std::int32_t" if self.dtype == "s8" else "float"
        stored = min(self.alignment, 16 // _ELEMENTS[self.result][1].itemsize)
        choice = (
            f"plain::Choice<{cpp}, {result}, {total}, plain::{a}, plain::{b}, "
            f"{', '.join(shapes)}, {self.stages}, {self.alignment}, {stored}>"
        )
        types = {
            "Multistage": f"plain::Multistage<{choice}>",
            "SplitSerial": f"plain::Multistage<{choice}, cutlass::arch::OpClassTensorOp, true>",
            "Simt": f"plain::Multistage<{choice}, cutlass::arch::OpClassSimt>",
            "Universal": f"plain::Universal<{choice}, plain::InOrder>",
            "StreamK": f"plain::Universal<{choice}, plain::StreamK>",
        }
        return f"PLAIN_GEMM({self.name}, {types[self.kind]})"


def _sm80(kind: str, dtype: str, a: str, b: str, **options: Any) -> Gemm:
    settings: dict[str, Any] = {
        "tile": (128, 128, 32),
        "warp": (64, 64, 32),
        "stages": 4,
        "alignment": 8,
        "library": "sm80",
        **options,
    }
    return Gemm("80", kind, dtype, a, b, **settings)


SM80 = (
    _sm80("Multistage", "bf16", "k", "k"),
    _sm80("Multistage", "fp16", "mn", "mn", stages=3),
    _sm80("Universal", "bf16", "mn", "k", tile=(64, 64, 64), warp=(32, 32, 64), stages=3),
    _sm80("Universal", "fp16", "k", "mn", tile=(128, 64, 32), warp=(64, 32, 32), stages=5),
    _sm80("Universal", "bf16", "k", "k", parts=3),
    _sm80("SplitSerial", "fp16", "k", "k", tile=(64, 128, 32), warp=(32, 64, 32), parts=2),
    _sm80("StreamK", "bf16", "k", "k"),
    _sm80("StreamK", "fp16", "mn", "mn", tile=(64, 64, 64), warp=(32, 32, 64), stages=3),
    _sm80("StreamK", "bf16", "k", "mn", tile=(64, 128, 32), warp=(32, 64, 32)),
    _sm80("Universal", "fp16", "k", "k", alignment=2, stages=3),
    _sm80("Multistage", "bf16", "k", "k", alignment=1, stages=2),
    _sm80("Multistage", "tf32", "k", "k", tile=(64, 64, 16), warp=(32, 32, 16), alignment=4),
    _sm80("Multistage", "s8", "k", "k", tile=(64, 64, 64), warp=(32, 32, 64), alignment=16),
    _sm80("Simt", "fp32", "k", "k", tile=(64, 64, 8), warp=(32, 32, 8), alignment=1, stages=2),
)
"""Multistage and stream-K kernels: bf16 and fp16, all orders of both operands; and other types."""


def _sm90(kind: str, cluster: tuple[int, int], dtype: str, a: str = "k", b: str = "k") -> Gemm:
    rows = 128 if kind.endswith(("Cooperative", "StreamK")) else 64
    depth = {"tf32": 32}.get(dtype, 128 // _ELEMENTS[dtype][1].itemsize)
    library = {"Pingpong": "pingpong", "FastPingpong": "pingpong", "StreamK": "stream_k"}
    if kind.startswith("CpAsync"):
        library[kind] = "cp_async"
    return Gemm(
        "90a",
        kind,
        dtype,
        a,
        b,
        (rows, 128, depth),
        cluster,
        library=f"sm90_{library.get(kind, 'cooperative')}",
    )


SM90 = (
    _sm90("Cooperative", (1, 1), "bf16"),
    _sm90("Cooperative", (2, 1), "fp16", "mn", "mn"),
    _sm90("Cooperative", (1, 2), "e4m3"),
    _sm90("FastCooperative", (2, 1), "e4m3"),
    _sm90("Cooperative", (1, 2), "bf16", "k", "mn"),
    _sm90("Pingpong", (1, 1), "fp16", "mn", "k"),
    _sm90("Pingpong", (2, 1), "bf16", "k", "mn"),
    _sm90("Pingpong", (1, 2), "bf16", "mn", "mn"),
    _sm90("Pingpong", (2, 1), "e4m3"),
    _sm90("FastPingpong", (1, 2), "e4m3"),
    _sm90("StreamK", (1, 1), "bf16"),
    _sm90("StreamK", (2, 1), "fp16", "k", "mn"),
    _sm90("StreamK", (1, 2), "e4m3"),
    _sm90("StreamK", (2, 1), "bf16", "mn", "k"),
    _sm90("OneTile", (1, 1), "fp16"),
    _sm90("OneTile", (2, 1), "tf32"),
    _sm90("CpAsyncCooperative", (1, 1), "bf16"),
    _sm90("CpAsyncPingpong", (1, 1), "fp16"),
    _sm90("CpAsyncOneTile", (1, 1), "bf16"),
    _sm90("CpAsyncCooperative", (1, 1), "s8"),
)
"""Every schedule with every cluster and dtype; both orders of an operand where the type allows."""

GEMMS = (*SM80, *SM90)


# -- building --------------------------------------------------------------------------------------


def _text(gemms: Iterable[Gemm], arch: str) -> str:
    tools = '#include "cutlass/util/packed_stride.hpp"\n' if arch == "90a" else ""
    lines = [f'{tools}#include "{"sm90" if arch == "90a" else "sm80"}.cuh"']
    return "\n".join([*lines, *(gemm.source() for gemm in gemms), ""])


def _key(text: str, tools: Tools, arch: str) -> str:
    parts = [text, *(path.read_text() for path in sorted(HEADERS.iterdir()))]
    parts += [*tools.flags(arch), *tools.link_inputs()]
    parts += [tools.nvcc.version or "", tools.cutlass.version or ""]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _library(name: str, tools: Tools) -> tuple[Path, str, str]:
    """Where a library lies or will lie, its architecture, and its source."""
    gemms = [gemm for gemm in GEMMS if gemm.library == name]
    arch = gemms[0].arch
    text = _text(gemms, arch)
    return BUILT / f"{name}-{_key(text, tools, arch)}.so", arch, text


def is_built(library: str) -> bool:
    """Whether a library need not be compiled.

    Raises:
        MissingToolError: there is no nvcc, or no CUTLASS.
    """
    return _library(library, find_tools(ptx_target()))[0].exists()


def build(library: str) -> tuple[Path, float]:
    """Return the shared object of a library, and the seconds that compiling it took.

    Raises:
        MissingToolError: there is no nvcc, or no CUTLASS.
        subprocess.CalledProcessError: it does not compile.
    """
    tools = find_tools(ptx_target())
    target, arch, text = _library(library, tools)
    BUILT.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILT / f"{library}.lock"):
        if target.exists():
            return target, 0.0
        begin = time.monotonic()
        with TemporaryDirectory(dir=BUILT) as name:
            folder = Path(name)
            (folder / "kernels.cu").write_text(text)
            compiling = [*tools.compile_command(arch), f"-I{HEADERS}"]
            for command in (compiling, tools.link_command("kernels.so")):
                subprocess.run(command, cwd=folder, check=True)
            os.replace(folder / "kernels.so", target)
        return target, time.monotonic() - begin


# -- running ---------------------------------------------------------------------------------------


class Problem(ctypes.Structure):
    """plain::Problem of cutlass/problem.h."""

    _fields_ = [
        *[(name, ctypes.c_int) for name in ("m", "n", "k", "lda", "ldb", "ldd")],
        *[(name, ctypes.c_void_p) for name in ("a", "b", "c", "d")],
        *[(name, ctypes.c_float) for name in ("alpha", "beta")],
        *[(name, ctypes.c_int) for name in ("sms", "parts")],
        ("workspace", ctypes.c_void_p),
    ]


def shapes(gemm: Gemm) -> list[tuple[int, int, int]]:
    """Problems for a kernel: a tile and its neighbours, ragged ones, one of a single row."""
    m, n, k = gemm.tile
    step = max(gemm.aligned, 16 // _ELEMENTS[gemm.result][1].itemsize if gemm.arch == "90a" else 1)
    few, some = step, 5 * step  # along K, which is contiguous for one operand at least
    rows = step if gemm.a == "mn" else 1
    ragged = -(-(m + 37) // rows) * rows
    return [
        (rows, n, k),
        (ragged, -(-(n + 20) // step) * step, 3 * k + some),
        (2 * m + rows, step, 5 * k + few),
        (2 * m, 2 * n + step, 9 * k),
    ]


def _operand(rows: int, k: int, order: str, gemm: Gemm, generator: torch.Generator) -> torch.Tensor:
    """[rows, k], as it lies in memory."""
    if gemm.dtype == "s8":
        dense = torch.randint(-128, 128, (rows, k), generator=generator)
    else:
        dense = torch.randn(rows, k, generator=generator)
    if gemm.dtype == "tf32":  # whose lowest bits are not used
        dense = (dense.view(torch.int32) & ~0x1FFF).view(torch.float32)
    dense = dense.to(gemm.element)
    return dense if order == "k" else dense.t().contiguous()


def with_proxy_fences(text: str) -> str:
    """PTX whose products come behind a fence of the async proxy.

    The mainloops that copy operands with cp.async have none: ptx_machine/findings.md.
    """
    fence = "wgmma.fence.sync.aligned;"
    return text.replace(fence, f"fence.proxy.async.shared::cta;\n\t{fence}")


class Runner:
    """Runs GEMMs on the machine of this process, which must have no streams."""

    SMS = 6

    def __init__(self) -> None:
        from ptx_machine import cuda_device, extent

        self.device, self.extent = cuda_device(), extent
        self.device.multiprocessors = self.SMS
        self.libraries: dict[str, ctypes.CDLL] = {}

    def load(self, library: str) -> float:
        """Load a library, which may have to be built; return the seconds that took.

        Kernels that are loaded later are parsed with the fences that this library's lack, if any.
        """
        path, seconds = build(library)
        self.device.edit = with_proxy_fences if library.endswith("cp_async") else None
        self.libraries[library] = ctypes.CDLL(str(path))
        return seconds

    def know(self, *tensors: torch.Tensor) -> None:
        """Let kernels access the tensors."""
        for tensor in tensors:
            self.device.machine.add_memory(*self.extent(tensor), "a matrix")

    def run(self, gemm: Gemm, shape: tuple[int, int, int], seed: int) -> float:
        """Run one problem; return the largest error as a part of the bound.

        Raises:
            AssertionError: CUTLASS refuses it, the machine finds a fault, or a result is wrong.
        """
        m, n, k = shape
        self.device.seed = seed
        generator = torch.Generator().manual_seed(seed * 7919 + m)
        a = _operand(m, k, gemm.a, gemm, generator)
        b = _operand(n, k, gemm.b, gemm, generator)
        result = _ELEMENTS[gemm.result][1]
        c = (8 * torch.randn(m, n, generator=generator)).to(result)
        d = torch.full((m, n), 77, dtype=result) if gemm.dtype == "s8" else c * float("nan")
        problem = Problem(m=m, n=n, k=k, ldd=n, alpha=2.0, beta=-1.0, sms=self.SMS)
        problem.lda, problem.ldb = a.shape[1], b.shape[1]
        problem.parts = gemm.parts
        problem.a, problem.b, problem.c, problem.d = (t.data_ptr() for t in (a, b, c, d))
        library = self.libraries[gemm.library]
        workspace = getattr(library, f"{gemm.name}_workspace")
        workspace.restype = ctypes.c_size_t
        size = workspace(ctypes.byref(problem))
        room = torch.full((size + 16,), 0xCD, dtype=torch.uint8)
        problem.workspace = room.data_ptr()
        self.know(a, b, c, d, room)
        status = getattr(library, gemm.name)(ctypes.byref(problem))
        where = f"{gemm.name} {shape} seed {seed}"
        assert not self.device.error(), f"{where}: {self.device.error()}"
        assert status == 0, f"{where}: cutlass::Status {status}"
        a, b = (t if order == "k" else t.t() for t, order in ((a, gemm.a), (b, gemm.b)))
        return _judge(where, gemm, a, b, c, d)


def _judge(where: str, gemm: Gemm, *tensors: torch.Tensor) -> float:
    a, b, c, d = (tensor.double() for tensor in tensors)
    k = a.shape[1]
    right = 2 * (a @ b.t()) - c
    if gemm.dtype == "s8":
        assert torch.equal(d, right), where
        return 0.0
    unit = torch.finfo(torch.float32).eps / 2
    kept = torch.finfo(tensors[3].dtype)
    magnitude = 2 * a.abs() @ b.abs().t() + c.abs()
    bound = (k + 4) * unit * magnitude
    if gemm.dtype in ("e4m3", "e5m2"):  # what is cut: see tests/support/reference.py
        depth = k if gemm.kind.startswith("Fast") else min(k, 128)
        bound = bound + -(-depth // 32) * 2.0**-13 * magnitude
    bound = bound + kept.eps / 2 * (right.abs() + bound) + kept.smallest_normal
    if gemm.kind in ("Universal", "SplitSerial"):  # whose parts of K are added up in D
        bound = bound + (gemm.parts - 1) * kept.eps / 2 * magnitude
    error = (d - right).abs()
    wrong = ~(error <= bound)  # NaN is wrong
    assert not wrong.any(), (
        f"{where}: {int(wrong.sum())} of {d.numel()} are wrong, {int(d.isnan().sum())} are NaN, "
        f"first {wrong.nonzero()[0].tolist()}"
    )
    return float((error / bound).max())


def measure(runner: Runner, gemm: Gemm, seeds: Sequence[int]) -> dict[str, Any]:
    """Run all problems of a kernel with each seed."""
    runner.device.clear()
    begin, worst = time.process_time(), 0.0
    for seed in seeds:
        for shape in shapes(gemm):
            worst = max(worst, runner.run(gemm, shape, seed))
    counters = runner.device.counters()
    return {
        "kernel": gemm.name,
        "shapes": shapes(gemm),
        "seeds": len(seeds),
        "error / bound": round(worst, 4),
        "thread_instructions": sum(c["instructions"] for c in counters.values()),
        "seconds": round(time.process_time() - begin, 2),
    }


def main() -> None:
    """Run the kernels, and write what came out."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", default="", help="kernels whose names contain this")
    parser.add_argument("--seeds", type=int, default=3, help="how many; the first one is 0")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    chosen = [g for g in GEMMS if options.only in g.name]
    runner, rows = Runner(), []
    for library in dict.fromkeys(g.library for g in chosen):
        print(f"{library}: compiled in {runner.load(library):.0f} s", flush=True)
        for gemm in (g for g in chosen if g.library == library):
            rows.append(measure(runner, gemm, range(options.seeds)))
            print(rows[-1], flush=True)
    if options.out is not None:
        write_figures(options.out, "python tests/support/emulation/cutlass_gemms.py", rows)


if __name__ == "__main__":
    main()

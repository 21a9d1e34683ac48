"""PTX kernels around wgmma, and where the PTX ISA has the elements of its matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ptx_text import kernel, run

THREADS = 128
DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "s8": torch.int8,
    "u8": torch.uint8,
}
SWIZZLE_MODES = {0: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class Tile:
    """A matrix in shared memory: K-major or MN-major, with a swizzle of 0, 32, 64 or 128 bytes."""

    start: int
    leading: int = 128
    stride: int = 256
    swizzle: int = 0
    is_mn_major: bool = False
    base_offset: int = 0

    def descriptor(self) -> int:
        """Return the 64 bits of the matrix descriptor."""
        return (
            self.start >> 4
            | self.leading >> 4 << 16
            | self.stride >> 4 << 32
            | self.base_offset << 49
            | SWIZZLE_MODES[self.swizzle] << 62
        )

    def addresses(self, rows: int, depth: int, size: int) -> np.ndarray[Any, Any]:
        """Return the address of each element, [rows, depth], of ``size`` bytes."""
        row, column = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
        width = self.swizzle
        if self.is_mn_major:
            byte = row * size
            if width:
                offset = byte // width * self.leading + byte % width
                offset += column % 8 * width + column // 8 * self.stride
            else:
                offset = byte // 16 * self.stride + byte % 16
                offset += column % 8 * 16 + column // 8 * self.leading
        else:
            byte = column * size
            offset = row // 8 * self.stride
            if width:
                offset += row % 8 * width + byte
            else:
                offset += row % 8 * 16 + byte // 16 * self.leading + byte % 16
        address = self.start + offset
        if width:
            row_of_pattern = address // 128 - self.base_offset
            address ^= row_of_pattern % (width // 16) * 16
        return np.asarray(address)

    def put(self, image: np.ndarray[Any, Any], matrix: torch.Tensor) -> None:
        """Write a matrix [rows, depth] to the bytes of shared memory."""
        size = matrix.element_size()
        raw = matrix.contiguous().view(torch.uint8).numpy().reshape(*matrix.shape, size)
        rows, depth = matrix.shape
        at = self.addresses(rows, depth, size)
        for byte in range(size):
            image[at + byte] = raw[..., byte]


@dataclass
class Product:
    """One wgmma of a warpgroup, with D [64, n] = A [64, k] B [n, k]^T + D."""

    n: int
    a_type: str = "bf16"
    b_type: str = ""
    d_type: str = "f32"
    a: Tile | None = field(default_factory=lambda: Tile(0))  # None: in registers
    b: Tile = field(default_factory=lambda: Tile(8192))
    scale_d: str = "1"
    scales: tuple[int, int] = (1, 1)
    saturates: bool = False

    def __post_init__(self) -> None:
        self.b_type = self.b_type or self.a_type
        self.size = torch.empty(0, dtype=DTYPES[self.a_type]).element_size()
        self.k = 32 // self.size

    @property
    def registers(self) -> int:
        """Of D in each thread."""
        return self.n // 4 if self.d_type == "f16" else self.n // 2

    def statement(self, first: int = 0, **changes: str) -> str:
        """Return the PTX; D is in %d{first} and those behind it, A in %a0 to %a3."""
        parts = {
            "shape": f"m64n{self.n}k{self.k}" + (".satfinite" if self.saturates else ""),
            "types": f"{self.d_type}.{self.a_type}.{self.b_type}",
            "d": ", ".join(f"%d{first + i}" for i in range(self.registers)),
            "a": "%rd40" if self.a else "{%a0, %a1, %a2, %a3}",
            "b": "%rd41",
            "scale_d": self.scale_d,
            **changes,
        }
        tail = ""
        if self.d_type != "s32":
            tail += f", {self.scales[0]}, {self.scales[1]}"
        if self.size == 2:
            tail += f", {int(self.a.is_mn_major)}" if self.a else ""
            tail += f", {int(self.b.is_mn_major)}"
        return (
            "wgmma.mma_async.sync.aligned.{shape}.{types} {{{d}}}, {a}, {b}, {scale_d}".format(
                **parts
            )
            + tail
            + ";\n"
        )

    def text(self, body: str, shared: int) -> str:
        """Return a kernel: shared memory is that of p0, A registers of p1, D those of p2."""
        kind = {"f16": "b32", "f32": "f32", "s32": "b32"}[self.d_type]
        loads = [f"ld.global.{kind} %d{i}, [%rd44+{4 * i}];" for i in range(self.registers)]
        stores = [f"st.global.{kind} [%rd44+{4 * i}], %d{i};" for i in range(self.registers)]
        return kernel(
            f"""
            .shared .align 1024 .b8 memory[{shared}];
            .reg .{kind} %d<256>;
            .reg .b32 %a<4>;
            ld.param.u64 %rd42, [p0];
            ld.param.u64 %rd43, [p1];
            ld.param.u64 %rd44, [p2];
            mul.lo.u32 %r1, %r0, 16;
        FILL:
            cvt.u64.u32 %rd1, %r1;
            add.u64 %rd1, %rd1, %rd42;
            ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%rd1];
            st.shared.v4.u32 [%r1], {{%r2, %r3, %r4, %r5}};
            add.u32 %r1, %r1, {16 * THREADS};
            setp.lt.u32 %p1, %r1, {shared};
            @%p1 bra FILL;
            fence.proxy.async.shared::cta;
            bar.sync 0;
            mul.wide.u32 %rd1, %r0, 16;
            add.u64 %rd43, %rd43, %rd1;
            ld.global.v4.u32 {{%a0, %a1, %a2, %a3}}, [%rd43];
            mul.wide.u32 %rd1, %r0, {4 * self.registers};
            add.u64 %rd44, %rd44, %rd1;
            mov.b64 %rd40, {self.a.descriptor() if self.a else 0};
            mov.b64 %rd41, {self.b.descriptor()};
            {" ".join(loads)}
            {body}
            {" ".join(stores)}
            """,
            3,
        )


def fragments_of_a(a: torch.Tensor) -> torch.Tensor:
    """Return [128, 16] bytes: the four registers of each thread that hold A [64, k]."""
    size = a.element_size()
    count = 4 // size
    thread = torch.arange(THREADS).view(-1, 1, 1)
    register = torch.arange(4).view(1, -1, 1)
    part = torch.arange(count).view(1, 1, -1)
    row = thread // 32 * 16 + thread % 32 // 4 + register % 2 * 8
    column = thread % 4 * count + register // 2 * 4 * count + part
    return a.view(torch.uint8).view(64, -1, size)[row, column].reshape(THREADS, 16).clone()


def positions_of_d(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column of each element that a thread holds, [128, n / 2] each."""
    thread = torch.arange(THREADS).view(-1, 1)
    element = torch.arange(n // 2).view(1, -1)
    row = thread // 32 * 16 + thread % 32 // 4 + element // 2 % 2 * 8
    return row, element // 4 * 8 + thread % 4 * 2 + element % 2


def execute(
    product: Product,
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    body: str = "",
    shared: int = 32768,
    **options: Any,
) -> torch.Tensor:
    """Run a kernel around a product; return D [64, n] afterwards.

    Args:
        product: what is executed.
        a: [64, k].
        b: [n, k].
        d: [64, n], before.
        body: statements in place of the product between a fence and a wait.
        shared: bytes of shared memory.
        options: of the launch.
    """
    image = np.zeros(shared, dtype=np.uint8)
    if product.a:
        product.a.put(image, a)
    product.b.put(image, b)
    row, column = positions_of_d(product.n)
    registers = d[row, column].contiguous()
    body = (
        body
        or f"""
        wgmma.fence.sync.aligned;
        {product.statement()}
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
    """
    )
    fragments = fragments_of_a(a.contiguous())
    settings: dict[str, Any] = {"block": THREADS, **options}
    run(product.text(body, shared), [torch.from_numpy(image), fragments, registers], **settings)
    result = torch.empty_like(d)
    result[row, column] = registers
    return result

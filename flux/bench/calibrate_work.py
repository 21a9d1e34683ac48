"""What `flux plan calibrate` measures: points, and the calls of torch that do their work.

    gemm          x [m, k] times weight; variant: which of a linear's three products
    attention     causal scaled_dot_product_attention
    rms_norm ...  torch's own functions, one after the other, as an eager program calls them
    adamw         a step of the fused optimizer; elements in 16 tensors, all in float32
    cross_entropy logits to float32, and the loss
    copy          d2d in the device's memory; h2d and d2h from and to pinned memory

Contents are normal random numbers: a GPU draws less power for zeros, and clocks higher.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Call = Callable[[], object]
_TENSORS = 16
"""Among which the elements of an optimizer's step are divided."""
_BOTH = ("forward", "backward")
_FLOAT8 = "float8_e4m3fn"


class Point(NamedTuple):
    """One thing to measure.

    Attributes:
        kind: what is called.
        shape: gemm: (m, n, k). attention: (batch, heads, queries, keys, head_dim). rotary: (rows,
            heads, head_dim). adamw: (elements,). copy: (bytes,). Others: (rows, width).
        dtype: of the operands.
        variant: gemm: fwd | dgrad | wgrad. copy: d2d | h2d | d2h. launch: eager | stream | graph.
            Others: forward | backward.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    variant: str


# -- points ----------------------------------------------------------------------------------------


def points_of(kind: str, dtype: str, *, float8: bool, small: bool) -> Iterator[Point]:
    """Return the points of a device, the most important ones first.

    Args:
        kind: of device: cuda | cpu.
        dtype: of the operands.
        float8: whether the device multiplies float8.
        small: take few and small ones.
    """
    gpu = kind == "cuda"
    for variant in ("eager", "stream", "graph") if gpu else ("eager",):
        yield Point("launch", (), dtype, variant)
    axis = [64, 128] if small else [256, 512, 1024, 2048]
    rows = [64] if small else [64, 128, *axis]
    if gpu and not small:
        axis = [512, 1024, 2048, 4096, 8192, 16384]
        rows = [16, 128, *axis]
    grid = _shuffled(Point("gemm", s, dtype, "fwd") for s in product(rows, axis, axis))
    coarse = set(product(rows[-1::-2], axis[-1::-2], axis[-1::-2]))
    # A run that is cut short has some of each kind.
    yield from (point for point in grid if point.shape in coarse)
    yield from _elementwise(dtype, gpu and float8, gpu, small)
    least, most = (8, 8) if small else (14, 28) if gpu else (12, 22)
    for power in range(least, most + 1, 2):
        yield Point("adamw", (_TENSORS << power - 4,), "float32", "forward")
    vocabularies = [(32, 500)] if small else [(256, 8000), (256, 32000)]
    if gpu and not small:
        vocabularies = list(product((1024, 4096, 8192), (32000, 128256)))
    for shape, variant in product(vocabularies, _BOTH):
        yield Point("cross_entropy", shape, dtype, variant)
    yield from _attention(dtype, gpu, small)
    yield from (point for point in grid if point.shape not in coarse)
    gradients = product(sorted(coarse), ("dgrad", "wgrad"))
    yield from (Point("gemm", shape, dtype, variant) for shape, variant in gradients)
    yield from (Point("gemm", s, dtype, "fwd") for s in _odd(rows, axis, 4 if small else 60))
    if gpu and float8:
        eights = product(
            rows[-1::-2], axis[::2] if small else axis[1:], axis[::2] if small else axis
        )
        yield from _shuffled(Point("gemm", s, _FLOAT8, "fwd") for s in eights)
        odd = _odd(rows, axis, 2 if small else 30)
        yield from (Point("gemm", s, _FLOAT8, "fwd") for s in odd)
    for power in (16,) if small else (20, 24, 28, 30) if gpu else (16, 20, 24, 26):
        for variant in ("d2d", "h2d", "d2h") if gpu and power < 30 else ("d2d",):
            yield Point("copy", (1 << power,), "uint8", variant)


def _shuffled(points: Iterator[Point]) -> list[Point]:
    """Return points in random order: a drift of clocks is no trend over sizes then."""
    listed = list(points)
    random.Random(1).shuffle(listed)
    return listed


def _odd(rows: Sequence[int], axis: Sequence[int], count: int) -> Iterator[tuple[int, int, int]]:
    """Return sizes between those of the grid, multiples of 16 as float8 needs."""
    draw = random.Random(2)

    def size(values: Sequence[int]) -> int:
        ratio: float = (values[-1] / values[0]) ** draw.random()
        return 16 * max(1, round(values[0] * ratio / 16))

    for _ in range(count):
        yield size(rows), size(axis), size(axis)


def _attention(dtype: str, gpu: bool, small: bool) -> Iterator[Point]:
    lengths = [64] if small else [128, 256, 512, 1024]
    heads, tokens = ([2], 64) if small else ([4], 512)
    if gpu and not small:
        lengths, heads, tokens = [512, 1024, 2048, 4096, 8192, 16384, 32768], [8, 32], 8192
    for dim, length, number in product((64,) if small else (128, 64), lengths, heads):
        if gpu and dim == 64 and number != heads[-1]:
            continue  # libraries take a quarter of a second to choose a kernel for each shape
        shape = max(1, tokens // length), number, length, length, dim
        yield from (Point("attention", shape, dtype, variant) for variant in _BOTH)


def _elementwise(dtype: str, float8: bool, gpu: bool, small: bool) -> Iterator[Point]:
    powers = range(11, 12) if small else range(18, 29) if gpu else range(14, 24)
    for power in powers:
        rows, width = 1 << power // 2, 1 << power - power // 2
        for kind, variant in product(("rms_norm", "layer_norm", "silu_mul", "gelu"), _BOTH):
            yield Point(kind, (rows, width), dtype, variant)
        for kind in ("add", "cast", *(["cast_float8"] if float8 else [])):
            yield Point(kind, (rows, width), dtype, "forward")
        dim = 64 if width < 4096 else 128
        for variant in _BOTH:
            yield Point("rotary", (rows, width // dim, dim), dtype, variant)


# -- work ------------------------------------------------------------------------------------------


class Pool:
    """Random numbers of which tensors are views, each behind the last one.

    Args:
        device: that has them.
        elements: how many.
        cache: bytes that the device's last cache has.
    """

    def __init__(self, device: torch.device, elements: int, cache: int) -> None:
        self.device, self.elements, self.cache = device, elements, cache
        self._pools: dict[torch.dtype, torch.Tensor] = {}
        self._next = 0

    def take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Return a tensor that shares no element with those taken just before.

        Raises:
            ValueError: it is larger than the pool.
        """
        count = prod(shape)
        if count > self.elements:
            raise ValueError(f"{shape} has more than the {self.elements} elements of the pool")
        if self._next + count > self.elements:
            self._next = 0
        first, self._next = self._next, self._next + -(-count // 256) * 256
        return self._pool(dtype)[first : first + count].view(shape)

    def _pool(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._pools:
            if self._pools and dtype.itemsize == 1:
                pool = next(iter(self._pools.values())).to(dtype)
            else:
                pool = torch.empty(self.elements, dtype=dtype, device=self.device).normal_()
            self._pools[dtype] = pool
        return self._pools[dtype]


def calls_of(point: Point, pool: Pool) -> list[Call]:
    """Return calls of the same work on different inputs, which together outsize the cache.

    Raises:
        ValueError: an unknown kind, or sizes beyond the pool.
    """
    make = _MAKERS.get(point.kind, _function)
    first = make(point, pool)
    held = max(1, _bytes(point))
    sets = min(32, 1 + 2 * pool.cache // held)
    return [first, *(make(point, pool) for _ in range(sets - 1))]


def _bytes(point: Point) -> int:
    """Return about how many bytes the inputs of a call have."""
    size: int = getattr(torch, point.dtype).itemsize
    if point.kind == "gemm":
        m, n, k = point.shape
        return size * (m * k + n * k)
    if point.kind == "attention":
        batch, heads, queries, keys, dim = point.shape
        return size * batch * heads * dim * (queries + 2 * keys)
    count: int = prod(point.shape)
    return size * count * {"adamw": 4, "rotary": 1, "cast": 1}.get(point.kind, 2)


def _gemm(point: Point, pool: Pool) -> Call:
    (m, n, k), dtype = point.shape, getattr(torch, point.dtype)
    if point.dtype == _FLOAT8:
        a, b = pool.take(dtype, m, k), pool.take(dtype, n, k).t()
        one = torch.ones((), device=pool.device)
        scaled: Any = torch._scaled_mm
        return lambda: scaled(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    left = pool.take(dtype, k, m).t() if point.variant == "wgrad" else pool.take(dtype, m, k)
    right = pool.take(dtype, n, k).t() if point.variant == "fwd" else pool.take(dtype, k, n)
    out = torch.empty(m, n, dtype=dtype, device=pool.device)
    return lambda: torch.mm(left, right, out=out)


def _adamw(point: Point, pool: Pool) -> Call:
    """Return a step as ``torch.optim.AdamW(fused=True)`` calls it, which takes long to import."""
    each, device = point.shape[0] // _TENSORS, pool.device
    weights, gradients = (
        [pool.take(torch.float32, each).clone() for _ in range(_TENSORS)] for _ in range(2)
    )
    moments, squares = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    steps = [torch.ones((), device=device) for _ in weights]
    numbers = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    step: Any = torch._fused_adamw_
    return lambda: step(
        *(weights, gradients, moments, squares, [], steps),
        **numbers,
        amsgrad=False,
        maximize=False,
    )


def _copy(point: Point, pool: Pool) -> Call:
    count, gpu = point.shape[0] // 4, pool.device.type == "cuda"
    near = pool.take(torch.float32, count)
    if point.variant == "d2d":
        other = torch.empty_like(near)
    else:
        other = torch.empty(count, dtype=torch.float32, pin_memory=gpu)
    source, target = (other, near.clone()) if point.variant == "h2d" else (near, other)
    return lambda: target.copy_(source, non_blocking=True)


def _launch(point: Point, pool: Pool) -> Call:
    x = torch.zeros(1, device=pool.device)
    return lambda: x.add_(1.0)


def _function(point: Point, pool: Pool) -> Call:
    """Return a call of a function, or of its backward on one forward's results."""
    function, inputs = _function_of(point, pool)
    if point.variant == "forward":

        def forward() -> object:
            with torch.no_grad():
                return function(*inputs)

        return forward
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    with torch.enable_grad():
        out = function(*leaves)
    into = torch.ones_like(out) if out.ndim == 0 else pool.take(out.dtype, *out.shape)
    wanted = [x for x in leaves if x.requires_grad]
    return lambda: torch.autograd.grad(out, wanted, into, retain_graph=True)


def _function_of(point: Point, pool: Pool) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return a function of torch's and its inputs.

    Raises:
        ValueError: an unknown kind.
    """
    kind, shape, dtype = point.kind, point.shape, getattr(torch, point.dtype)
    x = pool.take(dtype, *shape) if kind not in ("attention", "cross_entropy") else None
    if x is not None and kind in _FUNCTIONS:
        others = [pool.take(dtype, *shape)] if kind in ("add", "silu_mul") else []
        others += [pool.take(dtype, shape[-1]) for _ in range(_WEIGHTS.get(kind, 0))]
        return _FUNCTIONS[kind], [x, *others]
    if x is not None and kind == "rotary":
        angles = [pool.take(dtype, shape[0], 1, shape[2]).detach() for _ in range(2)]
        return lambda heads: _rotated(heads, *angles), [x]
    if kind == "attention":
        batch, heads, queries, keys, dim = shape
        # Heads inside tokens, as a projection leaves them.
        lengths = (queries, keys, keys)
        q, k, v = (pool.take(dtype, batch, s, heads, dim).transpose(1, 2) for s in lengths)
        attend = F.scaled_dot_product_attention
        return lambda q, k, v: attend(q, k, v, is_causal=queries == keys), [q, k, v]
    if kind == "cross_entropy":
        rows, vocabulary = shape
        target = torch.randint(vocabulary, (rows,), device=pool.device)
        logits = pool.take(dtype, rows, vocabulary)
        return lambda x, t: F.cross_entropy(x.float(), t), [logits, target]
    raise ValueError(f"nothing to measure is called {kind!r}")


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


_WEIGHTS = {"rms_norm": 1, "layer_norm": 2}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, w: F.rms_norm(x, w.shape, w),
    "layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
    "silu_mul": lambda x, y: F.silu(x) * y,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "add": torch.add,
    "cast": lambda x: x.to(torch.float32 if x.dtype != torch.float32 else torch.bfloat16),
    "cast_float8": lambda x: x.to(torch.float8_e4m3fn),
}
_MAKERS: dict[str, Callable[[Point, Pool], Call]] = {
    "gemm": _gemm,
    "adamw": _adamw,
    "copy": _copy,
    "launch": _launch,
}

"""Right answers in float64, and how far a correct op may be from them, element by element.

The bound is derived from K, the dtype's precision and the magnitudes at hand. With u the unit
roundoff of the accumulator (float32 for the 16-bit dtypes), a sum of K products in any order errs
by at most

    K * u * (|A| @ |B|)                                            to first order

Tensor cores cut sums of float8, at every 32 products, to 13 bits of fraction: K/32 times 2^-13
(|A| @ |B|) more, or 4 times that where sums are promoted after every 128 of K. What is cut from
products is less than |A| @ |B| is above the sum.

Results in a 16-bit dtype are rounded besides. How often follows from what the op promises: AGGemm
rounds once; the fused GemmRS and GemmAR round every rank's partial product once, then add up in
float32 and round the sum once. The library's reduction (path = unfused) rounds after each of its
W - 1 additions as well, and before the mean and the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flux import AGGemm, GemmAR, GemmRS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
ACTIVATIONS = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
OPS = {"ag_gemm": AGGemm, "gemm_rs": GemmRS, "gemm_ar": GemmAR}
LAYOUTS = ("dense", "transposed", "strided", "inside")


@dataclass(frozen=True)
class Problem:
    """One op, up to the number of rows; sizes are global. ``n`` has one entry per weight."""

    op: str
    max_m: int
    n: tuple[int, ...]
    k: int
    dtype: torch.dtype = torch.float32
    transpose_weight: bool = False
    reduce: str = "sum"
    scaling: str = "none"
    activation: str = "none"
    fast_accum: bool = False

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == FP8 else self.dtype

    @property
    def gathers(self) -> bool:
        return self.op == "ag_gemm"

    def build(self, group: Any = None, **options: Any) -> Any:
        """The op under test. Collective."""
        options.setdefault("timeout_s", 30.0)
        if self.gathers:
            options["activation"] = self.activation
        else:
            options["reduce"] = self.reduce
        return OPS[self.op](
            group,
            max_m=self.max_m,
            n=self.n[0] if len(self.n) == 1 else self.n,
            k=self.k,
            dtype=self.dtype,
            transpose_weight=self.transpose_weight,
            scaling=self.scaling,
            fast_accum=self.fast_accum,
            **options,
        )


def share(size: int, world: int, rank: int) -> slice:
    """Return the part of ``size`` that ``rank`` owns, by the definition in the documentation."""
    part = -(-size // world)
    return slice(min(size, rank * part), min(size, (rank + 1) * part))


def length(part: slice) -> int:
    return part.stop - part.start


def all_nan(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A matrix of NaN, which all bits set are in every dtype."""
    size = rows * columns * like.itemsize
    bits = torch.full((size,), 255, dtype=torch.uint8, device=like.device)
    return bits.view(like.dtype).view(rows, columns)


def lay_out(dense: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values in another memory layout. Gaps are NaN."""
    if layout == "dense":
        return dense.contiguous()
    if layout == "transposed":
        return dense.t().contiguous().t()
    rows, columns = dense.shape
    if layout == "strided":
        view = all_nan(dense, 2 * rows, 3 * columns)[::2, ::3]
    else:  # inside a larger matrix, at an odd place
        view = all_nan(dense, rows + 3, columns + 5)[1 : rows + 1, 3 : columns + 3]
    view.copy_(dense)
    return view


class Inputs:
    """Fresh inputs of one call: everybody's, since every rank draws the same numbers."""

    on_tensor_cores = False

    def __init__(self, problem: Problem, m: int, world: int, seed: int, bias: bool = True) -> None:
        self.problem, self.m, self.world = problem, m, world
        generator = torch.Generator().manual_seed(seed)
        draw = torch.float64 if problem.dtype == torch.float64 else torch.float32

        def normal(*shape: int, dtype: torch.dtype = problem.dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=draw).to(dtype)

        self.x = normal(m, problem.k)
        self.weights = [normal(n, problem.k) for n in problem.n]
        out = problem.out_dtype
        self.biases = [normal(n, dtype=out) if bias else None for n in problem.n]
        # Scales: of x by rank, since every rank quantises what it has; of weights likewise.
        self.scale_x: list[torch.Tensor] = []
        self.scale_weights: list[list[torch.Tensor]] = []
        if problem.scaling != "none":
            ranks = range(world)
            per_row = problem.scaling == "row"

            def scale(size: int) -> torch.Tensor:
                return torch.rand(size if per_row else 1, generator=generator) + 0.25

            shared = scale(m)
            apart = not problem.gathers
            self.scale_x = [scale(m) if apart else shared for _ in ranks]
            for _ in ranks:
                of_rank = [scale(n) for n in problem.n]
                # Columns of an AllGather's weights belong to one rank each.
                first = self.scale_weights[0] if self.scale_weights else of_rank
                self.scale_weights.append(of_rank if apart else first)

    def local(self, rank: int, layout: str = "dense", padded: bool = False) -> tuple[Any, Any, Any]:
        """(x, weight, bias) as ``rank`` passes them, lists where the op has several weights."""
        p = self.problem
        if p.gathers:
            x = self.x[share(self.m, self.world, rank)]
            parts = [(share(n, self.world, rank), slice(None)) for n in p.n]
            if padded:
                rows = -(-self.m // self.world)
                padding = all_nan(x, rows, p.k)
                padding[: x.shape[0]] = x
                x = padding
        else:
            columns = share(p.k, self.world, rank)
            x = self.x[:, columns]
            parts = [(slice(None), columns)]
        weights = [
            lay_out(w[part].t() if p.transpose_weight else w[part], layout)
            for w, part in zip(self.weights, parts, strict=True)
        ]
        biases = [
            None if b is None else b[part[0]] for b, part in zip(self.biases, parts, strict=True)
        ]
        x = lay_out(x, layout)
        return (x, weights, biases) if len(p.n) > 1 else (x, weights[0], biases[0])

    def call(
        self,
        op: Any,
        rank: int,
        *,
        layout: str = "dense",
        padded: bool = False,
        gather: bool = False,
    ) -> list[torch.Tensor]:
        """Run the op; return its results, with the gathered x last if requested."""
        return self.ready(rank, layout=layout, padded=padded)(op, gather)

    def ready(
        self, rank: int, *, layout: str = "dense", padded: bool = False
    ) -> Callable[..., list[torch.Tensor]]:
        """Put the inputs of ``rank`` where the op takes them.

        Returns ``call(op, gather=False)``, which runs the op once and drops the inputs.

        Ranks that share a GPU need this: a transfer waits for the stream, whose last call may wait
        for calls that other ranks have not made.
        """
        x, weight, bias = self.local(rank, layout, padded)
        pending = [(x, weight, bias, self.scales(rank, x.shape[0]))]
        del x, weight, bias

        def call(op: Any, gather: bool = False) -> list[torch.Tensor]:
            x, weight, bias, scales = pending.pop()
            if not self.problem.gathers:
                return [op(x, weight, bias, **scales)]
            got = op(x, weight, bias, m=self.m, return_gathered=gather, **scales)
            got, x_full = got if gather else (got, None)
            outs = list(got) if isinstance(got, list) else [got]
            return [*outs, x_full] if gather else outs

        return call

    def scales(self, rank: int, rows: int) -> dict[str, Any]:
        """The scales that ``rank`` passes with ``rows`` rows of x, padding among them."""
        p = self.problem
        if p.scaling == "none":
            return {}
        of_x, of_weights = self.scale_x[rank], self.scale_weights[rank]
        if p.gathers and p.scaling == "row":
            of_x = of_x[share(self.m, self.world, rank)]
            of_x = torch.cat([of_x, of_x.new_full((rows - len(of_x),), float("nan"))])
            of_weights = [
                s[share(n, self.world, rank)] for s, n in zip(of_weights, p.n, strict=True)
            ]
        return {"scale_x": of_x, "scale_weight": of_weights if len(p.n) > 1 else of_weights[0]}

    def dequantised(self, weight: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x [M, K] and a weight [N, K] in float64, scales multiplied in."""
        p, x, w = self.problem, self.x.double(), self.weights[weight].double()
        if p.scaling == "none":
            return x, w
        x, w = x.clone(), w.clone()
        for rank in range(self.world):
            part = slice(None) if p.gathers else share(p.k, self.world, rank)
            if p.gathers and rank > 0:
                break  # the same for all
            x[:, part] *= self.scale_x[rank].double().view(-1, 1)
            w[:, part] *= self.scale_weights[rank][weight].double().view(-1, 1)
        return x, w

    def expected(self, rank: int, path: str = "fused") -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(float64 result, largest permitted deviation) of each output of ``rank``."""
        p = self.problem
        if p.gathers:
            outputs = []
            for number, (n, bias) in enumerate(zip(p.n, self.biases, strict=True)):
                part = share(n, self.world, rank)
                x, weight = self.dequantised(number)
                bias = None if bias is None else bias[part]
                outputs.append(_product(p, x, weight[part], bias, 1, path, self.on_tensor_cores))
            return outputs
        rows = slice(None) if p.op == "gemm_ar" else share(self.m, self.world, rank)
        x, weight = self.dequantised(0)
        bias = self.biases[0]
        return [_product(p, x[rows], weight, bias, self.world, path, self.on_tensor_cores)]

    def check(self, got: list[torch.Tensor], rank: int, path: str = "fused") -> None:
        """Compare the results of ``call`` with the reference.

        Raises:
            AssertionError: a shape, dtype or value is wrong.
        """
        expected = self.expected(rank, path)
        if len(got) > len(expected):
            x_full = got[-1]
            assert x_full.shape == self.x.shape, f"gathered {list(x_full.shape)}"
            bits = torch.uint8 if x_full.dtype == FP8 else x_full.dtype  # NaN is not equal to NaN
            same = torch.equal(x_full.contiguous().view(bits), self.x.view(bits))
            assert same, "the gathered x differs from the shards"
        for number, (result, (right, bound)) in enumerate(zip(got, expected, strict=False)):
            _judge(result, right, bound, self.problem.out_dtype, f"output {number}")

    def call_and_check(self, op: Any, rank: int, path: str = "fused", **options: Any) -> None:
        """Call ``op`` as ``call`` does, wait for its results, and check them."""
        got = self.call(op, rank, **options)
        op.wait()
        self.check(got, rank, path)


def _product(
    p: Problem,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: int,
    path: str,
    on_tensor_cores: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    low = p.out_dtype in (torch.bfloat16, torch.float16)
    unit = torch.finfo(torch.float32 if low else p.dtype).eps / 2
    scale = 1.0 / world if p.reduce == "avg" else 1.0
    right = x @ weight.t() * scale
    magnitude = x.abs() @ weight.abs().t() * scale
    offset = torch.zeros(1, dtype=torch.float64) if bias is None else bias.double()
    right = right + offset
    scalings = 3 if p.scaling != "none" else 0  # two products, and the rounding of their sum
    bound = (p.k + world + 2 + scalings) * unit * (magnitude + offset.abs())
    if on_tensor_cores and p.dtype == FP8:
        depth = p.k if p.fast_accum else min(p.k, 128)
        bound = bound + -(-depth // 32) * 2.0**-13 * magnitude
    if low:
        kept = torch.finfo(p.out_dtype)
        # Sum over ranks of the magnitudes of their partial results.
        carried = sum(
            (x[:, part] @ weight[:, part].t()).abs() * scale
            for part in (share(p.k, world, r) for r in range(world))
        )
        # Partials; what is summed inside a host is rounded once more, a library sum at every step.
        roundings = {"unfused": world + 1, "two_levels": 2}.get(path, 1) if world > 1 else 0
        bound = bound + kept.eps / 2 * (roundings * carried + right.abs() + bound)
        if not p.gathers and (path == "unfused" or world == 1):
            bound = bound + kept.eps / 2 * (carried + offset.abs())  # the product, before the bias
        bound = bound + (roundings + 2) * kept.smallest_normal * kept.eps
    if p.activation != "none":
        # Both have slopes of at most 1.13. What is not float8 is rounded before it, too.
        bound = 1.13 * bound + 8 * unit * right.abs()
        right = ACTIVATIONS[p.activation](right)
        if low:
            bound = bound + kept.eps / 2 * (right.abs() + bound) + kept.smallest_normal * kept.eps
    if p.dtype == torch.float64:
        bound = bound * 2  # the reference errs as much
    return right, bound * 1.01 + torch.finfo(p.dtype).tiny


def _judge(
    got: torch.Tensor, right: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype, what: str
) -> None:
    assert got.shape == right.shape and got.dtype == dtype, (
        f"{what} is {list(got.shape)} {got.dtype}, expected {list(right.shape)} {dtype}"
    )
    error = (got.double() - right).abs()
    wrong = ~(error <= bound)  # not `>`: NaN is wrong
    if not wrong.any():
        return
    at = tuple(wrong.nonzero()[0].tolist())
    rows = sorted(set(wrong.nonzero()[:, 0].tolist()))
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {got.numel()} elements are wrong, "
        f"{int(got.isnan().sum())} are NaN, rows {rows[0]}..{rows[-1]} ({len(rows)}); {list(at)} "
        f"is {float(got[at]):.9g}, expected {float(right[at]):.9g} within {float(bound[at]):.3g}"
    )

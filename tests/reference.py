"""Right answers in float64, and how far a correct op may be from them, element by element.

The bound is derived from K, the dtype's precision and the magnitudes at hand. With u the unit
roundoff of the accumulator (float32 for the 16-bit dtypes), a sum of K products in any order errs
by at most

    K * u * (|A| @ |B|)                                            to first order

Results in a 16-bit dtype are rounded besides. How often follows from what the op promises: AGGemm
rounds once; the fused GemmRS and GemmAR round every rank's partial product once, then add up in
float32 and round the sum once. The library's reduction (path = unfused) rounds after each of its
W - 1 additions as well, and before the mean and the bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flux import AGGemm, GemmAR, GemmRS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
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

    @property
    def gathers(self) -> bool:
        return self.op == "ag_gemm"

    def build(self, group: Any = None, **options: Any) -> Any:
        """The op under test. Collective."""
        options.setdefault("timeout_s", 30.0)
        if not self.gathers:
            options["reduce"] = self.reduce
        return OPS[self.op](
            group,
            max_m=self.max_m,
            n=self.n[0] if len(self.n) == 1 else self.n,
            k=self.k,
            dtype=self.dtype,
            transpose_weight=self.transpose_weight,
            **options,
        )


def share(size: int, world: int, rank: int) -> slice:
    """What ``rank`` owns of ``size``, by the definition in the documentation."""
    part = -(-size // world)
    return slice(min(size, rank * part), min(size, (rank + 1) * part))


def length(part: slice) -> int:
    return part.stop - part.start


def lay_out(dense: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, stored in another way. What lies between them is NaN."""
    if layout == "dense":
        return dense.contiguous()
    if layout == "transposed":
        return dense.t().contiguous().t()
    rows, columns = dense.shape
    if layout == "strided":
        view = dense.new_full((2 * rows, 3 * columns), float("nan"))[::2, ::3]
    else:  # inside a larger matrix, at an odd place
        view = dense.new_full((rows + 3, columns + 5), float("nan"))[1 : rows + 1, 3 : columns + 3]
    view.copy_(dense)
    return view


class Inputs:
    """Fresh inputs of one call: everybody's, since every rank draws the same numbers."""

    def __init__(self, problem: Problem, m: int, world: int, seed: int, bias: bool = True) -> None:
        self.problem, self.m, self.world = problem, m, world
        generator = torch.Generator().manual_seed(seed)
        draw = torch.float64 if problem.dtype == torch.float64 else torch.float32

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=draw).to(problem.dtype)

        self.x = normal(m, problem.k)
        self.weights = [normal(n, problem.k) for n in problem.n]
        self.biases = [normal(n) if bias else None for n in problem.n]

    def local(self, rank: int, layout: str = "dense", padded: bool = False) -> tuple[Any, Any, Any]:
        """(x, weight, bias) as ``rank`` passes them, lists where the op has several weights."""
        p = self.problem
        if p.gathers:
            x = self.x[share(self.m, self.world, rank)]
            parts = [(share(n, self.world, rank), slice(None)) for n in p.n]
            if padded:
                nan = x.new_full((-(-self.m // self.world) - x.shape[0], p.k), float("nan"))
                x = torch.cat([x, nan])
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
        """Run the op; its results, the gathered x last if asked for."""
        x, weight, bias = self.local(rank, layout, padded)
        if not self.problem.gathers:
            return [op(x, weight, bias)]
        got = op(x, weight, bias, m=self.m, return_gathered=gather)
        got, x_full = got if gather else (got, None)
        outs = list(got) if isinstance(got, list) else [got]
        return [*outs, x_full] if gather else outs

    def expected(self, rank: int, path: str = "fused") -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(float64 result, largest permitted deviation) of each output of ``rank``."""
        p = self.problem
        if p.gathers:
            parts = [share(n, self.world, rank) for n in p.n]
            return [
                _product(p, self.x, w[part], None if b is None else b[part], 1, path)
                for w, b, part in zip(self.weights, self.biases, parts, strict=True)
            ]
        rows = slice(None) if p.op == "gemm_ar" else share(self.m, self.world, rank)
        return [_product(p, self.x[rows], self.weights[0], self.biases[0], self.world, path)]

    def check(self, got: list[torch.Tensor], rank: int, path: str = "fused") -> None:
        """Compare the results of ``call`` with the reference.

        Raises:
            AssertionError: a shape, dtype or value is wrong.
        """
        expected = self.expected(rank, path)
        if len(got) > len(expected):
            x_full = got[-1]
            assert x_full.shape == self.x.shape, f"gathered {list(x_full.shape)}"
            assert torch.equal(x_full, self.x), "the gathered x differs from the shards"
        for number, (result, (right, bound)) in enumerate(zip(got, expected, strict=False)):
            _judge(result, right, bound, self.problem.dtype, f"output {number}")


def _product(
    p: Problem,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: int,
    path: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = x.double(), weight.double()
    low = p.dtype in (torch.bfloat16, torch.float16)
    unit = torch.finfo(torch.float32 if low else p.dtype).eps / 2
    scale = 1.0 / world if p.reduce == "avg" else 1.0
    right = x @ weight.t() * scale
    magnitude = x.abs() @ weight.abs().t() * scale
    offset = torch.zeros(1, dtype=torch.float64) if bias is None else bias.double()
    right = right + offset
    bound = (p.k + world + 2) * unit * (magnitude + offset.abs())
    if low:
        kept = torch.finfo(p.dtype)
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

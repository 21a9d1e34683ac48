"""Right answers in float64, and the largest error that a correct method may have.

The bound is derived. With u the unit roundoff of the accumulator, A and B the operands, every
element of a correct product obeys, for every order of summation,

    |error| <= growth(K) * u * (|A| @ |B|),      growth(K) = K              always (first order)
                                                 growth(K) = 10 * sqrt(K)   for zero-mean data

The second is the probabilistic bound of Higham and Mary (2019). With the factor 10 it fails for one
element in more than 1e15, and unlike K * u it is tight enough to detect one missing K tile. Inputs
here are fresh zero-mean random numbers, so the smaller of the two applies.

bfloat16 and float16 results are accumulated in float32 and *rounded*: once at the end, once per
partial product that is communicated, once per addition of the library's reduction, at most W + 1
times in all. Each rounding is relative to the rounded value, which never exceeds the sum over ranks
of the magnitudes of their partial results: the `carried` term below.

float8 operands have scales, and the reference multiplies what both stand for. Results are bfloat16.
Tensor cores cut a sum at every 32 products to 13 bits of fraction, of K or of the 128 of K after
which sums are promoted; for zero-mean data the sums that they cut grow with sqrt(K), too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
import torch.distributed as dist

from flux.core.problem import SCALED, Problem, ceil_div

_PART = 1 << 16  # elements that are compared at once, on the CPU
_CONFIDENCE = 10.0
_CUT_AT, _CUT, _PROMOTED = 32, 2.0**-13, 128
"""float8: products between two cuts of a sum, what a cut leaves, products that are summed so."""
_SLACK = 1.02
"""Margin for second-order terms, and for |A| @ |B| itself being computed in floating point."""


@dataclass
class Inputs:
    """One rank's share of one random problem; shapes in `Problem`.

    Scales are those of the op's call: float32, one or one per row; None without scaling.
    """

    x: torch.Tensor
    weight: torch.Tensor
    _: KW_ONLY
    scale_x: torch.Tensor | None = None
    scale_weight: torch.Tensor | None = None

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        """The arguments of a call that are scales."""
        named = {"scale_x": self.scale_x, "scale_weight": self.scale_weight}
        return {name: scale for name, scale in named.items() if scale is not None}

    @property
    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What x and weight stand for: in float64 with scales."""
        return scaled(self.x, self.scale_x), scaled(self.weight, self.scale_weight)


@dataclass
class Reference:
    """float64 result of this rank and the largest permitted deviation, element by element."""

    expected: torch.Tensor
    bound: torch.Tensor


@dataclass(frozen=True)
class Verdict:
    """Outcome of one check on one rank."""

    ok: bool
    max_abs_err: float
    complaint: str = ""


def scaled(tensor: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the values [rows, K] that a tensor and its scale, [rows] or [1], stand for."""
    return tensor if scale is None else tensor.double() * scale.double().view(-1, 1)


def negate(tensor: torch.Tensor) -> None:
    """Negate in place. torch has no negation of float8, whose sign is the highest bit."""
    if tensor.itemsize == 1:
        tensor.view(torch.uint8).bitwise_xor_(128)
    else:
        tensor.neg_()


_SPREAD = 32.0
"""Standard deviation of float8 inputs: most of their range of 448 is used."""


def draw(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return zero-mean numbers of standard deviation 1; of float8 1 before their scales divide."""
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = torch.randn(*shape, generator=generator, dtype=kind)
    return (numbers * _SPREAD if dtype.itemsize == 1 else numbers).to(dtype)


def draw_scales(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return different scales, by which the numbers of ``draw`` get a deviation of 0.5 to 1.5."""
    return (torch.rand(*shape, generator=generator) + 0.5) / _SPREAD


def make_inputs(problem: Problem, rank: int, seed: int) -> Inputs:
    """Return fresh zero-mean inputs, different on every rank and for every seed."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    shapes = problem.x_shape(rank), problem.weight_shape(rank)
    x, weight = (draw(shape, problem.torch_dtype, generator) for shape in shapes)
    if problem.dtype != SCALED:
        return Inputs(x, weight)
    by_row = problem.scaling == "row"
    of_x, of_weight = ([t.shape[0] if by_row else 1] for t in (x, weight))
    # Ranks that gather x have one factor for all its rows.
    shared = problem.op.gathers and not by_row
    of_all = torch.Generator().manual_seed(seed) if shared else generator
    scale_x = draw_scales(of_x, of_all)
    return Inputs(x, weight, scale_x=scale_x, scale_weight=draw_scales(of_weight, generator))


def growth(k: int) -> float:
    """Return the error growth factor of a sum of k products, in units of roundoff."""
    return min(float(k), _CONFIDENCE * math.sqrt(k))


def error_bound(problem: Problem, magnitude: torch.Tensor, carried: torch.Tensor) -> torch.Tensor:
    """Return the largest permitted |error|, given |A| @ |B| and the sum of |partial results|."""
    dtype = problem.result_dtype
    low_precision = dtype in (torch.bfloat16, torch.float16)
    accumulator = torch.finfo(torch.float32 if low_precision else dtype)
    bound = magnitude * (growth(problem.k) * accumulator.eps / 2)
    if problem.dtype == SCALED:
        depth = problem.local[1] if problem.fast_accum else min(problem.local[1], _PROMOTED)
        cuts = ceil_div(depth, _CUT_AT) * _CUT
        bound += magnitude * (cuts * growth(problem.k) / problem.k)
    if low_precision:
        kept = torch.finfo(dtype)
        roundings = 1 if problem.op.gathers else problem.world + 1
        bound += carried * (roundings * kept.eps / 2) + roundings * kept.smallest_normal
    if dtype == torch.float64:
        bound *= 2  # the reference has rounding errors of the same size
    return bound * _SLACK + accumulator.smallest_normal


def accumulate(
    x: torch.Tensor, weight: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """Add the product of one rank's inputs to (result, magnitude, carried)."""
    expected, magnitude, carried = into
    partial = x.double() @ weight.double().t()
    expected += partial
    carried += partial.abs_()
    magnitude += (x.float().abs() @ weight.float().abs().t()).double()


def zeros_for(rows: int, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return zeroed tensors for ``accumulate``, for the columns of a weight."""
    sums = [weight.new_zeros(rows, weight.shape[0], dtype=torch.float64) for _ in range(3)]
    return sums[0], sums[1], sums[2]


def make_reference(problem: Problem, rank: int, inputs: Inputs) -> Reference:
    """Return the reference of this rank from all ranks' inputs. Collective.

    Inputs are sent one owner at a time, so that no rank holds more than one peer's share. For
    gemm_ar each rank computes its own rows and the results are exchanged in float64, hence exactly,
    rather than computing the same M rows W times.
    """
    begin, end = problem.rows(rank)
    rows = problem.m if problem.op.gathers else end - begin
    own_x, own_weight = inputs.exact
    expected, magnitude, carried = zeros_for(rows, own_weight)

    def from_owner(mine: torch.Tensor, shape: tuple[int, int], owner: int) -> torch.Tensor:
        tensor = mine.contiguous() if rank == owner else mine.new_empty(shape)
        if tensor.numel() and problem.world > 1:
            dist.broadcast(tensor, owner)
        return tensor

    for owner in range(problem.world):
        x = from_owner(own_x, problem.x_shape(owner), owner)
        if problem.op.gathers:
            first, last = problem.rows(owner)
            part = (expected[first:last], magnitude[first:last], carried[first:last])
            accumulate(x, own_weight, part)
        else:
            weight = from_owner(own_weight, problem.weight_shape(owner), owner)
            accumulate(x[begin:end], weight, (expected, magnitude, carried))
    bound = error_bound(problem, magnitude, carried)
    if problem.op.all_reduces:
        blocks = [
            (last - first, problem.n) for first, last in map(problem.rows, range(problem.world))
        ]
        expected = torch.cat([from_owner(expected, s, owner) for owner, s in enumerate(blocks)])
        bound = torch.cat([from_owner(bound, s, owner) for owner, s in enumerate(blocks)])
    return Reference(expected, bound)


def reference_of_all(problem: Problem, everybody: Sequence[Inputs]) -> list[Reference]:
    """Return the references of all ranks, by rank, from the inputs of all ranks."""
    rows = [problem.rows(rank) for rank in range(problem.world)]
    references = []
    exact = [inputs.exact for inputs in everybody]
    for rank, (_, own_weight) in enumerate(exact):
        first, last = (0, problem.m) if problem.op.gathers else rows[rank]
        sums = zeros_for(last - first, own_weight)
        for owner, (x, weight) in enumerate(exact):
            if problem.op.gathers:
                begin, end = rows[owner]
                part = (sums[0][begin:end], sums[1][begin:end], sums[2][begin:end])
                accumulate(x, own_weight, part)
            else:
                accumulate(x[first:last], weight, sums)
        references.append(Reference(sums[0], error_bound(problem, sums[1], sums[2])))
    if problem.op.all_reduces:
        together = Reference(
            torch.cat([part.expected for part in references]),
            torch.cat([part.bound for part in references]),
        )
        return [together] * problem.world
    return references


def judge(problem: Problem, rank: int, got: object, reference: Reference) -> Verdict:
    """Compare one result with its reference; NaN left from poisoning is an error."""
    shape, dtype = problem.result_shape(rank), problem.result_dtype
    if not isinstance(got, torch.Tensor):
        return Verdict(False, math.inf, f"returned a {type(got).__name__}, not a tensor")
    if tuple(got.shape) != shape or got.dtype != dtype:
        return Verdict(
            False,
            math.inf,
            f"returned {list(got.shape)} {got.dtype}, expected {list(shape)} {dtype}",
        )
    return judge_values(got, reference)


def judge_values(got: torch.Tensor, reference: Reference) -> Verdict:
    """Compare values of the right shape, on the reference's device."""
    if got.numel() == 0:
        return Verdict(True, 0.0)
    # In parts that fit a CPU's caches. New memory for every result takes several times as long, and
    # a search compares hundreds of results.
    rows = got.shape[0] if got.is_cuda else max(1, _PART // got.shape[1])
    whole = (got, reference.expected, reference.bound)
    largest = 0.0
    for part, expected, bound in zip(*(tensor.split(rows) for tensor in whole), strict=True):
        error = (part.double() - expected).abs_()
        if not bool((error <= bound).all()):  # not `>`: a NaN compares false both ways
            return _complaint(got, reference)
        largest = max(largest, float(error.max()))
    return Verdict(True, largest)


def _complaint(got: torch.Tensor, reference: Reference) -> Verdict:
    """Return a verdict that says how many elements are wrong."""
    error = (got.double() - reference.expected).abs_()
    wrong = ~(error <= reference.bound)
    count = int(wrong.sum())
    excess = torch.where(wrong, error - reference.bound, -1.0).nan_to_num_(nan=math.inf)
    row, column = divmod(int(excess.argmax()), got.shape[1])
    unfilled = int(got.isnan().sum())
    return Verdict(
        False,
        float(error.nan_to_num(nan=math.inf).max()),
        f"{count} of {got.numel()} elements are wrong"
        + (f" ({unfilled} NaN)" if unfilled else "")
        + f"; element [{row}, {column}] is {float(got[row, column]):.9g}, expected "
        f"{float(reference.expected[row, column]):.9g} within "
        f"{float(reference.bound[row, column]):.3g}",
    )

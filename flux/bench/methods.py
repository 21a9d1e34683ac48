"""The calls that are timed: the library path, flux's paths, and their two parts.

A *method* computes the op's result from this rank's inputs. A *part* (a whole local GEMM, or the
library collective alone) is only timed. Both allocate what a caller in a loop would allocate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from flux.backends.epilogue import product_in_float32, scaled_mm
from flux.backends.unfused import all_gather, reduce_scatter
from flux.bench.config import BenchConfig
from flux.bench.reference import Inputs
from flux.core.env import POISON
from flux.core.problem import SCALED, Problem


@dataclasses.dataclass(frozen=True)
class OwnTime:
    """The result of a method whose work another process did and timed.

    Only that process knows the duration.
    """

    result: object
    wall_ms: float


class Method(Protocol):
    """One way to compute the op on this rank. A call returns the result, or OwnTime."""

    name: str

    def __call__(self, inputs: Any) -> Any:
        """Compute the op."""
        ...

    def knobs(self) -> dict[str, Any]:
        """Return the settings that it ran with, for the report; JSON-serialisable."""

    def comm_only(self, inputs: Any) -> Callable[[], object] | None:
        """Return its communication without the GEMM; None: the library's time is used instead."""

    def wait(self) -> None:
        """Wait until its calls are done; raise their error, if any."""

    def close(self) -> None:
        """Release its resources."""


class OpMethod(Method, Protocol):
    """A method that calls ops of flux."""

    @property
    def ops(self) -> list[Any]:
        """The ops of this process, by rank."""


class LibraryMethod:
    """The common part of methods that call libraries: no wait, no separate transport."""

    def comm_only(self, inputs: Any) -> Callable[[], object] | None:
        """Return None: there is no transport without the GEMM."""
        return None

    def wait(self) -> None:
        """Return at once: torch orders the work on its streams."""

    def close(self) -> None:
        """Do nothing: no state is kept between calls."""


class UnfusedMethod(LibraryMethod):
    """A torch.distributed collective before or after one product: the path without flux.

    The library collectives need equal shards: with a ragged M, chunks are padded to ceil(M/W) rows.
    """

    name = "unfused"

    def __init__(self, problem: Problem, rank: int, gpus: bool = False) -> None:
        self._problem, self._gpus = problem, gpus
        begin, end = problem.rows(rank)
        self._own = end - begin
        self._padded = problem.chunk * problem.world

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Compute the op by library calls."""
        problem, x, weight = self._problem, inputs.x, inputs.weight
        if inputs.scales:
            return self._scaled(inputs)
        if problem.op.gathers:
            return torch.mm(self._gathered(x), weight.t())
        if problem.op.all_reduces:
            result = torch.mm(x, weight.t())
            dist.all_reduce(result)
            return result
        if self._padded == problem.m:
            partial = torch.mm(x, weight.t())
        else:
            partial = x.new_empty(self._padded, problem.n)
            torch.mm(x, weight.t(), out=partial[: problem.m])
            partial[problem.m :].zero_()
        return self._scattered(partial)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' rows; of float8, which collectives do not know, as bytes."""
        dtype, x = x.dtype, bytes_of(x)
        if self._own < self._problem.chunk:
            x = torch.cat([x, x.new_zeros(self._problem.chunk - self._own, x.shape[1])])
        full = x.new_empty(self._padded, x.shape[1])
        all_gather(full, x)
        return full[: self._problem.m].view(dtype)

    def _scattered(self, partial: torch.Tensor) -> torch.Tensor:
        own = partial.new_empty(self._problem.chunk, partial.shape[1])
        reduce_scatter(own, partial)
        return own[: self._own]

    def _scaled(self, inputs: Inputs) -> torch.Tensor:
        """Compute the op of float8. Scales of rows are gathered by a collective of their own."""
        problem, x, scale_x = self._problem, inputs.x, inputs.scale_x
        assert scale_x is not None and inputs.scale_weight is not None
        if problem.op.gathers:
            x = self._gathered(x)
            if problem.scaling == "row":
                scale_x = self._gathered(scale_x.view(-1, 1)).view(-1)
        result = scaled_product(x, inputs.weight, scale_x, inputs.scale_weight, problem.fast_accum)
        if problem.op.gathers:
            return result
        if problem.op.all_reduces:
            dist.all_reduce(result)
            return result
        if self._padded > problem.m:
            result = torch.cat([result, result.new_zeros(self._padded - problem.m, problem.n)])
        return self._scattered(result)

    def knobs(self) -> dict[str, Any]:
        """Return the names of collective and GEMM."""
        collective, gemm = self._problem.op.collective, gemm_of(self._problem, self._gpus)
        return {"path": "unfused", "collective": collective, "gemm": gemm}


def gemm_of(problem: Problem, gpus: bool) -> str:
    """Return the name of the product of methods without flux."""
    if problem.dtype != SCALED:
        return "torch.mm"
    return "torch._scaled_mm" if gpus else "torch.mm of float32"


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return float8 as bytes, for collectives and copies that do not know it."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def scaled_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    fast: bool,
) -> torch.Tensor:
    """Return the product of float8 [rows, K] and [N, K], as the library path of flux computes it.

    By ``torch._scaled_mm`` on GPUs, if K and N are multiples of 16; else in float32.
    """
    product = scaled_mm(x, weight.t(), scale_x, scale_weight, fast=fast)
    if product is None:
        product = product_in_float32(x, weight.float().t())
        product *= scale_x.view(-1, 1)
        product *= scale_weight
    return product.to(torch.bfloat16)


class Fused:
    """A flux op; `tuning` None: the op chooses its knobs."""

    def __init__(
        self, name: str, config: BenchConfig, tuning: object | None, group: Any = None
    ) -> None:
        import flux  # here, so that the formulas and `--help` work before the package is built

        self.name = name
        problem = config.problem
        self._m = problem.m
        # For AllGather the global M cannot be derived from a shard. GemmRS and GemmAR see all M
        # rows.
        self._call_options = {"m": problem.m} if problem.op.gathers else {}
        options: dict[str, Any] = {} if tuning is None else {"tuning": tuning}
        self.op: Any = getattr(flux, problem.op.label)(
            group,
            max_m=problem.m,
            n=problem.n,
            k=problem.k,
            dtype=problem.torch_dtype,
            backend=config.backend,
            transport=config.transport,
            timeout_s=config.timeout_s,
            **problem.scales,
            **options,
        )

    @property
    def ops(self) -> list[Any]:
        """The op."""
        return [self.op]

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Call the op."""
        options = self._call_options | inputs.scales
        result: torch.Tensor = self.op(inputs.x, inputs.weight, **options)
        return result

    def knobs(self) -> dict[str, Any]:
        """Return the knobs that are set, and the kernel, if any."""
        knobs = dataclasses.asdict(self.op.schedule(self._m).knobs)
        kernels = [kernel.name for kernel in getattr(self.op._backend, "kernels", ())]
        return {key: value for key, value in knobs.items() if value is not None} | (
            {"kernel": kernels[0]} if kernels else {}
        )

    def comm_only(self, inputs: Inputs) -> Callable[[], object] | None:
        """Return the op's transport without the GEMM, if the op has it."""
        # Ops that can run their transport without the GEMM have a method of this name.
        transport_only = getattr(self.op, "transport_only", None)
        return None if transport_only is None else lambda: transport_only(inputs.x)

    def wait(self) -> None:
        """Wait until the op's calls are done."""
        self.op.wait()

    def close(self) -> None:
        """Close the op."""
        self.op.close()


Factory = Callable[[BenchConfig, int], list[Method]]


def default_methods(config: BenchConfig, rank: int) -> list[Method]:
    """Return the default methods, in the order of the table. Collective: ops exchange memory."""
    import flux

    chosen = flux.Knobs(**config.knobs) if config.knobs else None
    return [
        UnfusedMethod(config.problem, rank, config.backend == "cuda"),
        Fused("medium", config, flux.Knobs(path="medium")),
        Fused("flux", config, chosen),
    ]


class _PoisonedAllocation(TorchFunctionMode):
    """Fills memory that Python code allocates without initialising it with NaN.

    ``torch.use_deterministic_algorithms`` does the same, but imports torch's compiler for it, which
    takes seconds on every rank.
    """

    _ALLOCATES = (torch.empty, torch.empty_like, torch.Tensor.new_empty)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._ALLOCATES and result.is_floating_point():
            result.fill_(float("nan"))
        return result


@contextmanager
def poisoned_methods(factory: Factory, config: BenchConfig, rank: int) -> Iterator[list[Method]]:
    """Make methods whose memory holds NaN until they write it.

    flux ops fill their memory themselves if FLUX_POISON is set at their construction.
    """
    methods: list[Method] = []
    try:
        with POISON.during("1"), _PoisonedAllocation():
            methods = factory(config, rank)
            yield methods
    finally:
        for method in methods:
            method.close()


def whole_gemms(problem: Problem, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """Return ways to run the whole local GEMM on data in place; the fastest one counts."""
    weight = inputs.weight
    x = inputs.x
    if problem.op.gathers:
        x = torch.randn(problem.m, problem.k, device=weight.device).to(weight.dtype)
    if inputs.scale_x is not None and inputs.scale_weight is not None:
        scale_x, rows = inputs.scale_x, 1 if problem.scaling == "tensor" else problem.m
        scales = scale_x.new_ones(rows), inputs.scale_weight
        return {"scaled_mm": lambda: scaled_product(x, weight, *scales, problem.fast_accum)}
    out = x.new_empty(problem.m, weight.shape[0])
    transposed = weight.t()
    return {
        "linear": lambda: linear(x, weight),
        "mm": lambda: torch.mm(x, transposed),
        "mm_out": lambda: torch.mm(x, transposed, out=out),
    }


def library_collective(problem: Problem, device: torch.device) -> Callable[[], object]:
    """Return a call of the library collective alone, on existing buffers."""
    padded = problem.chunk * problem.world
    dtype = problem.torch_dtype if problem.op.gathers else problem.result_dtype
    dtype = torch.uint8 if dtype.itemsize == 1 else dtype

    def touched(rows: int, columns: int) -> torch.Tensor:
        # Zeros stay zeros if reduced in place any number of times. They are written, because all
        # pages of fresh zeros map to one shared page, which reads far too fast.
        return torch.ones(rows, columns, dtype=dtype, device=device).zero_()

    if problem.op.gathers:
        own, gathered = touched(problem.chunk, problem.k), touched(padded, problem.k)
        return lambda: all_gather(gathered, own)
    if problem.op.scatters:
        own, partial = touched(problem.chunk, problem.n), touched(padded, problem.n)
        return lambda: reduce_scatter(own, partial)
    result = touched(problem.m, problem.n)
    return lambda: dist.all_reduce(result)

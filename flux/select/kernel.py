"""Choose the built kernel that runs a GEMM, and the one that runs an op on a rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flux.core.env import KERNEL_CHOICE
from flux.core.knobs import Knobs
from flux.core.problem import DTYPES as DTYPES_BY_NAME
from flux.core.problem import Problem, ceil_div
from flux.core.sparse_problem import SparseProblem
from flux.core.spec import DTYPES, OpSpec
from flux.kernels.config import GROUPED, GemmConfig
from flux.kernels.legality import GemmProblem, is_legal
from flux.kernels.sets import config_set
from flux.machine.cluster import Cluster
from flux.select import nvidia_heuristics
from flux.select.chunks import chunk_gemm_ms
from flux.select.cycles import cost
from flux.select.share import gemm_units, lends, taken_units

if TYPE_CHECKING:
    from flux.kernels.registry import BuiltKernel
    from flux.transport.device import Device

CLOSE = 1.005
"""Ratio up to which the model cannot distinguish two costs."""

_warned: set[str] = set()


def best_of(configs: Sequence[GemmConfig], costs: Sequence[float]) -> int:
    """Return the index of the best config.

    Of the configs within CLOSE of the least cost, take the one with the largest tile. It loads the
    fewest bytes per multiplication, and so leaves more of the GPU's power to multiplying. Of equal
    tiles take the cheapest, then the first by name.
    """
    least = min(costs)

    def order(index: int) -> tuple[float, float, str]:
        m, n, _ = configs[index].tile
        return (1 / m + 1 / n, costs[index], configs[index].name)

    return min((i for i, cost in enumerate(costs) if cost <= least * CLOSE), key=order)


def choose(
    candidates: Sequence[BuiltKernel],
    problem: GemmProblem,
    sm_count: int,
    capability: tuple[int, int] | None = None,
    taken: int = 0,
    spare: int = 0,
) -> BuiltKernel | None:
    """Return the candidate of least cost (``best_of``); None if there are no candidates.

    ``spare``: multiprocessors beside ``sm_count`` that kernels use whose blocks claim their tiles.

    With FLUX_KERNEL_CHOICE=nvidia and a ``capability``, nvidia-matmul-heuristics ranks them, if it
    is installed and knows the GPU; it knows nothing of multiprocessors that are ``taken``.
    """
    configs = [kernel.config for kernel in candidates]
    rank: Callable[[GemmConfig], float] | None = None
    if capability is not None and KERNEL_CHOICE.get() == "nvidia":
        rank = nvidia_heuristics.ranking(configs, problem, sm_count, capability)
    if rank is None:
        rank = partial(_cost, problem=problem, sm_count=sm_count, taken=taken, spare=spare)
    return candidates[best_of(configs, [rank(config) for config in configs])] if configs else None


def _cost(config: GemmConfig, problem: GemmProblem, sm_count: int, taken: int, spare: int) -> float:
    claims = config.tile_scheduler == "dynamic"
    return cost(config, problem, sm_count + (spare if claims else 0), taken)


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=2)


def default_configs(
    problem: Problem, arch: str, tile_scheduler: str | None = "static"
) -> list[GemmConfig]:
    """Return the kernels of the default set that can do a problem.

    Args:
        problem: the op and its sizes.
        arch: ``80`` | ``90a``.
        tile_scheduler: of the kernels; None: any.
    """
    gemm, family = gemm_of(problem), family_of(problem)
    short = DTYPES_BY_NAME[problem.dtype].short
    if family in GROUPED:  # which all claim their tiles
        tile_scheduler = None
    return [
        config
        for config in config_set("default", [arch])
        if (config.op, config.dtype) == (family, short)
        and (config.weight, config.activation, config.reduce) == ("nk", "none", "local")
        and tile_scheduler in (None, config.tile_scheduler)
        and config.scaling == (problem.scaling or "none")
        and config.fast_accum == problem.fast_accum
        and is_legal(config, gemm)
    ]


def default_kernel(problem: Problem, cluster: Cluster, knobs: Knobs | None = None) -> GemmConfig:
    """Return the kernel of the default set that the op would choose on this GPU.

    Raises:
        ValueError: there is no kernel for the dtype, or none supports the shape.
    """
    knobs = knobs or Knobs()
    taken = taken_units(knobs, cluster.device.units, problem.nodes)
    either = taken > 0 or (problem.world > 1 and lends(problem, knobs))
    configs = _supported(problem, cluster, _scheduler(knobs, None, either=either))
    gemm = gemm_of(problem)
    costs = [cost(c, gemm, gemm_units(problem, cluster, knobs, c), taken) for c in configs]
    return configs[best_of(configs, costs)]


def chunk_kernel(problem: Problem, cluster: Cluster, whole: tuple[float, GemmConfig]) -> GemmConfig:
    """Return the kernel of the default set that multiplies M/W rows in the least time.

    Args:
        problem: op and sizes.
        cluster: devices and links.
        whole: time of the GEMM of M rows, in ms, and its kernel.

    Raises:
        ValueError: as ``default_kernel``.
    """
    configs, device = _supported(problem, cluster, "static"), cluster.device
    units = gemm_units(problem, cluster)
    times = [chunk_gemm_ms(problem, device, config, whole, units) for config in configs]
    return configs[best_of(configs, times)]


def _supported(problem: Problem, cluster: Cluster, tile_scheduler: str | None) -> list[GemmConfig]:
    arch = "90a" if cluster.device.arch == "sm_90" else "80"
    configs = default_configs(problem, arch, tile_scheduler)
    if configs:
        return configs
    n, k = problem.local
    raise ValueError(
        f"no kernel of the default set supports {problem.name} in {problem.dtype} with "
        f"local N = {n}, K = {k} on {cluster.device.arch}"
    )


@dataclass(frozen=True)
class OpKernel:
    """A kernel, and whether the op's activation is left to a kernel of its own."""

    built: BuiltKernel
    activate_after: bool


def is_variant(config: GemmConfig, of: GemmConfig) -> bool:
    """Return whether two configs differ only in what the op decides.

    That is the weight's layout, the epilogue, how sums are kept, and which side sums.
    """
    return of == replace(
        config,
        weight=of.weight,
        activation=of.activation,
        scaling=of.scaling,
        promoted=of.promoted,
        reduce=of.reduce,
    )


def problems(spec: OpSpec, world: int, n: int) -> list[GemmProblem]:
    """Return the GEMMs that one kernel has to do.

    Every rank of a ReduceScatter must choose the same kernel, whose tiles number the flags, so it
    must suit the depth that each of them has.
    """
    if spec.op.exchanges:  # a GEMM of the own rows
        return [GemmProblem(ceil_div(spec.max_m, world), n, spec.k, 1)]
    depths = {max(spec.local_k(world, rank), 1) for rank in range(world)}
    rows, experts = spec.max_m, 1
    if spec.experts:
        rows, experts = ceil_div(rows * spec.topk, spec.ep), ceil_div(spec.experts, spec.ep)
    columns = max(n, 1) * (2 if spec.gated else 1)
    return [
        GemmProblem(rows, columns, k, world, experts=experts) for k in sorted(depths, reverse=True)
    ]


def family_of(problem: Problem) -> str:
    """Return the family of an op's kernels."""
    return problem.spec().kernel if isinstance(problem, SparseProblem) else problem.op.kernel


def gemm_of(problem: Problem) -> GemmProblem:
    """Return the GEMM of one rank's kernel."""
    if not isinstance(problem, SparseProblem):
        return GemmProblem.of(problem)
    spec = problem.spec()
    return problems(spec, problem.world, spec.local_n(problem.world, 0)[0])[0]


def _scheduler(knobs: Knobs, preferred: GemmConfig | None, *, either: bool) -> str | None:
    """Return the tile scheduler of the kernels to choose from; None: the model chooses that too.

    ``either``: without knobs or a preferred kernel.
    """
    if knobs.tile_scheduler is not None:
        return knobs.tile_scheduler
    if preferred is not None:
        return preferred.tile_scheduler
    return None if either else "static"


def op_kernel(
    spec: OpSpec,
    world: int,
    n: int,
    device: Device,
    knobs: Knobs,
    sm_count: int,
    preferred: GemmConfig | None = None,
    traced: bool = False,
    taken: int = 0,
    spare: int = 0,
) -> OpKernel:
    """Return the best kernel for ``n`` columns.

    It is ``preferred``, in the variant that the op wants, if it is built and can do it; else the
    one that the model chooses. ``traced``: of a trace build. ``taken``: multiprocessors that other
    kernels may hold when it starts (``cost``). ``spare``: as ``choose`` takes it.

    Raises:
        ValueError: no kernel that is built can do it.
    """
    if not DTYPES[spec.dtype].in_kernels:
        known = ", ".join(dtype.name for dtype in DTYPES.values() if dtype.in_kernels)
        raise ValueError(f"{spec.label}: backend cuda needs one of {known}, got {spec.dtype}")
    dtype = DTYPES[spec.dtype].short
    registry = device.registry.for_traces() if traced else device.registry
    build = "flux compile --trace" if traced else "flux compile"
    builders = f"`{build}` builds" if traced else "`flux tune` or `flux compile` builds"
    alternatives = problems(spec, world, n)
    either = taken + spare > 0
    wanted: dict[str, Any] = {
        "weight": "kn" if spec.transpose_weight else "nk",
        "scaling": spec.scaling,
        "fast_accum": spec.fast_accum,
        "reduce": "in_flight" if knobs.reduce == "in_flight" else "local",
        "tile_scheduler": None if spec.experts else _scheduler(knobs, preferred, either=either),
    }

    def best(activation: str) -> BuiltKernel | None:
        for_each = [
            registry.candidates(
                spec.kernel,
                dtype,
                device.capability,
                problem,
                activation=activation,
                **wanted,
            )
            for problem in alternatives
        ]
        common = set.intersection(*({c.symbol for c in suited} for suited in for_each))
        suited = [candidate for candidate in for_each[0] if candidate.symbol in common]
        if preferred is not None:
            for candidate in suited:
                if is_variant(candidate.config, preferred):
                    return candidate
            _warn_once(
                f"{spec.label}: the tuned kernel {preferred.name} is not built, or does not "
                f"support {alternatives[0]}: another kernel runs ({builders} it)"
            )
        return choose(suited, alternatives[0], sm_count, device.capability, taken, spare)

    activation = f"gated_{spec.activation}" if spec.gated else spec.activation
    kernel = best(activation)
    if kernel is not None:
        return OpKernel(kernel, activate_after=False)
    if spec.activation != "none" and (kernel := best("none")) is not None:
        _warn_once(
            f"{spec.label}: no built kernel fuses {activation} for this {dtype} problem: "
            f"{activation} runs as a separate kernel after {kernel.symbol}"
        )
        return OpKernel(kernel, activate_after=True)
    options = ", ".join(
        f"{name} = {'any' if value is None else value}" for name, value in wanted.items()
    )
    raise ValueError(
        f"{spec.label}: no built kernel supports {alternatives[0]} in {dtype} ({options}) on "
        f"compute capability {device.capability}: run `{build}`"
    )

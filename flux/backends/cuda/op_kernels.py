"""Which built kernel runs an op on a rank."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from flux.core.knobs import Knobs
from flux.core.spec import DTYPES, OpSpec
from flux.kernels.choice import choose
from flux.kernels.config import GemmConfig
from flux.kernels.legality import GemmProblem
from flux.kernels.registry import BuiltKernel
from flux.transport.device import Device

_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=2)


@dataclass(frozen=True)
class OpKernel:
    """A kernel, and whether the op's activation is left to a kernel of its own."""

    built: BuiltKernel
    activate_after: bool


def is_variant(config: GemmConfig, of: GemmConfig) -> bool:
    """Return whether two configs differ only in what the op decides.

    That is the weight's layout, the epilogue, and which side sums.
    """
    return of == replace(
        config,
        weight=of.weight,
        activation=of.activation,
        scaling=of.scaling,
        reduce=of.reduce,
    )


def problems(spec: OpSpec, world: int, n: int) -> list[GemmProblem]:
    """Return the GEMMs that one kernel has to do.

    Every rank of a ReduceScatter must choose the same kernel, whose tiles number the flags, so it
    must suit the depth that each of them has.
    """
    depths = {max(spec.local_k(world, rank), 1) for rank in range(world)}
    return [GemmProblem(spec.max_m, max(n, 1), k, world) for k in sorted(depths, reverse=True)]


def op_kernel(
    spec: OpSpec,
    world: int,
    n: int,
    device: Device,
    knobs: Knobs,
    sm_count: int,
    preferred: GemmConfig | None = None,
    traced: bool = False,
) -> OpKernel:
    """Return the best kernel for ``n`` columns.

    It is ``preferred``, in the variant that the op wants, if it is built and can do it; else the
    one that the model chooses. ``traced``: of a trace build.

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
    wanted = {
        "weight": "kn" if spec.transpose_weight else "nk",
        "scaling": spec.scaling,
        "reduce": knobs.reduce or "local",
    }

    def best(activation: str) -> BuiltKernel | None:
        for_each = [
            registry.candidates(
                spec.op.kernel,
                dtype,
                device.capability,
                problem,
                activation=activation,
                **wanted,
            )
            for problem in alternatives
        ]
        common = set.intersection(*({c.symbol for c in found} for found in for_each))
        suited = [candidate for candidate in for_each[0] if candidate.symbol in common]
        if preferred is not None:
            for candidate in suited:
                if is_variant(candidate.config, preferred):
                    return candidate
            _warn_once(
                f"{spec.label}: the tuned kernel {preferred.name} is not built, or does not "
                f"support {alternatives[0]}: another kernel runs ({builders} it)"
            )
        return choose(suited, alternatives[0], sm_count, device.capability)

    found = best(spec.activation)
    if found is not None:
        return OpKernel(found, activate_after=False)
    if spec.activation != "none" and (found := best("none")) is not None:
        _warn_once(
            f"{spec.label}: no built kernel fuses {spec.activation} for this {dtype} problem: "
            f"{spec.activation} runs as a separate kernel after {found.symbol}"
        )
        return OpKernel(found, activate_after=True)
    options = ", ".join(f"{name} = {value}" for name, value in wanted.items())
    raise ValueError(
        f"{spec.label}: no built kernel supports {alternatives[0]} in {dtype} ({options}) on "
        f"compute capability {device.capability}: run `{build}`"
    )

"""Find the kernels that candidates need before the search, and build the missing ones.

Worker processes start after that, so their registries contain the new kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from flux.kernels import build, driver, trust
from flux.kernels.config import GemmConfig
from flux.kernels.registry import Registry, package_root
from flux.machine import toolchain
from flux.select.space import Candidate


def needed(candidate: Candidate) -> list[GemmConfig]:
    """Return the kernels that a candidate needs.

    For in-flight sums these are both forms, because with an NVLink switch that sums, the GEMM is
    the plain kernel.
    """
    kernel = candidate.kernel
    if kernel is None:
        return []
    in_flight = candidate.knobs.reduce == "in_flight"
    summing = replace(kernel, reduce="in_flight") if in_flight else kernel
    return list(dict.fromkeys([kernel, summing]))


def missing(configs: Iterable[GemmConfig], root: Path) -> list[GemmConfig]:
    """Return the kernels that are neither in the package nor built in ``root``."""
    there = Registry.load([package_root(), root])
    return [config for config in dict.fromkeys(configs) if there.find(config) is None]


def build_kernels(configs: Sequence[GemmConfig], root: Path) -> dict[str, str]:
    """Build the missing kernels, as many at once as cores and memory allow.

    Returns:
        Error by kernel, for kernels that could not be built.
    """
    wanted = missing(configs, root)
    if not wanted:
        return {}
    try:
        tools = build.find_tools()
        trust.make_private(root)
    except (build.MissingToolError, OSError, ValueError) as error:
        return {config.name: str(error) for config in wanted}
    observer, units = driver.CompileObserver(), driver.plan(wanted, root, tools).units
    outcomes = driver.build_all(units, root, tools, driver.job_limit(len(units)), observer)
    # A library has several kernels, and one that does not compile makes the whole library fail.
    mixed = [o.unit for o in outcomes if o.error and len(o.unit.configs) > 1]
    alone = [build.make_unit([config], tools) for unit in mixed for config in unit.configs]
    outcomes = [outcome for outcome in outcomes if outcome.unit not in mixed]
    if alone:
        outcomes += driver.build_all(alone, root, tools, driver.job_limit(len(alone)), observer)
    return {
        outcome.unit.configs[0].name: outcome.error.splitlines()[0]
        for outcome in outcomes
        if outcome.error
    }


def compiler() -> str:
    """Return the name and version of the compiler for missing kernels."""
    nvcc = toolchain.nvcc()
    return f"nvcc {nvcc.version or '?'}" if nvcc is not None else "no nvcc"

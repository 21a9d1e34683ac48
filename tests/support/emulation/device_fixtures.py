"""Fixtures around the emulated device, which is built once for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from emulated import ROOT, EmulatedDevice, build, emulated_device
from flux.kernels import driver, runtime
from flux.kernels.build import MissingToolError, find_tools
from flux.kernels.config import GATED, GROUPED, GemmConfig
from flux.kernels.sets import FUSED, config_set
from harness import STRESS
from ptx_target import ptx_target
from side_by_side import built_once

ARCHS = ["80", "90a"]  # of flux's kernels on the PTX machine


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config) -> Path:
    """Stand-in kernels, linked to the emulated GPU and its NCCL, as a shared library."""
    return built_once(pytestconfig, "emulator", build)


def _build_kernels(folder: str, configs: Sequence[GemmConfig], traced: bool = False) -> Path:
    """Kernels for the PTX machine, in the checkout: they are built again when sources change."""
    root = ROOT / "build" / folder
    root.mkdir(parents=True, exist_ok=True)
    tools = find_tools(ptx_target())
    units = driver.plan(configs, root, tools, traced).units
    for outcome in driver.build_all(
        units, root, tools, driver.job_limit(len(units)), driver.CompileObserver()
    ):
        assert not outcome.error, outcome.error
    driver.remove_superseded(root, tools)
    return root


def _build_ptx_kernels(_: Path) -> Path:
    root = _build_kernels("emulated-kernels", config_set("minimal", ARCHS))
    library, _ = runtime.make(root, runtime.find_tools(ptx_target()), ARCHS)
    runtime.remove_others(root, library)
    return root


def _build_in_flight_kernels(_: Path) -> Path:
    configs = [c for c in config_set("default", ["90a"]) if c.reduce == "in_flight"]
    return _build_kernels("emulated-in-flight", configs)


def _build_dynamic_kernels(_: Path) -> Path:
    minimal = [c for c in config_set("minimal") if c.op in FUSED]
    if STRESS == 1:  # the one that compiles fastest
        minimal = [c for c in minimal if (c.op, c.arch) == ("ag_gemm", "80")]
    return _build_kernels(
        "emulated-dynamic", [replace(c, tile_scheduler="dynamic") for c in minimal]
    )


def _build_wide_kernels(_: Path) -> Path:
    (config,) = (c for c in config_set("minimal", ["90a"]) if c.op == "gemm_rs")
    wide = replace(config, tile=(64, 64, 64), schedule="pingpong", cluster=(1, 2))
    return _build_kernels("emulated-wide", [wide])


def _build_float8_kernels(_: Path) -> Path:
    configs = [
        c
        for c in config_set("default", ["90a"])
        if c.dtype == "e4m3" and c.schedule == "pingpong" and c.op in FUSED
    ]
    return _build_kernels("emulated-float8", configs)


def _build_float8_expert_kernels(_: Path) -> Path:
    configs = [c for c in config_set("default", ["90a"]) if c.dtype == "e4m3" and c.op in GROUPED]
    few = [c for c in configs if (c.tile[0], c.scaling, c.activation) == (64, "row", "none")]
    chosen = configs if STRESS > 1 else [c for c in few if c.promoted]
    return _build_kernels("emulated-float8-experts", chosen)


def _build_gated_kernels(_: Path) -> Path:
    configs = [c for c in config_set("default", ["90a"]) if c.activation in GATED]
    few = [c for c in configs if (c.dtype, c.tile[0]) == ("bf16", 64)]
    one = [c for c in few if (c.weight, c.activation) == ("kn", "gated_silu")]
    return _build_kernels("emulated-gated", few if STRESS > 1 else one)


def _build_backward_kernels(_: Path) -> Path:
    minimal = [c for c in config_set("minimal", ["80"]) if c.op in GROUPED]
    both = [replace(c, weight=weight) for c in minimal for weight in ("nk", "kn")]
    return _build_kernels("emulated-backward", both)


def _build_traced_kernels(_: Path) -> Path:
    configs = [c for c in config_set("minimal") if c.op in GROUPED or c.arch == "80"]
    return _build_kernels("emulated-traced", configs, traced=True)


def _built_or_skipped(
    config: pytest.Config, name: str, build_kernels: Callable[[Path], Path]
) -> Path:
    try:
        find_tools(ptx_target())
    except MissingToolError as error:
        pytest.skip(str(error))
    # Libraries look for the machine when they are loaded, and stay, though no kernel may run.
    from ptx_machine import cuda_device  # which only make test builds

    cuda_device()
    return built_once(config, name, build_kernels)


@pytest.fixture(scope="session")
def ptx_kernels(pytestconfig: pytest.Config) -> Path:
    """The minimal set and libflux_nvshmem for the PTX machine; skips the test where nvcc or CUTLASS
    is missing."""
    return _built_or_skipped(pytestconfig, "ptx-kernels", _build_ptx_kernels)


@pytest.fixture(scope="session")
def in_flight_kernels(pytestconfig: pytest.Config) -> Path:
    """The kernels that add up in flight, likewise."""
    return _built_or_skipped(pytestconfig, "in-flight-kernels", _build_in_flight_kernels)


@pytest.fixture(scope="session")
def dynamic_kernels(pytestconfig: pytest.Config) -> Path:
    """The kernels whose blocks claim their tiles, likewise: without make stress, one of them."""
    return _built_or_skipped(pytestconfig, "dynamic-kernels", _build_dynamic_kernels)


@pytest.fixture(scope="session")
def wide_kernels(pytestconfig: pytest.Config) -> Path:
    """A GemmRS whose clusters are two tiles wide, which those of the minimal set are not."""
    return _built_or_skipped(pytestconfig, "wide-kernels", _build_wide_kernels)


@pytest.fixture(scope="session")
def float8_kernels(pytestconfig: pytest.Config) -> Path:
    """A float8 kernel of each op and scaling, likewise."""
    return _built_or_skipped(pytestconfig, "float8-kernels", _build_float8_kernels)


@pytest.fixture(scope="session")
def float8_expert_kernels(pytestconfig: pytest.Config) -> Path:
    """Float8 kernels of experts: without make stress, one of each op."""
    return _built_or_skipped(pytestconfig, "float8-expert-kernels", _build_float8_expert_kernels)


@pytest.fixture(scope="session")
def gated_kernels(pytestconfig: pytest.Config) -> Path:
    """Kernels of experts with a gate: without make stress, one of them."""
    return _built_or_skipped(pytestconfig, "gated-kernels", _build_gated_kernels)


@pytest.fixture(scope="session")
def backward_kernels(pytestconfig: pytest.Config) -> Path:
    """Kernels of experts for sm_80 that take weights as the forward, and as the backward does."""
    return _built_or_skipped(pytestconfig, "backward-kernels", _build_backward_kernels)


@pytest.fixture(scope="session")
def traced_kernels(pytestconfig: pytest.Config) -> Path:
    """Trace builds of the kernels of experts, and of those of sm_80."""
    return _built_or_skipped(pytestconfig, "traced-kernels", _build_traced_kernels)


@contextmanager
def with_flux_kernels(
    request: pytest.FixtureRequest, arch: str, fixture: str = "ptx_kernels"
) -> Iterator[EmulatedDevice]:
    """An emulated device of this architecture with flux's own kernels, those of a fixture."""
    kernels = request.getfixturevalue(fixture)
    from ptx_device import ptx_device  # needs the PTX machine, which only make test builds

    with ptx_device(kernels, arch) as device:
        yield device


@pytest.fixture(scope="module", params=ARCHS)
def ptx(request: pytest.FixtureRequest) -> Iterator[EmulatedDevice]:
    """An emulated device with flux's own kernels, of each architecture."""
    with with_flux_kernels(request, request.param) as device:
        yield device


@pytest.fixture(scope="module")
def a100(request: pytest.FixtureRequest) -> Iterator[EmulatedDevice]:
    """An emulated device with flux's own kernels for sm_80, which the PTX machine runs fastest."""
    with with_flux_kernels(request, "80") as device:
        yield device


@pytest.fixture(scope="module")
def h200(request: pytest.FixtureRequest) -> Iterator[EmulatedDevice]:
    """An emulated device with flux's own kernels for sm_90a."""
    with with_flux_kernels(request, "90a") as device:
        yield device


@pytest.fixture(scope="module")
def device(emulator: Path) -> Iterator[EmulatedDevice]:
    """An emulated device with stand-in kernels."""
    with emulated_device(emulator) as device:
        yield device


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is full of NaN until it is written."""
    monkeypatch.setenv("FLUX_POISON", "1")

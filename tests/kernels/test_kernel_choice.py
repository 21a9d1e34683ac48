"""The model that ranks built kernels: CUTLASS's rule for stream-K, and what it prefers where."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flux.core.env import KERNEL_CHOICE
from flux.core.knobs import Knobs, Op
from flux.core.spec import OpSpec
from flux.kernels.config import ARCHS, GROUPED, GemmConfig
from flux.kernels.legality import GemmProblem, is_legal
from flux.kernels.ptxas import Usage
from flux.kernels.registry import BuiltKernel, Registry
from flux.kernels.sets import FUSED, config_set
from flux.select import kernel as kernel_module
from flux.select import nvidia_heuristics
from flux.select.cycles import GemmWork, cost, cycles, divide
from flux.select.hardware import blocks_per_wave
from flux.select.kernel import best_of, choose, op_kernel
from flux.select.share import lends_margin, taken_units

SMS = 132
TALL = GemmConfig("ag_gemm", "90a", "bf16", (128, 256, 64), "cooperative", cluster=(2, 1))
SPLIT = replace(TALL, tile=(128, 128, 64), schedule="stream_k")
PAPER = {"ag_gemm": (6144, 12288), "gemm_rs": (12288, 6144)}


def built(configs: list[GemmConfig]) -> list[BuiltKernel]:
    return [BuiltKernel(c, Path("library.so"), c.name, Usage()) for c in configs]


def best(op: str, m: int, archs: tuple[str, ...] = ("90a", "80"), sms: int = SMS) -> GemmConfig:
    n, k = PAPER[op]
    problem = GemmProblem(m, n, k, 8)
    configs = [
        c
        for c in config_set("default", archs)
        if (c.op, c.dtype, c.weight, c.reduce) == (op, "bf16", "nk", "local")
        and is_legal(c, problem)
    ]
    kernel = choose(built(configs), problem, sms)
    assert kernel is not None
    return kernel.config


# -- how tiles are divided -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        (128 * 132, 128, 1024, GemmWork(132, 1, 0, 1, 132)),  # a full wave: whole tiles
        (128 * 66, 128, 1024, GemmWork(132, 1, 0, 1, 66)),  # half full: whole
        (128 * 64, 128, 1024, GemmWork(132, 0, 8, 2, 64)),  # less than half: 128 units of 8 k tiles
        (128 * 50, 128, 4096, GemmWork(132, 0, 25, 4, 50)),  # shares that begin within tiles
        (128 * 44, 128, 4096, GemmWork(132, 0, 22, 3, 44)),  # divides: split-K in three
        (128 * 44, 128, 512, GemmWork(132, 1, 0, 1, 44)),  # 8 k tiles: not split
        (
            128 * (132 + 60),
            128,
            1024,
            GemmWork(132, 0, 24, 2, 192),
        ),  # the tail and the wave before it
        (128 * (3 * 132 + 10), 128, 1024, GemmWork(132, 2, 18, 2, 406)),
        (128 * (132 + 66), 128, 1024, GemmWork(132, 2, 0, 1, 198)),
    ],
)
def test_stream_k_by_cutlass_rule(m: int, n: int, k: int, expected: GemmWork) -> None:
    assert divide(SPLIT, GemmProblem(m, n, k), SMS) == expected


def test_other_schedules_never_share_and_clusters_are_filled_up() -> None:
    assert divide(TALL, GemmProblem(128 * 3, 256, 4096), SMS) == GemmWork(132, 1, 0, 1, 4)
    assert divide(TALL, GemmProblem(128 * 266, 256, 64), SMS) == GemmWork(132, 3, 0, 1, 266)


@pytest.mark.parametrize(
    ("cluster", "blocks"), [((1, 1), 132), ((2, 1), 132), ((2, 2), 116), ((4, 2), 112)]
)
def test_clusters_stay_within_gpcs(cluster: tuple[int, int], blocks: int) -> None:
    assert blocks_per_wave(replace(TALL, cluster=cluster), 132) == blocks


def test_a_cluster_runs_however_few_multiprocessors_there_are() -> None:
    assert blocks_per_wave(replace(TALL, cluster=(2, 2)), 2) == 4


def test_every_k_tile_is_done_once() -> None:
    """Blocks have room for the work, and not for a whole wave more."""
    schedules = ("cooperative", "stream_k")
    sizes = itertools.product((1, 64, 500, 1024, 3000, 8192), (1024, 6144), (512, 4096, 12288))
    for (m, n, k), schedule in itertools.product(sizes, schedules):
        config = replace(SPLIT, schedule=schedule)
        work = divide(config, GemmProblem(m, n, k), SMS)
        depth = -(-k // 64)
        room = work.blocks * (work.whole * depth + work.shared)
        assert room >= work.tiles * depth
        if work.shared:
            assert work.shared >= 8 and work.parts >= 2
            assert work.whole * depth + work.shared < -(-work.tiles // work.blocks) * depth


# -- what is preferred -----------------------------------------------------------------------------


def float8_kernel(configs: list[GemmConfig], fast: bool, m: int = 8192) -> GemmConfig:
    """The kernel of an AGGemm for float8 where these are built."""
    kernels = {kernel.symbol: kernel for kernel in built(configs)}
    device: Any = SimpleNamespace(registry=Registry((), kernels, (), (), ()), capability=(9, 0))
    n, k = PAPER["ag_gemm"]
    sizes = (m, (8 * n,), k, torch.float8_e4m3fn)
    spec = OpSpec(Op.ag_gemm, *sizes, False, "sum", scaling="row", fast_accum=fast)
    return op_kernel(spec, 8, n, device, Knobs(), SMS).built.config


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_default_set_trains(arch: str, dtype: str) -> None:
    """A backward multiplies by weights as [K, N], and so do graphs that torch.compile makes."""
    for op, m, weight in itertools.product((*FUSED, *GROUPED), (16, 8192), ("nk", "kn")):
        problem = GemmProblem(m, 6144, 1536, 8)
        suited = [
            c
            for c in config_set("default", [arch])
            if (c.op, c.dtype, c.weight) == (op, dtype, weight) and is_legal(c, problem)
        ]
        assert choose(built(suited), problem, SMS) is not None, (op, m, weight)


@pytest.mark.parametrize("m", [64, 8192])
def test_float8_is_promoted_unless_the_op_asks_for_fast_sums(m: int) -> None:
    default = config_set("default", ["90a"])
    rows = 64 if m == 64 else 128
    for fast in (False, True):
        config = float8_kernel(default, fast, m)
        assert (config.dtype, config.fast_accum, config.tile[0]) == ("e4m3", fast, rows)
    only_fast = [config for config in default if not config.promoted]
    with pytest.raises(ValueError, match=r"scaling = row, fast_accum = False.*run `flux compile`"):
        float8_kernel(only_fast, False, m)


def test_promotion_costs_time_and_most_with_pingpong() -> None:
    problem = GemmProblem(8192, 6144, 12288, 8)

    def share(schedule: str) -> float:
        fast = replace(TALL, dtype="e4m3", scaling="row", tile=(128, 128, 128), schedule=schedule)
        promoted = cycles(replace(fast, promoted=True), problem, SMS).multiply
        return promoted / cycles(fast, problem, SMS).multiply

    assert 1 < share("cooperative") < share("pingpong") == 1.25


@pytest.mark.parametrize("op", list(PAPER))
@pytest.mark.parametrize("m", [2048, 4096, 8192])
def test_large_problems_take_the_large_tile_in_clusters(op: str, m: int) -> None:
    config = best(op, m)
    assert (config.tile[:2], config.cluster, config.schedule) == ((128, 256), (2, 1), "cooperative")


@pytest.mark.parametrize("op", list(PAPER))
@pytest.mark.parametrize("m", [1, 16, 64])
def test_few_rows_take_tiles_of_64_rows_whole(op: str, m: int) -> None:
    config = best(op, m)
    assert config.tile[0] == 64 and config.schedule == "pingpong" and config.cluster == (1, 1)


def test_medium_problems_avoid_an_idle_wave() -> None:
    """M = 512: 128 tiles of 128 x 192 are 0.97 waves. 192 tiles of 128 x 128 are 1.45, whose tail
    stream-K shares."""
    assert best("ag_gemm", 512).tile[:2] == (128, 192)
    problem = GemmProblem(512, 6144, 12288, 8)
    assert divide(SPLIT, problem, SMS).shared > 0
    assert cost(SPLIT, problem, SMS) < cost(replace(SPLIT, schedule="pingpong"), problem, SMS)


def test_of_equal_costs_the_largest_tile_is_taken() -> None:
    small = replace(SPLIT, tile=(128, 192, 64), schedule="cooperative")
    large = replace(small, tile=(128, 256, 64))
    assert best_of([small, large], [1.0, 1.004]) == 1
    assert best_of([small, large], [1.0, 1.006]) == 0
    assert best_of([large, small], [1.0, 1.0]) == 0


def test_stream_k_gains_nothing_where_cutlass_runs_tiles_whole() -> None:
    problem = GemmProblem(1024, 6144, 12288, 8)  # 2.9 waves
    assert divide(SPLIT, problem, SMS).shared == 0
    assert cost(SPLIT, problem, SMS) >= cost(replace(SPLIT, schedule="cooperative"), problem, SMS)


def test_splitting_k_pays_for_a_deep_problem_and_not_for_a_shallow_one() -> None:
    def gain(k: int) -> float:
        problem = GemmProblem(256, 2048, k)
        whole = replace(SPLIT, schedule="cooperative")
        return cost(whole, problem, SMS) - cost(SPLIT, problem, SMS)

    assert divide(SPLIT, GemmProblem(256, 2048, 1024), SMS).shared > 0
    assert gain(16384) > 0 > gain(1024)


def test_multicast_saves_loads_and_pingpong_saves_epilogues() -> None:
    problem = GemmProblem(8192, 6144, 12288, 8)
    alone = replace(TALL, cluster=(1, 1))
    assert cycles(TALL, problem, SMS).load < cycles(alone, problem, SMS).load
    assert cost(TALL, problem, SMS) < cost(alone, problem, SMS)
    shallow = GemmProblem(8192, 6144, 256, 8)
    pingpong = replace(SPLIT, schedule="pingpong")
    assert cost(pingpong, shallow, SMS) < cost(replace(SPLIT, schedule="cooperative"), shallow, SMS)


def test_few_rows_are_bound_by_reading_the_weight() -> None:
    few, many = GemmProblem(16, 6144, 12288, 8), GemmProblem(8192, 6144, 12288, 8)
    thin = replace(TALL, tile=(64, 64, 64), schedule="pingpong", cluster=(1, 1))
    parts = cycles(thin, few, SMS)
    assert parts.limit == "memory" and parts.memory > 6144 * 12288 * 2 / (16 * SMS)
    assert parts.total >= parts.memory
    assert cycles(TALL, many, SMS).limit == "multiply"


def scheduler(knobs: Knobs, taken: int, built_ones: str = "", m: int = 8192, spare: int = 0) -> str:
    """Return the tile scheduler of the kernel that an AGGemm takes of the default set."""
    configs = [c for c in config_set("default", ["90a"]) if built_ones in c.tile_scheduler]
    kernels = {kernel.symbol: kernel for kernel in built(configs)}
    device: Any = SimpleNamespace(registry=Registry((), kernels, (), (), ()), capability=(9, 0))
    n, k = PAPER["ag_gemm"]
    spec = OpSpec(Op.ag_gemm, m, (8 * n,), k, torch.bfloat16, False, "sum")
    sms = SMS - spare
    kernel = op_kernel(spec, 8, n, device, knobs, sms, taken=taken, spare=spare)
    return kernel.built.config.tile_scheduler


def test_tiles_are_claimed_where_other_kernels_hold_multiprocessors() -> None:
    for taken, expected in ((0, "static"), (1, "dynamic"), (24, "dynamic")):
        assert scheduler(Knobs(), taken) == expected
        assert scheduler(Knobs(), taken, built_ones="static") == "static"
        assert scheduler(Knobs(tile_scheduler="static"), taken) == "static"
    assert scheduler(Knobs(), 24, m=64) == "static"  # few blocks, which fit beside them
    assert scheduler(Knobs(tile_scheduler="dynamic"), 0) == "dynamic"
    with pytest.raises(ValueError, match=r"tile_scheduler = dynamic.*run `flux compile`"):
        scheduler(Knobs(tile_scheduler="dynamic"), 0, built_ones="static")
    assert taken_units(Knobs(), 132, 1) == 0
    assert taken_units(Knobs(sm_margin=24), 132, 1) == 24 and taken_units(Knobs(), 132, 2) == 8


def test_tiles_are_claimed_where_the_margin_is_lent() -> None:
    assert scheduler(Knobs(), 0, spare=8) == "dynamic"
    assert scheduler(Knobs(), 0, spare=8, m=64) == "static"  # whose tiles fit on the others
    assert scheduler(Knobs(), 0, spare=8, built_ones="static") == "static"
    assert scheduler(Knobs(tile_scheduler="static"), 0, spare=8) == "static"


@pytest.mark.parametrize(
    ("op", "nodes", "knobs", "lent"),
    [
        ("ag_gemm", 1, Knobs(), True),
        ("ag_gemm", 1, Knobs(direction="pull", order="ring1d"), True),
        ("ag_gemm", 1, Knobs(order="ring1d"), False),  # its kernels forward rows
        ("ag_gemm", 2, Knobs(), False),
        ("ag_gemm", 1, Knobs(sm_margin=8), False),  # somebody wants it
        ("ag_gemm", 1, Knobs(path="medium"), False),
        ("gemm_rs", 1, Knobs(), True),
        ("gemm_rs", 1, Knobs(sends="copies"), False),  # its kernels follow the copies
        ("gemm_rs", 1, Knobs(reduce="in_kernel"), False),  # its blocks wait to sum
        ("gemm_ar", 1, Knobs(reduce="in_flight"), True),
    ],
)
def test_a_margin_that_nobody_needs_is_lent(op: str, nodes: int, knobs: Knobs, lent: bool) -> None:
    assert lends_margin(Op[op], nodes, knobs) == lent


@pytest.mark.parametrize("ep", [1, 8])
def test_tiles_are_as_high_as_experts_have_rows(ep: int) -> None:
    """Up to 32 rows of an expert three quarters of a high tile would stay empty."""
    configs = config_set("default", ["90a"])
    kernels = {kernel.symbol: kernel for kernel in built(configs)}
    device: Any = SimpleNamespace(registry=Registry((), kernels, (), (), ()), capability=(9, 0))
    heights = {}
    for rows in (4, 16, 32, 128, 1024):
        sizes = (rows * 16, (3072,), 4096, torch.bfloat16)
        spec = OpSpec(Op.ag_gemm, *sizes, False, "sum", experts=128, topk=8, ep=ep)
        heights[rows] = op_kernel(spec, 8, 3072, device, Knobs(), SMS).built.config.tile[0]
    assert heights == {4: 64, 16: 64, 32: 64, 128: 128, 1024: 128}


@pytest.mark.parametrize(
    ("arch", "activation", "transposed", "fused"),
    [
        ("90a", "silu", False, "gated_silu"),
        ("90a", "gelu", False, "gated_gelu"),
        ("90a", "silu", True, "gated_silu"),
        ("80", "silu", False, ""),
    ],
)
def test_gates_are_fused_or_said_not_to_be(
    arch: str, activation: str, transposed: bool, fused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_module, "_warned", set())
    kernels = {kernel.symbol: kernel for kernel in built(config_set("default", [arch]))}
    capability = {"90a": (9, 0), "80": (8, 0)}[arch]
    device: Any = SimpleNamespace(registry=Registry((), kernels, (), (), ()), capability=capability)
    options: dict[str, Any] = {"experts": 8, "topk": 2, "activation": activation, "gated": True}
    spec = OpSpec(Op.ag_gemm, 4096, (2048,), 512, torch.bfloat16, transposed, "sum", **options)
    said = pytest.warns(UserWarning, match=f"fuses gated_{activation}.*separate kernel")
    with nullcontext() if fused else said:
        kernel = op_kernel(spec, 8, 256, device, Knobs(), SMS)
    assert kernel.built.config.activation == (fused or "none")
    assert kernel.activate_after == (not fused)


@pytest.mark.parametrize("rows", [1, 100, 300, 2000, 9000])
def test_tiles_of_experts_are_those_of_a_skewed_router(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    popular = torch.randn(32, generator=generator).mul(0.5).softmax(0)
    counts = torch.multinomial(popular, rows, replacement=True, generator=generator).bincount()
    for height in (64, 128):
        config = replace(TALL, tile=(height, 256, 64), cluster=(1, 1))
        tiles = int((counts + height - 1).div(height, rounding_mode="floor").sum())
        modelled = divide(config, GemmProblem(rows, 256, 64, experts=32), SMS).tiles
        assert abs(modelled - tiles) <= 0.2 * tiles


def test_claims_cost_little_and_late_blocks_a_whole_wave() -> None:
    problem = GemmProblem(8192, *PAPER["ag_gemm"])
    dynamic = replace(TALL, tile_scheduler="dynamic")
    assert 1 < cost(dynamic, problem, SMS) / cost(TALL, problem, SMS) < 1.005
    assert cost(TALL, problem, SMS, taken=1) == 2 * cost(TALL, problem, SMS)
    assert cost(dynamic, problem, SMS, taken=24) == cost(dynamic, problem, SMS - 24)


def test_ampere_gpus_and_virtual_shares_have_a_choice() -> None:
    assert best("ag_gemm", 8192, ("80",), 108).tile == (128, 256, 32)
    assert best("gemm_rs", 1, ("80",), 108).tile[0] <= 64
    assert best("gemm_rs", 64, ("80",), 108).alignment == 8
    for sms in (1, 2, 16, 64):
        assert best("ag_gemm", 700, sms=sms).arch == "90a"


def test_sm_80_code_is_the_last_resort_on_hopper() -> None:
    for op, m in itertools.product(PAPER, (1, 64, 512, 8192)):
        assert best(op, m).arch == "90a"
    old = GemmConfig(
        "ag_gemm", "80", "bf16", (128, 128, 32), "multistage", stages=4, warps=(2, 2), alignment=8
    )
    new = replace(SPLIT, schedule="cooperative", cluster=(1, 1))
    for m in (64, 8192):  # bound by memory, and by multiplying
        problem = GemmProblem(m, 6144, 12288, 8)
        assert cost(old, problem, SMS) > 1.5 * cost(new, problem, SMS)


def test_equal_costs_are_decided_by_name() -> None:
    twins = built([replace(TALL, stages=stages) for stages in (3, 2)])
    kernel = choose(twins, GemmProblem(8192, 6144, 12288), SMS)
    assert kernel is not None and kernel.config.stages == 2
    assert choose([], GemmProblem(1, 1, 1), SMS) is None


# -- nvidia-matmul-heuristics ----------------------------------------------------------------------


class FakeEstimator:
    """Knows 64-row tiles alone, and finds them quick."""

    def __init__(self, gpu: str) -> None:
        assert gpu == "H100_SXM"

    def seconds(self, config: GemmConfig, problem: GemmProblem) -> float | None:
        return 1e-6 * config.tile[1] if config.tile[0] == 64 else None


@pytest.fixture
def estimator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    nvidia_heuristics.estimator.cache_clear()
    monkeypatch.setattr(nvidia_heuristics, "Estimator", FakeEstimator)
    yield
    nvidia_heuristics.estimator.cache_clear()


THIN = [replace(TALL, tile=(64, n, 64), schedule="pingpong", cluster=(1, 1)) for n in (128, 64)]
MANY = GemmProblem(8192, 6144, 12288)


@pytest.mark.usefixtures("estimator")
def test_estimates_of_the_package_rank_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = built([TALL, *THIN])
    assert choose(kernels, MANY, SMS, (9, 0)) is kernels[0]
    monkeypatch.setenv(KERNEL_CHOICE.name, "nvidia")
    assert choose(kernels, MANY, SMS, (9, 0)) is kernels[2]
    assert choose(kernels, MANY, SMS) is kernels[0]
    assert choose(kernels, MANY, SMS, (8, 0)) is kernels[0]  # it ranks sm_90a code alone
    assert choose(kernels, MANY, 64, (9, 0)) is kernels[0]  # a share of a GPU
    assert choose(kernels[:1], MANY, SMS, (9, 0)) is kernels[0]  # no estimate at all


@pytest.mark.usefixtures("estimator")
def test_stream_k_is_scaled_by_our_model() -> None:
    model = nvidia_heuristics.estimator("H100_SXM")
    assert model is not None
    split = replace(THIN[0], tile=(64, 128, 64), schedule="stream_k")
    problem = GemmProblem(64, 2048, 16384)
    times = [nvidia_heuristics.time_of(model, c, problem, SMS) for c in (THIN[0], split)]
    assert times[1] < times[0]


def test_our_model_ranks_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_heuristics.estimator.cache_clear()
    monkeypatch.setattr(nvidia_heuristics, "MODULE", "no_such_module")
    monkeypatch.setenv(KERNEL_CHOICE.name, "nvidia")
    kernels = built([TALL, *THIN])
    assert choose(kernels, MANY, SMS, (9, 0)) is kernels[0]
    nvidia_heuristics.estimator.cache_clear()


def test_invalid_kernel_choice_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNEL_CHOICE.name, "magic")
    with pytest.raises(ValueError, match="expected flux or nvidia"):
        KERNEL_CHOICE.get()


SCRIPT = """
from dataclasses import replace
from flux.select.nvidia_heuristics import estimator
from flux.kernels import GemmConfig, GemmProblem
tall = GemmConfig("ag_gemm", "90a", "bf16", (128, 256, 64), "cooperative", cluster=(2, 1))
model, problem = estimator("H200_SXM"), GemmProblem(8192, 6144, 12288)
thin = replace(tall, tile=(64, 64, 64), schedule="pingpong", cluster=(1, 1))
assert 1e-3 < model.seconds(tall, problem) < model.seconds(thin, problem) < 1e-1
fp8 = replace(tall, tile=(128, 256, 128), dtype="e4m3", scaling="tensor")
assert model.seconds(fp8, problem) < model.seconds(tall, problem)
assert model.seconds(replace(tall, tile=(256, 192, 64)), problem) is None
print("fine")
"""


def test_installed_heuristics_package_ranks_kernels() -> None:
    """In a process of its own, which must end well: the package's destructor does not."""
    pytest.importorskip(nvidia_heuristics.MODULE)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr

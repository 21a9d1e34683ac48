"""Configs of kernels: names, JSON, legality, the sets, and the source that is written for them."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux.kernels import (
    GemmConfig,
    GemmProblem,
    is_legal,
    reason_illegal,
    reason_unsupported,
    reason_wrong_gpu,
    runs_on,
)
from flux.kernels.config import ARCHS, DENSE, GROUPED, OPS
from flux.kernels.generator import (
    CONFIGS_PER_UNIT,
    config_struct,
    family,
    libraries,
    mangled_part,
    translation_unit,
)
from flux.kernels.legality import MAX_WORLD, shared_bytes
from flux.kernels.sets import SETS, config_set
from flux.kernels.sources import csrc

ROOT = Path(__file__).parents[2]

HOPPER = GemmConfig("ag_gemm", "90a", "bf16", (128, 256, 64), "cooperative", cluster=(2, 1))
FP8 = replace(HOPPER, dtype="e4m3", tile=(128, 256, 128), scaling="tensor")
PROMOTED = replace(FP8, tile=(128, 192, 128), promoted=True)
EXPERTS8 = replace(
    PROMOTED,
    op="ag_grouped_gemm",
    tile=(128, 128, 128),
    cluster=(1, 1),
    scaling="row",
    tile_scheduler="dynamic",
)
AMPERE = GemmConfig(
    "ag_gemm", "80", "bf16", (128, 128, 32), "multistage", stages=4, warps=(2, 2), alignment=8
)
BIG = GemmProblem(8192, 6144, 12288, 8)


@pytest.fixture(scope="module")
def full() -> list[GemmConfig]:
    return config_set("full")


# -- sets ------------------------------------------------------------------------------------------


def test_sets_grow_and_hold_only_legal_configs(full: list[GemmConfig]) -> None:
    minimal, default = config_set("minimal"), config_set("default")
    assert set(minimal) < set(default) < set(full)
    for configs in (minimal, default, full):
        assert len(set(configs)) == len(configs)
        assert [reason_illegal(config) for config in configs] == [None] * len(configs)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_set_has_both_ops_on_each_architecture(name: str, arch: str) -> None:
    configs = config_set(name, [arch])
    assert {config.arch for config in configs} == {arch}
    assert {"ag_gemm", "gemm_rs"} <= {config.op for config in configs} <= set(OPS)


def test_default_has_a_kernel_for_awkward_problems() -> None:
    default = config_set("default")
    for op in ("ag_gemm", "gemm_rs"):
        mine = [config for config in default if config.op == op]
        odd = GemmProblem(1000, 1001, 333, 8, aligned_bytes=2)
        assert {config.dtype for config in mine if is_legal(config, odd)} == {"bf16", "fp16"}
        assert any(config.tile[0] <= 16 for config in mine)
        assert {(c.scaling, c.fast_accum) for c in mine if c.dtype == "e4m3"} == {
            ("tensor", True), ("tensor", False), ("row", True), ("row", False)
        }  # fmt: skip
        for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
            usable = [c for c in mine if runs_on(c, capability) and is_legal(c, BIG)]
            assert {c.dtype for c in usable} >= {"bf16", "fp16"}, capability


def test_every_architecture_and_dtype_has_tiles_for_few_and_for_many_rows() -> None:
    for op in ("ag_gemm", "gemm_rs"):
        for arch, dtype, promoted in (
            ("90a", "bf16", False),
            ("90a", "fp16", False),
            ("90a", "e4m3", False),
            ("90a", "e4m3", True),
            ("80", "bf16", False),
        ):
            rows = {
                config.tile[0]
                for config in config_set("default", [arch])
                if (config.op, config.dtype, config.promoted) == (op, dtype, promoted)
            }
            assert min(rows) <= 64 and max(rows) >= 128, (op, arch, dtype)


def test_full_has_clusters_and_tiles_that_default_leaves_out(full: list[GemmConfig]) -> None:
    for op in ("ag_gemm", "gemm_rs"):
        mine = [c for c in full if c.op == op]
        hopper = {(c.tile[:2], c.schedule, c.cluster) for c in mine if c.arch == "90a"}
        for tile, schedule in (((256, 192), "cooperative"), ((64, 256), "pingpong")):
            assert {(tile, schedule, cluster) for cluster in ((1, 1), (2, 1), (1, 2))} <= hopper
        assert ((128, 128, 64), 3) in {(c.tile, c.stages) for c in mine if c.arch == "80"}


def test_a_scattering_tile_needs_a_wider_store_buffer() -> None:
    """Two buffers of 128 rows of 128 bytes; without a D there is no other."""
    plain, scattering = replace(HOPPER, op="gemm"), replace(HOPPER, op="gemm_rs")
    wider = 2 * 128 * (64 - 32) * 2
    assert 0 <= shared_bytes(plain) + wider - shared_bytes(scattering) <= 1024  # a bias less
    assert reason_illegal(replace(scattering, stages=4)) is None
    assert reason_illegal(replace(scattering, stages=5)) is not None


def test_unknown_sets_and_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="minimal, default, full, got 'huge'"):
        config_set("huge")
    with pytest.raises(ValueError, match="80, 90a, got 75"):
        config_set("minimal", ["75"])


def test_names_are_unique_identifiers_and_configs_survive_json(full: list[GemmConfig]) -> None:
    names = [config.name for config in full]
    assert len(set(names)) == len(names)
    for config in full:
        assert re.fullmatch(r"flux_\w{1,120}", config.name)
        assert GemmConfig.from_dict(config.as_dict()) == config


def test_names_say_what_is_not_default() -> None:
    assert HOPPER.name == "flux_ag_gemm_sm90a_bf16_nk_128x256x64_2x1_cooperative"
    other = replace(HOPPER, op="gemm_rs", reduce="in_flight", stages=3, weight="kn")
    assert other.name == "flux_gemm_rs_sm90a_bf16_kn_128x256x64_2x1_cooperative_s3_in_flight"
    assert AMPERE.name == "flux_ag_gemm_sm80_bf16_nk_128x128x32_multistage_s4_w2x2_a8"
    name = "flux_ag_gemm_sm90a_e4m3_nk_128x192x128_2x1_cooperative_tensor_promoted"
    assert PROMOTED.name == name and not PROMOTED.fast_accum
    assert replace(PROMOTED, promoted=False).name == name.removesuffix("_promoted")
    assert HOPPER.cluster_tile == (256, 256)


def test_dicts_that_are_not_a_config_are_refused() -> None:
    values = HOPPER.as_dict()
    with pytest.raises(ValueError, match="GemmConfig: depth"):
        GemmConfig.from_dict({**values, "depth": 3})
    del values["tile"]
    with pytest.raises(ValueError, match="GemmConfig: tile"):
        GemmConfig.from_dict(values)


def test_float8_kernels_from_before_promotion_are_fast() -> None:
    values = FP8.as_dict()
    del values["promoted"]
    assert GemmConfig.from_dict(values) == FP8 and FP8.fast_accum


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"promoted": 1}, "promoted must be true or false, got 1"),
        ({"op": "gemm_ar"}, "op must be one of gemm, ag_gemm, gemm_rs, ag_grouped_gemm"),
        ({"arch": "90"}, "arch must be one of"),
        ({"tile": (128, 128)}, "tile must be 3 positive integers"),
        ({"tile": (128, 0, 64)}, "tile must be 3 positive integers"),
        ({"warps": (2,)}, "warps must be 2 positive integers"),
        ({"stages": -1}, "stages must be an integer >= 0"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        replace(HOPPER, **changes)


# -- legality --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "schedule", "fits"),
    [
        ((256, 128, 64), "cooperative", True),
        ((128, 256, 64), "cooperative", True),
        ((128, 256, 64), "stream_k", True),
        ((256, 256, 64), "cooperative", False),
        ((64, 256, 64), "cooperative", False),
        ((64, 256, 64), "stream_k", False),
        ((64, 256, 64), "pingpong", True),
        ((128, 128, 64), "pingpong", True),
        ((64, 128, 64), "pingpong", True),
        ((128, 256, 64), "pingpong", False),
        ((128, 192, 64), "cooperative", True),
        ((256, 192, 64), "cooperative", True),
        ((128, 192, 64), "pingpong", True),
        ((192, 128, 64), "cooperative", False),
    ],
)
def test_legal_tiles_on_hopper_are_accepted_and_others_rejected(
    tile: tuple[int, int, int], schedule: str, fits: bool
) -> None:
    assert (reason_illegal(replace(HOPPER, tile=tile, schedule=schedule)) is None) is fits


@pytest.mark.parametrize(
    ("tile", "warps", "stages", "fits"),
    [
        ((128, 256, 32), (2, 4), 3, True),
        ((256, 128, 32), (4, 2), 3, True),
        ((128, 64, 32), (2, 2), 4, True),
        ((64, 64, 32), (2, 2), 5, True),
        ((16, 128, 64), (1, 4), 4, True),
        ((32, 128, 32), (1, 4), 4, True),
        ((16, 128, 32), (1, 4), 4, False),  # fewer vectors than threads
        ((16, 64, 64), (1, 2), 5, True),
        ((16, 64, 64), (1, 4), 5, False),  # four warps cannot store 64 columns of 2 rows each
        ((128, 256, 32), (2, 2), 3, False),  # 256 accumulators
        ((128, 128, 16), (2, 2), 4, False),
        ((128, 128, 32), (1, 1), 4, False),
        ((128, 256, 64), (2, 4), 4, False),  # 192 KiB
        ((128, 256, 64), (2, 4), 3, True),
        ((128, 128, 64), (2, 2), 3, True),
    ],
)
def test_legal_tiles_on_ampere_are_accepted_and_others_rejected(
    tile: tuple[int, int, int], warps: tuple[int, int], stages: int, fits: bool
) -> None:
    assert (reason_illegal(replace(AMPERE, tile=tile, warps=warps, stages=stages)) is None) is fits


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (replace(HOPPER, schedule="multistage"), "not multistage"),
        (replace(AMPERE, schedule="pingpong"), "sm_80 has the schedules multistage, stream_k"),
        (replace(HOPPER, op="gemm_rs", activation="gelu"), "sums over ranks first"),
        (
            replace(HOPPER, activation="gated_silu"),
            "is for ag_grouped_gemm on sm_90a",
        ),
        (replace(HOPPER, reduce="in_flight"), "reduce in_flight is for gemm_rs on sm_90a"),
        (replace(AMPERE, op="gemm_rs", reduce="in_flight"), "not gemm_rs on sm_80"),
        (replace(HOPPER, scaling="row"), "must be none for bf16, got row"),
        (replace(FP8, scaling="none"), "e4m3 needs scaling"),
        (replace(FP8, weight="kn"), "weight must be nk"),
        (replace(AMPERE, dtype="e4m3", scaling="row"), "e4m3 needs sm_90a"),
        (replace(HOPPER, promoted=True), "only sums of e4m3 are promoted"),
        (replace(FP8, promoted=True), "256 accumulators per thread, at most 192"),
        (
            replace(PROMOTED, tile=(128, 128, 128), schedule="pingpong"),
            "256 accumulators per thread, at most 192",
        ),
        (replace(HOPPER, cluster=(3, 1)), "cluster extents must be 1, 2 or 4, got (3, 1)"),
        (replace(HOPPER, cluster=(4, 4)), "at most 8 thread blocks"),
        (replace(HOPPER, tile=(128, 252, 64)), "multiple of 8 and at most 256, got 252"),
        (replace(FP8, tile=(128, 248, 128)), "multiple of 16"),
        (replace(EXPERTS8, tile=(128, 128, 64)), "128 bytes of K at once"),
        (replace(EXPERTS8, tile=(128, 192, 128)), "192 accumulators per thread, at most 128"),
        (replace(EXPERTS8, stages=7), "bytes of shared memory, a thread block has 232448"),
        (replace(HOPPER, tile=(128, 256, 128)), "64 or 128 bytes, got 256"),
        (replace(HOPPER, tile=(256, 256, 64)), "256 accumulators per thread, at most 192"),
        (replace(HOPPER, stages=1), "2 stages or more"),
        (replace(HOPPER, stages=5), "bytes of shared memory, a thread block has 232448"),
        (replace(HOPPER, warps=(2, 2)), "warps must be None"),
        (replace(HOPPER, alignment=8), "it must be 0, got 8"),
        (replace(AMPERE, warps=None), "needs warps"),
        (replace(AMPERE, cluster=(2, 1)), "no clusters"),
        (replace(AMPERE, stages=0), "2 to 5 stages, got 0"),
        (replace(AMPERE, alignment=3), "8, 4, 2 or 1 elements, got 3"),
        (replace(AMPERE, alignment=1), "needs 2 stages, got 4"),
        (replace(AMPERE, warps=(3, 2)), "do not divide a tile of 128x128"),
        (replace(AMPERE, weight="kn", tile=(128, 96, 32)), "cannot load a [K, N] tile of 32x96"),
    ],
)
def test_illegal_configs_say_why(config: GemmConfig, reason: str) -> None:
    said = reason_illegal(config)
    assert said is not None and reason in said
    assert reason_unsupported(config, BIG) == said and not is_legal(config, BIG)


@pytest.mark.parametrize(
    ("config", "problem", "reason"),
    [
        (HOPPER, replace(BIG, k=12292), "K must be a multiple of 8, got 12292"),
        (HOPPER, replace(BIG, n=6148), "N must be a multiple of 8, got 6148"),
        (FP8, replace(BIG, k=12296), "K must be a multiple of 16, got 12296"),
        (FP8, replace(BIG, n=6152), None),
        (EXPERTS8, replace(BIG, n=6152), None),
        (replace(EXPERTS8, activation="gated_silu"), replace(BIG, n=6152), "multiple of 16"),
        (HOPPER, replace(BIG, aligned_bytes=8), "multiples of 16 bytes, got 8"),
        (HOPPER, replace(BIG, world=MAX_WORLD + 1), None),
        (replace(HOPPER, op="gemm_rs"), replace(BIG, world=MAX_WORLD), None),
        (replace(HOPPER, op="gemm_rs"), replace(BIG, world=33), "at most 32 ranks, got 33"),
        (AMPERE, replace(BIG, k=12292), "K must be a multiple of 8, got 12292"),
        (replace(AMPERE, alignment=4), replace(BIG, k=12292), None),
        (replace(AMPERE, alignment=4), replace(BIG, k=12294), "K must be a multiple of 4"),
        (replace(AMPERE, alignment=4), replace(BIG, aligned_bytes=4), "multiples of 8 bytes"),
        (replace(AMPERE, alignment=1, stages=2), GemmProblem(1, 1, 1, 1, 2), None),
        (replace(AMPERE, weight="kn"), replace(BIG, n=6148), "N must be a multiple of 8"),
    ],
)
def test_unsupported_problems_have_a_reason(
    config: GemmConfig, problem: GemmProblem, reason: str | None
) -> None:
    said = reason_unsupported(config, problem)
    assert said is None if reason is None else said is not None and reason in said


def test_problem_with_an_invalid_size_raises() -> None:
    with pytest.raises(ValueError, match=r"k must be an integer in \[1, 2\*\*31\), got 0"):
        GemmProblem(1, 1, 0)


def test_kernels_run_only_on_supported_gpus() -> None:
    assert runs_on(HOPPER, (9, 0))
    assert (
        reason_wrong_gpu(HOPPER, (10, 0))
        == "sm_90a code runs on compute capability 9.0 only, not on 10.0"
    )
    assert runs_on(AMPERE, (8, 0)) and runs_on(AMPERE, (9, 0)) and runs_on(AMPERE, (12, 0))
    assert "8.0 or newer" in (reason_wrong_gpu(AMPERE, (7, 5)) or "")
    deep = replace(AMPERE, stages=5, tile=(128, 256, 32), warps=(2, 4))
    assert runs_on(deep, (8, 0)) and runs_on(deep, (9, 0))
    assert "has 101376" in (reason_wrong_gpu(deep, (8, 9)) or "")  # 99 KiB


def test_the_world_limit_is_that_of_the_abi() -> None:
    text = (ROOT / "csrc/cuda/abi.h").read_text()
    stated = re.search(r"^#define FLUX_MAX_WORLD (\d+)$", text, re.MULTILINE)
    assert stated is not None and int(stated.group(1)) == MAX_WORLD


# -- generator -------------------------------------------------------------------------------------


def test_libraries_hold_every_config_once_and_share_what_they_can(full: list[GemmConfig]) -> None:
    groups = libraries(full)
    assert sorted(c.name for group in groups for c in group) == sorted(c.name for c in full)
    for group in groups:
        assert 1 <= len(group) <= CONFIGS_PER_UNIT
        assert len({(c.arch, c.op, c.dtype) for c in group}) == 1
    partial = [group for group in groups if len(group) < CONFIGS_PER_UNIT]
    assert len(partial) <= len({(c.arch, c.op, c.dtype) for c in full})
    assert groups == libraries(config_set("full"))
    shared = libraries(config_set("minimal"), families=True)
    assert len(shared) == len({(c.arch, family(c)) for group in shared for c in group})
    for group in shared:
        assert all(f"FLUX_KERNEL({c.name}," in translation_unit(group) for c in group)


def test_units_of_different_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2 of 2"):
        translation_unit([HOPPER, AMPERE])
    with pytest.raises(ValueError, match="got 0"):
        translation_unit([])
    with pytest.raises(ValueError, match="got 5 of 1"):
        translation_unit([HOPPER] * 5)


def test_a_unit_of_a_trace_build_says_so_first() -> None:
    plain, traced = translation_unit([HOPPER]), translation_unit([HOPPER], traced=True)
    (head, rest), name = plain.split("\n\n", 1), HOPPER.name
    rest = rest.replace(f"FLUX_KERNEL({name},", f"FLUX_KERNEL({name}_traced,")
    assert traced == f"{head}\n\n#define FLUX_TRACE\n\n{rest}"


extents = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256])
configs = st.builds(
    GemmConfig,
    op=st.sampled_from(OPS),
    arch=st.sampled_from(ARCHS),
    dtype=st.sampled_from(["bf16", "fp16", "e4m3"]),
    weight=st.sampled_from(["nk", "kn"]),
    tile=st.tuples(extents, extents, st.sampled_from([16, 32, 64, 128])),
    cluster=st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 2), (4, 4)]),
    schedule=st.sampled_from(["cooperative", "pingpong", "stream_k", "multistage"]),
    stages=st.integers(0, 5),
    activation=st.sampled_from(["none", "gelu", "silu"]),
    scaling=st.sampled_from(["none", "tensor", "row"]),
    reduce=st.sampled_from(["local", "in_flight"]),
    warps=st.sampled_from([None, (1, 2), (2, 2), (1, 4), (2, 4), (4, 2)]),
    alignment=st.sampled_from([0, 1, 2, 4, 8]),
    promoted=st.booleans(),
).filter(lambda config: config.op in DENSE or config.arch == "80")
legal_configs = st.sampled_from(config_set("full"))


@given(st.lists(st.one_of(configs, legal_configs), min_size=2, max_size=8))
def test_names_and_mangled_parts_tell_configs_apart(drawn: list[GemmConfig]) -> None:
    different = list(dict.fromkeys(drawn))
    assert len({config.name for config in different}) == len(different)
    for config in different:
        assert GemmConfig.from_dict(config.as_dict()) == config
        mangled = f"_Z6kernelI{len(config_struct(config))}{config_struct(config)}Evv"
        assert [c for c in different if mangled_part(c) in mangled] == [config]


_TYPES = {"bf16": "bfloat16_t", "fp16": "half_t", "e4m3": "float_e4m3_t"}


@given(st.one_of(configs, legal_configs))
def test_the_struct_holds_the_config(config: GemmConfig) -> None:
    text = translation_unit([config])
    numbers = dict(re.findall(r"(k\w+) = (\d+)[,;]", text))
    m, n, k = config.tile
    warps = config.warps or (0, 0)
    assert {name: int(value) for name, value in numbers.items()} == {
        "kTileM": m,
        "kTileN": n,
        "kTileK": k,
        "kClusterM": config.cluster[0],
        "kClusterN": config.cluster[1],
        "kStages": config.stages,
        "kWarpsM": warps[0],
        "kWarpsN": warps[1],
        "kAlignment": config.alignment or 16 // config.itemsize,
    }
    chosen = dict(re.findall(r"= flux::(\w+)::k(\w+);", text))
    for kind, value in chosen.items():
        field, chosen_value = (re.sub(r"(?<!^)(?=[A-Z])", "_", s).lower() for s in (kind, value))
        assert getattr(config, field) == chosen_value
    assert set(chosen) == {"Schedule", "Activation", "Scaling", "Reduce", "TileScheduler"}
    assert f"kTransposedWeight = {'true' if config.weight == 'kn' else 'false'};" in text
    assert f"kPromoted = {'true' if config.promoted else 'false'};" in text
    (header,) = re.findall('#include "(.*)"', text)
    ((name, space, template),) = re.findall(r"FLUX_KERNEL\((\w+), flux::(\w+)::(\w+)<", text)
    of_op = f"cuda_moe/{space}.cuh" if config.op in GROUPED else f"/{space}/{config.op}.cuh"
    assert name == config.name and header.endswith(of_op)
    assert re.search(rf"\b(struct|using) {template}\b", (ROOT / "csrc" / header).read_text())
    types = re.findall(r"using (Element|Output) = cutlass::(\w+);", text)
    assert types == [("Element", _TYPES[config.dtype]), ("Output", _TYPES[config.output])]


@given(legal_configs, st.integers(1, 4))
def test_legal_config_stays_legal_with_fewer_resources(config: GemmConfig, cluster: int) -> None:
    """Fewer stages, and smaller clusters, need less of everything."""
    if config.arch == "90a":
        for smaller in (1, 2) if config.op in DENSE else ():
            assert reason_illegal(replace(config, cluster=(min(smaller, cluster), 1))) is None
        assert reason_illegal(replace(config, stages=2)) is None
    else:
        for stages in range(2, config.stages):
            assert reason_illegal(replace(config, stages=stages)) is None


@given(st.one_of(configs, legal_configs), st.integers(1, 10**4), st.integers(1, 10**4))
def test_more_alignment_never_hurts(config: GemmConfig, n: int, k: int) -> None:
    problem = GemmProblem(64, n, k, 2, aligned_bytes=4)
    if is_legal(config, problem):
        assert is_legal(config, GemmProblem(64, 16 * n, 16 * k, 2, aligned_bytes=16))
        assert reason_illegal(config) is None


def test_config_modules_do_not_import_torch() -> None:
    code = f"""
import runpy, sys
sys.argv = ["compile_kernels.py", "--set", "minimal", "--list"]
try:
    runpy.run_path({str(ROOT / "tools/compile_kernels.py")!r}, run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
loaded = {{name.partition(".")[0] for name in sys.modules}}
assert not loaded & {{"torch", "numpy", "cutlass_library"}}, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("flux_") == len(config_set("minimal"))


def test_the_checkout_has_the_headers() -> None:
    assert csrc() == ROOT / "csrc"

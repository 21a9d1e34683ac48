"""Spaces and shapes: what the files mean, what is pruned and why, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flux.bench.shapes import Layer, load_shapes
from flux.cli.app import app
from flux.cli.options import parse_duration
from flux.core.datafile import data_root
from flux.core.knobs import AllToAllOp, Knobs, Op, Topology
from flux.core.problem import Problem
from flux.core.sparse_problem import SPARSE, make_problem
from flux.kernels.config import GemmConfig
from flux.kernels.legality import GemmProblem, is_legal
from flux.machine.cluster import load_cluster
from flux.select.choose import ways_of_rows
from flux.select.cost import gemm_ms, raster_ms, traffic_ms
from flux.select.heuristic import kernels_can_push, make_schedule, raster, resolve
from flux.select.one_shot import ONE_SHOTS
from flux.select.predict import predict
from flux.select.space import (
    ALWAYS,
    candidates,
    combinations,
    extent,
    kernels,
    load_space,
    space_for,
)
from flux.select.winners import fit

SPACES = sorted(path.stem for path in (data_root() / "spaces").glob("*.toml"))
MODELS = sorted(path.stem for path in (data_root() / "shapes").glob("*.toml"))


def shape(op: str = "ag_gemm", m: int = 2048, world: int = 2, nodes: int = 1) -> Problem:
    return Problem(Op[op], m, 4096, 1024, "float32", world, nodes)


@pytest.mark.parametrize("name", SPACES)
def test_shipped_spaces_have_every_op(name: str) -> None:
    """On CPUs experts take the values of dense ops; blocks of GemmAllToAll are whole on GPUs."""
    sparse = set(AllToAllOp.__members__ if name == "cpu" else {*SPARSE} - {"gemm_all_to_all"})
    assert set(load_space(name).ops) == {*Op.__members__} | sparse


@pytest.mark.parametrize("op", list(Op.__members__))
@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (3, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("m", [1, 7, 64, 2048])
def test_candidates_can_run_and_are_all_different(op: str, world: int, nodes: int, m: int) -> None:
    problem = shape(op, m, world, nodes)
    topology = Topology(nodes, 1, world // nodes)
    space, cluster = load_space("cpu"), load_cluster("cpu")
    kept, pruned = candidates(space, problem, topology, cluster)
    names = [one.name for one in kept]
    assert len(set(names)) == len(names) and names[:3] == list(ALWAYS)
    for one in kept:
        if not one.knobs.is_tiled:
            continue
        assert nodes == 1 or one.knobs.direction == "push"
        for rank in range(world):  # raises if illegal
            make_schedule(op, (m, 4096, 1024), world, rank, topology, one.knobs)
    fixed = 3  # and between hosts one_shot, of whose ways some are the same for few rows
    fixed += 0 if nodes == 1 else len({resolve(problem, knobs) for knobs in ONE_SHOTS})
    fixed += 0 if nodes == 1 else len(ways_of_rows(problem))
    assert len(kept) + len(pruned) == fixed + len(list(combinations(space, problem)))
    assert all(one.reason for one in pruned)
    again, _ = candidates(space, problem, topology, cluster)
    assert again == kept


def test_pruned_combinations_have_the_reason_that_they_are_refused_for() -> None:
    _, pruned = candidates(
        load_space("cpu"), shape("gemm_rs"), Topology.flat(2), load_cluster("cpu")
    )
    illegal = [one for one in pruned if one.reason.startswith("illegal")]
    assert illegal and all("store=direct" in one.name for one in illegal)
    _, pruned = candidates(load_space("cpu"), shape(m=16), Topology.flat(2), load_cluster("cpu"))
    reasons = {one.reason.split(":")[0].split(" as ")[0] for one in pruned}
    assert "the same schedule" in reasons


def test_the_model_prunes_what_it_expects_to_be_slow() -> None:
    cluster = load_cluster("flux-h800")
    problem = Problem(Op.ag_gemm, 64, 49152, 12288, "bfloat16", 8)
    kept, pruned = candidates(load_space("sm90a"), problem, Topology.flat(8), cluster)
    limit = 1.6 * min(one.predicted_ms for one in kept)
    assert all(one.predicted_ms <= limit for one in kept if one.name not in ALWAYS)
    assert any(one.reason.startswith("too slow: predicted") for one in pruned)


@pytest.mark.parametrize(("cluster", "adds"), [("flux-h800", True), ("flux-a100-pcie", False)])
def test_adds_in_flight_are_tried_where_the_link_has_atomics(cluster: str, adds: bool) -> None:
    full = load_space("sm90a")
    space = replace(
        full,
        ops={"gemm_rs": {"reduce": ["local", "in_flight"]}},
        kernels={"tile": [(128, 256, 64)], "schedule": ["cooperative"]},
    )
    problem = Problem(Op.gemm_rs, 4096, 8192, 8192, "bfloat16", 8)
    kept, pruned = candidates(space, problem, Topology.flat(8), load_cluster(cluster))
    assert any(one.knobs.reduce == "in_flight" for one in kept) == adds
    assert any("needs atomics between GPUs" in one.reason for one in pruned) != adds
    few = Problem(Op.gemm_ar, 64, 8192, 8192, "bfloat16", 8)
    kept, _ = candidates(full, few, Topology.flat(8), load_cluster(cluster))
    assert any(one.name == "in_kernel_by_switch" for one in kept) == adds


@pytest.mark.parametrize(
    ("cluster", "space", "n", "k"),
    [("flux-h800", "sm90a", 49152, 12288), ("flux-a100-pcie", "sm80", 49152, 12288)],
)
@pytest.mark.parametrize("op", list(Op.__members__))
def test_kernels_of_candidates_are_legal(cluster: str, space: str, n: int, k: int, op: str) -> None:
    described = load_cluster(cluster)
    assert space_for(described) == space
    problem = Problem(Op[op], 4096, n, k, "bfloat16", 8)
    kept, pruned = candidates(load_space(space), problem, Topology.flat(8), described)
    local_n, local_k = problem.local
    kernels = {one.kernel for one in kept if one.kernel is not None}
    assert len(kernels) >= 3
    assert all(is_legal(kernel, GemmProblem(4096, local_n, local_k, 8)) for kernel in kernels)
    assert any(one.reason.startswith("illegal: ") for one in pruned)
    assert all(one.kernel is not None for one in kept if one.name != "unfused")


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("name", ["ag_gemm", "gemm_rs", "gemm_ar", "ag_grouped_gemm"])
@pytest.mark.parametrize("m", [16, 4096])
def test_float8_has_kernels_to_choose_from(m: int, name: str, scaling: str, fast: bool) -> None:
    scales = {"scaling": scaling, "fast_accum": fast}
    problem = make_problem(name, m, 16384, 8192, "float8_e4m3fn", 8, scales)
    cluster = load_cluster("h200")
    kept, _ = candidates(load_space("sm90a"), problem, Topology.flat(8), cluster)
    used = {one.kernel for one in kept if one.kernel is not None}
    names = {one.name for one in kept}
    if "in_kernel" not in names:  # by far the fastest of few rows
        assert len({kernel.tile for kernel in used}) >= 2
    for kernel in used:
        assert (kernel.dtype, kernel.tile[2]) == ("e4m3", 128)
        assert (kernel.scaling, kernel.fast_accum) == (scaling, fast)
    wide = make_problem(name, m, 16384, 8192, "bfloat16", 8)
    pushes = kernels_can_push(wide) and not problem.sparse
    # Rows that travel with scales are copied.
    assert ("in_kernel" in names) == (pushes and (name, scaling) != ("ag_gemm", "row"))
    with pytest.raises(ValueError, match="no kernels for float8_e4m3fn on sm_80"):
        candidates(load_space("sm80"), problem, Topology.flat(8), load_cluster("flux-a800"))


@pytest.mark.parametrize("op", list(Op.__members__))
def test_raster_is_tried_on_gpus_and_names_tell_candidates_apart(op: str) -> None:
    problem = Problem(Op[op], 8192, *((49152, 12288) if op == "ag_gemm" else (12288, 49152)),
                    "bfloat16", 8)  # fmt: skip
    kept, _ = candidates(load_space("sm90a"), problem, Topology.flat(8), load_cluster("flux-h800"))
    assert {one.knobs.raster for one in kept if one.name not in ALWAYS} >= {4, 8}
    assert len({one.name for one in kept}) == len(kept)
    default = next(one for one in kept if one.name == "default")
    assert default.kernel is not None
    assert default.knobs.raster == 1024 // default.kernel.cluster_tile[0]


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
@pytest.mark.parametrize(
    ("space", "cluster"), [("sm90a", "flux-h800"), ("sm80", "flux-a100-nvlink")]
)
def test_between_gpu_hosts_every_candidate_crosses_once(op: str, space: str, cluster: str) -> None:
    """In other orders rows cross once for each rank of a host: all would be pruned."""
    n, k = (24576, 8192) if op == "ag_gemm" else (8192, 24576)
    problem = Problem(Op[op], 8192, n, k, "bfloat16", 16, 2)
    kept, _ = candidates(load_space(space), problem, Topology(2, 1, 8), load_cluster(cluster))
    named = [c for c in kept if c.name not in ALWAYS]
    assert {c.knobs.order for c in named} == {"hierarchical"}
    assert len({c.knobs.comm_tile_rows for c in named}) > 1


def test_new_tiles_and_clusters_are_in_the_space() -> None:
    configs, _ = kernels(
        load_space("sm90a"), Problem(Op.ag_gemm, 8192, 49152, 12288, "bfloat16", 8)
    )
    shapes = {(config.tile[:2], config.schedule) for config in configs}
    assert {((64, 256), "pingpong"), ((128, 192), "cooperative"), ((256, 192), "cooperative")} <= (
        shapes
    )
    assert {config.cluster for config in configs} == {(1, 1), (2, 1), (1, 2)}


TALL = GemmConfig("gemm_rs", "90a", "bf16", (128, 256, 64), "cooperative", cluster=(2, 1))


def test_low_bands_read_b_in_every_wave() -> None:
    """N = K = 12288: 302 MB of B, which a wave of 132 tiles of 128 x 256 reads nearly all of."""
    cluster = load_cluster("h200")
    problem = Problem(Op.gemm_rs, 8192, 12288, 12288, "bfloat16", 1)
    waves = 64 * 48 / 132
    moved = {
        height: traffic_ms(problem, cluster, TALL, height) * cluster.device.memory_gbs * 1e6
        for height in (1, 8)
    }
    assert moved[1] / waves == pytest.approx(302e6, rel=0.1)
    assert moved[8] / waves == pytest.approx(102e6, rel=0.1)
    costs = [raster_ms(problem, cluster, TALL, height) for height in (1, 2, 4, 8)]
    assert costs == sorted(costs, reverse=True) and costs[-1] == pytest.approx(0.0, abs=1e-3)
    share = costs[0] / gemm_ms(problem, cluster)
    assert 0.02 < share < 0.1


@pytest.mark.parametrize("op", [Op.ag_gemm, Op.gemm_rs])
def test_bands_of_several_chunks_cost_overlap(op: Op) -> None:
    cluster = load_cluster("flux-h800")
    sizes = (49152, 12288) if op.gathers else (12288, 49152)  # whose links are not what counts
    problem = Problem(op, 4096, *sizes, "bfloat16", 8)
    kernel = replace(TALL, op=op.name)
    exposed = [
        predict(problem, cluster, Knobs(raster=raster), kernel).exposed_ms
        - raster_ms(problem, cluster, kernel, raster)
        for raster in (1, 2, 8, 16)
    ]
    assert exposed[0] == pytest.approx(exposed[1]) and exposed[1] < exposed[2] < exposed[3]


def test_fewer_rows_leave_the_bands_of_a_winner_open() -> None:
    knobs = Knobs(raster=8)
    assert [fit(knobs, 8192, m, 8).raster for m in (8192, 65536, 4096, 8)] == [8, 8, None, None]


def test_size_expressions_are_evaluated() -> None:
    problem = shape(m=1000, world=3)
    kept = {
        text: extent(text, problem)
        for text in ("m", "m/2", "m*2", "chunk", "chunk/4", "chunk/1000", "n", "n/3")
    }
    assert kept == {
        "m": 1000, "m/2": 500, "m*2": 2000, "chunk": 334, "chunk/4": 84, "chunk/1000": 1,
        "n": 1366, "n/3": 456,
    }  # fmt: skip
    assert extent(77, problem) == 77


CPU = (data_root() / "spaces" / "cpu.toml").read_text(encoding="utf-8")
HOPPER = (data_root() / "spaces" / "sm90a.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "old", "new", "complaint"),
    [
        (CPU, '"chunk/2"]', '"chunk%2"]', r"ag_gemm\.tile_rows: expected m, chunk or n.*chunk%2"),
        (CPU, '["push", "pull"]', '["shove"]', r"direction: Knobs.direction must be one of"),
        (CPU, "[gemm_rs]", "[gemm_xx]", r"gemm_xx: unknown key"),
        (CPU, "[ag_gemm]", "[ag_gemm]\nspeed = [1]", r"ag_gemm\.speed: unknown key"),
        (CPU, "prune_above = 2.5", "prune_above = 0.5", r"prune_above: expected a number >= 1"),
        (CPU, "copy_streams = [0, 1]", "copy_streams = []", r"copy_streams: expected a list"),
        (CPU, 'backend = "cpu"', 'backend = "tpu"', r"backend: expected one of cpu, cuda"),
        (HOPPER, "stages = [0]", "colour = [0]", r"kernel\.colour: not a field of a kernel"),
        (HOPPER, "schedule = [", "sched = [", r"kernel\.sched: not a field"),
    ],
)
def test_bad_spaces_are_refused(
    tmp_path: Path, text: str, old: str, new: str, complaint: str
) -> None:
    assert old in text
    file = tmp_path / "space.toml"
    file.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=complaint):
        load_space(file)


# -- shapes ----------------------------------------------------------------------------------------


def test_required_models_are_available() -> None:
    asked = {"gpt3-175b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3-405b"}
    papers = {"llama-25b", "llama-39b", "llama-66b", "gpt-6.7b", "gpt-18b", "gpt-30b", "phi-moe"}
    assert asked | papers | {"flux-paper", "gpt3-13b", "cpu-small"} <= set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_can_be_problems(name: str) -> None:
    shapes = load_shapes(name)
    for world in shapes.tensor_parallel:
        problems = shapes.problems(world)
        assert len(problems) == len(set(problems)) == len(shapes.sizes) + len(shapes.sparse) > 0
        assert all(problem.world == world for problem in problems)


def test_gemms_of_a_layer_follow_from_its_sizes() -> None:
    gpt = Layer(12288, 49152, 96, 96, 128, False)
    assert list(gpt.gemms(decodes=False)) == [
        ("ag_gemm", 3 * 12288, 12288),
        ("gemm_rs", 12288, 12288),
        ("ag_gemm", 49152, 12288),
        ("gemm_rs", 12288, 49152),
    ]
    llama = Layer(8192, 28672, 64, 8, 128, True)
    qkv, _, up, _ = llama.gemms(decodes=False)
    assert qkv == ("ag_gemm", 8192 + 2 * 1024, 8192) and up == ("ag_gemm", 2 * 28672, 8192)
    assert [op for op, _, _ in llama.gemms(decodes=True)] == ["gemm_ar", "gemm_ar"]


def test_the_flux_papers_sizes_are_those_of_gpt3() -> None:
    gpt = {(op, n, k) for op, _, n, k in load_shapes("gpt3-175b").sizes}
    assert {(op, n, k) for op, _, n, k in load_shapes("flux-paper").sizes} <= gpt


def test_sequence_and_batch_can_be_given() -> None:
    sizes = load_shapes("llama3-8b", 1024, [2, 4]).sizes
    assert {m for _, m, _, _ in sizes} == {2048, 4096}
    assert {op for op, *_ in sizes} == {"ag_gemm", "gemm_rs"}
    decoding = load_shapes("llama3-8b", 1, [32]).sizes
    assert {(op, m) for op, m, _, _ in decoding} == {("gemm_ar", 32)}
    with pytest.raises(ValueError, match=r"need a file with a \[layer\]"):
        load_shapes("flux-paper", 1024)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("heads = 96", "heads = 0", r"layer\.heads: expected an integer >= 1"),
        ("kv_heads = 96", "kv_heads = 7", r"layer\.kv_heads: must divide heads = 96, got 7"),
        ("gated = false", "gated = 0", r"layer\.gated: expected true or false"),
        ('dtype = "bfloat16"', 'dtype = "int8"', r"dtype: expected one of"),
        ("batch = [1, 2]", "batch = []", r"workload\[0\]\.batch: expected a list"),
        ("tensor_parallel = [8]", "tensor_parallel = 8", r"tensor_parallel: expected a list"),
    ],
)
def test_bad_shapes_are_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    text = (data_root() / "shapes" / "gpt3-175b.toml").read_text(encoding="utf-8")
    assert old in text
    file = tmp_path / "shapes.toml"
    file.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=complaint):
        load_shapes(file)


# -- the command -----------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_explain_lists_candidates_for_other_hardware() -> None:
    result = run(
        *("--op", "ag_gemm", "--m", "1024,8192", "--n", "49152", "--k", "12288", "--nproc", "8"),
        *("--dtype", "bfloat16", "--cluster", "flux-h800", "--explain", "--json"),
    )
    assert result.exit_code == 0, result.output
    documents = json.loads(result.stdout)
    assert len(documents) == 2
    assert all(set(ALWAYS) <= set(document["candidates"]) for document in documents)
    assert all(document["pruned"] for document in documents)
    plain = run("--op", "gemm_rs", "--m", "64,128", "--explain")
    assert plain.exit_code == 0
    assert plain.stdout.count("try   unfused") == 2 and "  prune " in plain.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--shapes FILE or --op"),
        (["--shapes", "flux-paper", "--op", "ag_gemm"], "--shapes FILE or --op"),
        (["--shapes", "no-such-model"], "no file no-such-model"),
        (["--op", "gemm"], "op must be one of"),
        (["--op", "ag_gemm", "--m", "0"], "--m must be integers"),
        (["--op", "ag_gemm", "--m", "64,x"], "--m must be integers"),
        (["--op", "ag_gemm", "--budget", "soon"], "must look like 90s"),
        (["--op", "ag_gemm", "--budget", "0m"], "must look like 90s"),
        (["--op", "ag_gemm", "--dtype", "int8"], "dtype must be one of"),
        (["--op", "ag_gemm", "--dtype", "e5m2"], "float8_e4m3fn, got 'e5m2'"),
        (["--op", "ag_gemm", "--scaling", "row"], "scaling of float32 must be none, got 'row'"),
        (["--op", "gemm_all_to_all", "--dtype", "e4m3"], "float8 is not supported"),
        (["--op", "ag_gemm", "--candidate-timeout", "0"], "must be above 0"),
        (["--op", "ag_gemm", "--cluster", "nowhere"], "no file nowhere"),
        (["--op", "ag_gemm", "--space", "nowhere"], "no file nowhere"),
        (["--op", "ag_gemm", "--batch", "3"], "are for models"),
        (["--shapes", "llama3-8b", "--sequence", "0"], "--sequence must be at least 1"),
        (
            ["--op", "ag_gemm", "--space", "sm90a", "--backend", "cpu"],
            "the space is for backend cuda",
        ),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    arguments: list[str], complaint: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())


def test_durations_are_parsed() -> None:
    seconds = [parse_duration(text) for text in ("90", "90s", "1.5m", "2h", " 10M ")]
    assert seconds == [90, 90, 90, 7200, 600]
    for text in ("", "m", "-1s", "1d", "1m30s", "0"):
        with pytest.raises(ValueError, match="must look like"):
            parse_duration(text)


def test_bands_of_small_chunks_cover_several() -> None:
    """Each band reads all of B: a quarter more time for M = 512 on an H100 if a band is a chunk."""
    gather, scatter = Op.ag_gemm, Op.gemm_rs
    assert [raster(scatter, m, m // 8, 256) for m in (512, 1024, 2048, 4096, 8192, 65536)] == [
        2, 4, 4, 4, 4, 8,
    ]  # fmt: skip
    # Rows of another node have to leave early.
    assert [raster(scatter, 2048, 2048 // w, 256, nodes=2) for w in (2, 4, 16)] == [4, 2, 2]
    assert [raster(gather, m, m // 8, 256) for m in (1024, 2048, 4096, 8192)] == [1, 1, 2, 4]
    assert [raster(gather, m, m // 8, 64) for m in (64, 128, 256, 512)] == [1, 2, 4, 1]

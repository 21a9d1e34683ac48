"""Default knobs on GPUs: communication tiles and raster follow from the kernel's cluster tile."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emulated import EmulatedDevice
from flux import Knobs, make_schedule
from flux.backends.cuda import setup as cuda
from flux.core.knobs import ClusterTile, Op, Topology
from flux.core.layout import Layout
from flux.core.sparse_problem import SparseProblem, make_problem
from flux.core.spec import OpSpec
from flux.kernels.config import GemmConfig
from flux.machine.cluster import load_cluster
from flux.select.all_to_all import ModelledPath, predicted_ms
from flux.select.heuristic import (
    GPU_COMM_TILE_BYTES,
    GPU_GATHERED_TILE_BYTES,
    MAX_COMM_TILES,
    MAX_RASTER,
    Sizes,
    gpu_comm_tile_rows,
    most_comm_tiles,
    raster,
    resolve,
)
from flux.select.kernel import OpKernel
from flux.transport.virtual import VirtualWorld
from reference import Problem
from virtual_cases import built

BIG = ClusterTile(256, 256)
OPS = ["ag_gemm", "gemm_rs", "gemm_ar"]


def knobs_of(op: str, m: int, world: int = 8, given: Knobs | None = None, nodes: int = 1) -> Knobs:
    """Of the Flux paper's GEMMs."""
    n, k = (6144, 12288) if op == "ag_gemm" else (12288, 6144)
    return resolve(Sizes(Op[op], m, (n, k), world, 2, nodes), given or Knobs(), BIG)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("m", "rows", "gathered", "band", "scattered"),
    [
        (64, 8, 8, 1, 1),
        (512, 64, 64, 1, 2),
        (1024, 128, 128, 1, 4),
        (2048, 256, 256, 1, 4),
        (4096, 256, 512, 2, 4),
        (8192, 256, 1024, 4, 4),
        (65536, 2048, 2048, 8, 8),
    ],
)
def test_default_knobs_for_the_shapes_of_the_flux_paper(
    op: str, m: int, rows: int, gathered: int, band: int, scattered: int
) -> None:
    knobs = knobs_of(op, m)
    assert knobs.comm_tile_rows == (gathered if op == "ag_gemm" else rows)
    assert knobs.raster == (band if op == "ag_gemm" else scattered)
    if op == "ag_gemm":  # each tile that is passed on behind the network costs copies
        between = resolve(Sizes(Op[op], m, (6144, 12288), 8, 2, 2), Knobs(), BIG)
        assert between.comm_tile_rows == gathered
    assert (knobs.direction, knobs.order, knobs.swizzle) == ("push", "direct", "rank_shift")
    assert (knobs.path, knobs.reduce, knobs.store) == ("fused", "local", "staged")


def test_around_a_ring_bands_are_no_higher_than_tiles() -> None:
    """Its links are slower than the GEMM. Few rows are one band, which reads B once."""
    for m, rows, band in ((8192, 512, 2), (65536, 2048, 8), (2048, 256, 1)):
        ring = knobs_of("ag_gemm", m, given=Knobs(order="ring1d"))
        assert (ring.comm_tile_rows, ring.raster) == (rows, band)
    few = knobs_of("ag_gemm", 256, given=Knobs(order="ring1d"))
    assert few.raster == knobs_of("ag_gemm", 256).raster == 1


def test_between_nodes_every_row_crosses_once() -> None:
    knobs = knobs_of("ag_gemm", 8192, given=Knobs(), nodes=2)
    assert (knobs.order, knobs.direction) == ("hierarchical", "push")


@pytest.mark.parametrize("op", OPS)
def test_given_knobs_are_kept(op: str) -> None:
    fixed = Knobs(
        tile=(2, 2),
        raster=3,
        comm_tile_rows=5,
        direction="pull",
        order="ring1d",
        swizzle="xor",
        store="staged",
        reduce="in_flight",
        copy_streams=0,
    )
    assert knobs_of(op, 8192, given=fixed) == fixed
    medium = knobs_of(op, 8192, given=Knobs(path="medium"))
    assert (medium.comm_tile_rows, medium.order) == (1024, "ring1d")


@given(
    chunk=st.integers(1, 40000),
    row_bytes=st.integers(2, 1 << 17),
    cluster=st.sampled_from([16, 64, 128, 192, 256, 512]),
    least=st.sampled_from([GPU_COMM_TILE_BYTES, GPU_GATHERED_TILE_BYTES]),
)
def test_communication_tile_size_is_within_its_limits(
    chunk: int, row_bytes: int, cluster: int, least: int
) -> None:
    rows = gpu_comm_tile_rows(chunk, row_bytes, cluster, least)
    assert 1 <= rows <= chunk
    assert -(-chunk // rows) <= 4 <= MAX_COMM_TILES
    if rows < chunk:
        assert rows % cluster == 0 and rows * row_bytes >= least
    if chunk <= cluster:
        assert rows == chunk
    # Cut where both halves are worth a copy.
    if chunk % (2 * cluster) == 0 and chunk // 2 * row_bytes >= least:
        assert rows <= chunk // 2


@given(chunk=st.integers(1, 40000), cluster=st.sampled_from([16, 64, 128, 192, 256, 512]))
def test_bands_lie_within_chunks(chunk: int, cluster: int) -> None:
    band, rows = raster(Op.ag_gemm, 8 * chunk + 256, chunk, cluster), chunk // cluster
    assert 1 <= band <= max(1, min(MAX_RASTER, rows))
    if rows <= MAX_RASTER:
        assert band == max(1, rows)
    bands = -(-rows // MAX_RASTER)
    if rows:  # as high as bands can be, up to rounding
        assert band * bands >= rows


def test_bands_are_halved_rather_than_cross_a_chunk() -> None:
    assert raster(Op.gemm_rs, 12 * 256 * 4, 12 * 256, 256) == 6
    schedule = make_schedule("ag_gemm", (12 * 256 * 4, 1024, 64), 4, 1, itemsize=2, cluster=BIG)
    assert schedule.knobs.raster == 6
    chunk = 12 * 256
    chunks = [v.row_begin // chunk for v in schedule.visits]
    assert chunks == sorted(chunks, key=[1, 0, 3, 2].index)  # each chunk is done before the next


@pytest.mark.parametrize("op", OPS)
def test_schedules_are_alike_on_all_ranks_and_fit_the_layout(op: str) -> None:
    for n, k in ((5, 7), (1 << 17, 1 << 17)):
        spec = OpSpec(Op[op], 3001, (n,), k, torch.bfloat16, False, "sum")
        layout = Layout.of(
            spec, 4, Knobs(), (128, 256), most_comm_tiles(spec.op, -(-3001 // 4), Knobs(), 1)
        )
        for m in (1, 4, 300, 3001):
            made = [
                make_schedule(op, (m, n, k), 4, rank, itemsize=2, cluster=BIG) for rank in range(4)
            ]
            assert len({schedule.knobs for schedule in made}) == 1
            knobs = made[0].knobs
            assert all(
                getattr(knobs, field.name) is not None
                for field in dataclasses.fields(knobs)
                # by the device, the kernel, the memory of an op, the path
                if field.name not in ("sm_margin", "tile_scheduler", "buffers", "sends")
            )
            if op == "ag_gemm":
                assert made[0].signals <= layout.signals


def test_direct_stores_keep_tiles_inside_one_owner() -> None:
    knobs = Knobs(store="direct")
    schedule = make_schedule("gemm_rs", (1000, 64, 64), 4, 0, knobs=knobs, cluster=BIG)
    assert schedule.knobs.tile == (250, 64)


def test_without_a_cluster_tile_the_cpus_heuristic_chooses() -> None:
    cpu = make_schedule("ag_gemm", (8192, 49152, 12288), 8, 0, itemsize=2)
    gpu = make_schedule("ag_gemm", (8192, 49152, 12288), 8, 0, itemsize=2, cluster=BIG)
    assert (cpu.knobs.raster, cpu.knobs.comm_tile_rows) == (1, 42)
    assert (gpu.knobs.raster, gpu.knobs.comm_tile_rows) == (4, 1024)


def test_the_extents_hold_the_tiles_of_all_weights() -> None:
    configs = [
        GemmConfig("ag_gemm", "90a", "bf16", tile, "cooperative", cluster=cluster)
        for tile, cluster in (((128, 256, 64), (2, 1)), ((128, 128, 64), (1, 4)))
    ]
    tiles = [config.cluster_tile for config in configs]
    assert ClusterTile.of(tiles) == ClusterTile(256, 512)


@pytest.mark.parametrize("op", OPS)
def test_ops_on_gpus_use_the_cuda_heuristic(device: EmulatedDevice, op: str) -> None:
    """The emulated kernels say that they have tiles of 64 x 64."""
    problem = Problem(op, 1025, (13,), 20000, torch.bfloat16)
    with VirtualWorld(2, device) as ranks, built(ranks, problem, tuning=Knobs()) as ops:
        knobs = [op.schedule(1025).knobs for op in ops]
    assert knobs[0] == knobs[1]
    assert knobs[0].tile == (64, 7 if op == "ag_gemm" else 13)
    assert knobs[0].raster == (8 if op == "ag_gemm" else 17)
    assert knobs[0].comm_tile_rows == 513


def test_ranks_with_other_kernels_have_rank_0s_schedule(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 13 columns rank 0 has 7 and rank 1 has 6, for which another kernel may be the best."""
    choose = cuda.op_kernel

    def by_columns(spec: Any, world: int, n: int, *rest: Any) -> OpKernel:
        knobs = choose(spec, world, n, *rest)
        if n == 7:
            return knobs
        config = dataclasses.replace(knobs.built.config, tile=(128, 64, 64))
        return dataclasses.replace(knobs, built=dataclasses.replace(knobs.built, config=config))

    monkeypatch.setattr(cuda, "op_kernel", by_columns)
    problem = Problem("ag_gemm", 1025, (13,), 20000, torch.bfloat16)
    with VirtualWorld(2, device) as ranks, built(ranks, problem, tuning=Knobs()) as ops:
        knobs = [op.schedule(1025).knobs for op in ops]
    assert knobs[0] == knobs[1] and knobs[0].raster == 8  # 4 by the other kernel


def test_topologies_of_several_nodes_have_schedules() -> None:
    for op in OPS:
        for topology in (Topology(2, 1, 2), Topology(4, 1, 1)):
            made = [
                make_schedule(op, (3000, 640, 640), 4, r, topology, itemsize=2, cluster=BIG)
                for r in range(4)
            ]
            assert all(s.visits for s in made) and made[0].knobs.order == "hierarchical"


@pytest.mark.parametrize(
    ("cluster", "op", "m", "nodes", "path"),
    [
        ("h200", "gemm_all_to_all", 65536, 1, "fused"),
        ("h200", "all_to_all_gemm", 65536, 1, "fused"),
        # A tile of rows: nothing is hidden, and messages to another host begin one by one.
        ("flux-h800", "all_to_all_gemm", 8192, 2, "unfused"),
        ("flux-a100-pcie", "all_to_all_gemm", 262144, 1, "fused"),
    ],
)
def test_an_all_to_all_takes_the_path_of_the_cost_model(
    cluster: str, op: str, m: int, nodes: int, path: str
) -> None:
    heads = (32, 8, 8) if op == "gemm_all_to_all" else (32,)
    sizes = (sum(heads) * 128, 4096) if op == "gemm_all_to_all" else (4096, 4096)
    of_heads = {"heads": heads, "head_dim": 128}
    problem = make_problem(op, m, *sizes, "bfloat16", 8 * nodes, of_heads, nodes)
    assert isinstance(problem, SparseProblem)
    machine = load_cluster(cluster)
    times = {way: predicted_ms(problem, machine, way) for way in ("fused", "unfused")}
    assert min(times, key=lambda way: times[way]) == path
    assert ModelledPath(problem, machine).knobs(m).path == path
    slower = dataclasses.replace(
        machine, link=dataclasses.replace(machine.link, gbs=machine.link.gbs / 2)
    )
    assert all(predicted_ms(problem, slower, way) >= time for way, time in times.items())
